"""Play the episodes of a run's log again, with the model's texts as they were.

    python -m dapo_jax.replay_episodes DIR/samples/step_000012.jsonl [...]
    python -m dapo_jax.replay_episodes runs/calculator/samples/step_000120.jsonl

Prints one JSON object: episodes (compared), differing (the environment said something else: it is
not deterministic, or has changed), failed (now, though not then), skipped (rows of one turn, or
whose environment failed then before it began), first (what differs first). Exit status 0, 1 if
any differ or fail, 2 if a file cannot be used.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dapo_jax import command_line, config
from dapo_jax.envs import environments, episode_play, episode_pool
from dapo_jax.rollout import episodes_log


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a file of DIR/samples."""

    where: str  # file:line
    episode: episode_play.Episode | None  # None: of one turn
    limits: episode_pool.Limits  # the run's


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file of DIR/samples; ConfigError names the line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise config.ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise config.ConfigError(f"{path} is no row of DIR/samples: it is not UTF-8") from error
    limits, found = limits_of(path.resolve().parent.parent), []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            found.append(Row(where, episodes_log.episode(json.loads(line)), limits))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise config.ConfigError(f"{where} is no row of DIR/samples: {error!r}") from error
    return found


def limits_of(workdir: pathlib.Path) -> episode_pool.Limits:
    """How long a run let its environment work, and in how many processes; the defaults where its
    config.json is not there any more. ConfigError: it is no configuration."""
    path = workdir / "config.json"
    if not path.is_file():
        return episode_pool.Limits()
    try:
        return episode_pool.limits(json.loads(path.read_text(encoding="utf-8"))["environment"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise config.ConfigError(f"{path} is no configuration of a run: {error!r}") from error


def replay(rows: Sequence[Row]) -> dict[str, Any]:
    """Play the episodes on their environments and compare; what the command prints."""
    result: dict[str, Any] = {"episodes": 0, "differing": 0, "failed": 0, "skipped": 0, "first": ""}
    named: dict[tuple[str, episode_pool.Limits], list[tuple[str, episode_play.Episode]]] = {}
    for row in rows:
        if row.episode is None or not row.episode.messages:
            result["skipped"] += 1
        else:
            played = named.setdefault((row.episode.environment, row.limits), [])
            played.append((row.where, row.episode))
    for (name, limits), some in named.items():
        environments.ready(environments.environment(name))
        with episode_pool.open(name, limits) as pool:
            found = episode_play.replay(pool, [one for _, one in some])
        result["episodes"] += found.compared
        result["differing"] += len(found.differing)
        result["failed"] += len(found.failed)
        if found.first and not result["first"]:
            result["first"] = f"{some[found.differing[0]][0]}: {found.first}"
    return result


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return command_line.DONE
    if not arguments or arguments[0].startswith("-"):
        wrong = f"unknown flag {arguments[0]}" if arguments else "name files of DIR/samples"
        print(f"error: {wrong}; see python -m dapo_jax.replay_episodes --help", file=sys.stderr)
        return command_line.BAD_INPUT
    try:
        result = replay([row for path in arguments for row in read(pathlib.Path(path))])
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return command_line.BAD_INPUT
    print(json.dumps(result))
    return int(bool(result["differing"] or result["failed"]))


if __name__ == "__main__":
    command_line.leave(main)
