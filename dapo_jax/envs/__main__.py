"""List the tasks and the environments of several turns, or show problems of one.

    python -m dapo_jax.envs              every task, those of reasoning-gym too, with an example
    python -m dapo_jax.envs countdown 5  problems of one, with a right answer and its reward
    python -m dapo_jax.envs NAME [N]     N is 3 if it is not given

NAME is a task, an environment (also module:NAME, one of your own), or a data set of
reasoning-gym.
"""

import contextlib
import io
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import command_line, config
from dapo_jax.data import sources
from dapo_jax.envs import base, environments, episodes, reasoning_gym

SHOWN = 3
WIDTH = 100
RULE = "\n" + "-" * 40 + "\n"
GYM = "reasoning_gym"
ENVIRONMENTS = {name: environments.environment(name) for name in environments.ENVIRONMENTS}


def _tasks() -> dict[str, str]:
    """Name to purpose of what can be shown."""
    tasks = {name: task.purpose for name, task in sources.TASKS.items()}
    tasks |= {name: f"(several turns) {one.purpose}" for name, one in ENVIRONMENTS.items()}
    try:
        return tasks | {f"{GYM}:{name}": "" for name in reasoning_gym.names()}
    except config.ConfigError as error:
        return tasks | {GYM: f"{tasks[GYM]} (not installed: {error})"}


def records(name: str, count: int) -> list[base.Record]:
    """A few problems of a task, an environment, or a data set of reasoning-gym.

    ConfigError if there is none of this name.
    """
    if found := _environment(name):
        return _own_problems(found, count)
    name, _, dataset = name.partition(":")
    if name not in sources.TASKS:
        name, dataset = GYM, name
        if dataset not in reasoning_gym.names():
            known = [*sources.TASKS, *ENVIRONMENTS, *reasoning_gym.names()]
            raise config.ConfigError(f"there is no task {dataset!r}{config.near(dataset, known)}; "
                                     "python -m dapo_jax.envs lists all")
    task = sources.task(name)
    if task.examples:
        return list(task.examples[:count])
    settings = config.Task(name=name, dataset=dataset or "chain_sum", train_size=count)
    cfg = config.Config(task=settings, eval=config.Evaluation(prompts=1))
    return task.build(cfg, "train")[0]


def _environment(name: str) -> episodes.Environment | None:
    """The environment of that name, "module:NAME" too; None: it names no environment."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    own = ":" in name and not name.startswith(f"{GYM}:")
    return environments.environment(name) if own else None


def _own_problems(found: episodes.Environment, count: int) -> list[base.Record]:
    made = found.records
    return environments.asked(found, "records", lambda: made(
        seed=0, split="train", count=count)) if made else []


def _listing() -> str:
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    lines = []
    for name, purpose in _tasks().items():
        lines.append(f"{name}  {purpose}".rstrip())
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # one of reasoning-gym prints dots
                (record,) = records(name, 1)[:1]
        except (config.ConfigError, ValueError) as error:  # shown in place of the example
            lines.append(textwrap.shorten(f"    {error}", width))
            continue
        lines.append("    " + textwrap.shorten(f"{record['prompt']}", width * 2 - 8))
        lines.append("    → " + textwrap.shorten(f"{record['answer']}", width - 8))
    return "\n".join(lines)


def _shown(name: str, count: int) -> str:
    if found := _environment(name):
        return RULE.join(_problem(record, None) for record in records(name, count)) or (
            f"{found.name}: {found.purpose or 'several turns'}; it has no problems of its own and "
            "is played on those of the task")
    task = sources.task(name if name in sources.TASKS else GYM)
    reward = base.resolve_reward(task.reward)
    return RULE.join(
        _problem(record, reward(record["answer"], record)) for record in records(name, count))


def _problem(record: Mapping[str, Any], reward: float | None) -> str:
    unknown = reward is None or record["answer"] == base.NO_ANSWER
    score = "" if unknown else f"\nreward of it: {reward:g}"
    return f"{record['prompt']}\n\nright answer: {record['answer']}{score}"


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 for a name that does not exist."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return command_line.DONE
    if len(arguments) > 2 or "".join(arguments).startswith("-") or not "".join(
            arguments[1:] or "1").isdecimal():
        print(f"error: unexpected {' '.join(arguments)}: a name, then a number; see "
              "python -m dapo_jax.envs --help", file=sys.stderr)
        return command_line.BAD_INPUT
    if not arguments:
        print(_listing())
        return command_line.DONE
    try:
        print(_shown(arguments[0], int([*arguments[1:], str(SHOWN)][0])))
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return command_line.BAD_INPUT
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
