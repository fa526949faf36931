"""What a work directory recorded of dynamic sampling: outcomes, counts and seconds per step.

Outcomes come from DIR/samples/step_*.jsonl, one row per sample in admission order, of whose fields
these are read: group (numbered as admitted), reward (raw), valid. Counts and seconds come from
DIR/metrics.jsonl.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.runtime import metrics, samples_log

TOLERANCE = config.Filter().tolerance
FIELDS: dict[str, Any] = {"group": int, "reward": (int, float), "valid": bool}


@dataclasses.dataclass(frozen=True)
class Pools:
    """Prompts that each step sampled, in admission order."""

    steps: tuple[int, ...]
    informative: tuple[np.ndarray, ...]  # bool[m] each
    samples: tuple[np.ndarray, ...]  # i32[m] each: of the prompt's group


@dataclasses.dataclass(frozen=True)
class Counts:
    """One entry per step of rollouts that asked for prompts, f64[n] each; NaN: not recorded."""

    step: np.ndarray
    asked: np.ndarray
    informative: np.ndarray
    rounds: np.ndarray
    samples: np.ndarray
    seconds: np.ndarray  # of generating
    compiles: np.ndarray


COLUMNS = {"step": "step", "asked": "sampling/asked", "informative": "groups/informative",
           "rounds": "sampling/rounds", "samples": "sampling/samples", "seconds": "time/rollout",
           "compiles": "compiles"}


def pools(workdir: pathlib.Path) -> Pools:
    """The recorded outcomes. Raises ConfigError for a missing, torn or shortened recording."""
    paths = samples_log.paths(workdir, "step")
    if not paths:
        raise config.ConfigError(f"{workdir / samples_log.FOLDER} holds no step_*.jsonl: no run "
                                 "recorded its samples there")
    whole = dict(zip(*(getattr(counts(workdir), name).tolist() for name in ("step", "samples")),
                     strict=True)) if (workdir / "metrics.jsonl").is_file() else {}
    found = []
    for path in paths:
        rows = _rows(path)
        step = samples_log.step_of(path)
        if len(rows) < whole.get(step, 0):
            raise config.ConfigError(
                f"{path} holds {len(rows)} of the {whole[step]:.0f} samples of step {step}: record "
                "with log.samples_per_step = 0, which keeps all")
        if rows:
            found.append((step, *_outcomes(rows)))
    return Pools(*map(tuple, zip(*found, strict=True)))


def counts(workdir: pathlib.Path) -> Counts:
    """The recorded counts. Raises ConfigError if there is no step with rollouts."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise config.ConfigError(f"{path} does not exist: {workdir} is no work directory of a run")
    lines = [json.loads(line) for line in metrics.whole_lines(path.read_bytes())]
    lines = [line for line in lines if line.get("sampling/asked")]
    if not lines:
        raise config.ConfigError(f"{path} holds no step that sampled prompts")
    return Counts(*(np.array([_number(line.get(name)) for line in lines])
                    for name in COLUMNS.values()))


def settings(workdir: pathlib.Path) -> Mapping[str, Any]:
    """The `rl` section of DIR/config.json, or nothing where there is none."""
    path = workdir / "config.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["rl"])
    except (ValueError, TypeError, KeyError) as error:
        raise config.ConfigError(f"{path} is no configuration of a run: {error!r}") from error


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _rows(path: pathlib.Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise config.ConfigError(f"{path}, line {number}: no JSON object ({error}); remove the "
                                     "file, so that its step is left out") from error
        for name, kind in FIELDS.items():
            if not isinstance(row.get(name), kind):
                raise config.ConfigError(f"{path}, line {number}: field {name!r} is missing or no "
                                         f"{getattr(kind, '__name__', 'number')}")
        rows.append(row)
    return rows


def _outcomes(rows: list[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Informative or not, and samples, of each group; groups are numbered as admitted."""
    ids, place = np.unique([row["group"] for row in rows], return_inverse=True)
    valid = np.array([row["valid"] for row in rows])
    reward = np.array([row["reward"] for row in rows], np.float64)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, place[valid], reward[valid])
    np.maximum.at(high, place[valid], reward[valid])
    return high - low > TOLERANCE, np.bincount(place).astype(np.int32)
