"""DIR/samples: the rollouts of a run as text, a file per step.

Fields of a row: step, round, group, prompt_id, visit, sample, prompt, completion, answer, reward,
shaped, valid, stopped, length, kept (true, false, or null: not decided), level; of an evaluation
also mode (sampled or greedy), extracted, verdict (right, wrong or invalid), dataset; of an episode
of several turns also episode (rollout/episodes_log.py). They are read by report.py.
"""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from dapo_jax.runtime import metrics

FOLDER = "samples"


def write(workdir: str | os.PathLike, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows of one round to DIR/samples/step_000012.jsonl."""
    _write(workdir, f"step_{step:06d}.jsonl", rows, "a")


def write_eval(workdir: str | os.PathLike, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write DIR/samples/eval_000012.jsonl, in place of an earlier evaluation of that step."""
    _write(workdir, f"eval_{step:06d}.jsonl", rows, "w")


def cut(workdir: str | os.PathLike, step: int) -> None:
    """Remove the files of steps and evaluations later than `step`; -1 removes all of them."""
    for path in paths(workdir, "step") + paths(workdir, "eval"):
        if step_of(path) > step:
            path.unlink()


def paths(workdir: str | os.PathLike, kind: str) -> list[pathlib.Path]:
    """Files of a kind, `step` or `eval`, earliest first."""
    return sorted((pathlib.Path(workdir) / FOLDER).glob(f"{kind}_[0-9]*.jsonl"), key=step_of)


def step_of(path: pathlib.Path) -> int:
    """The step in a file's name."""
    return int(path.stem.split("_")[1])


def _write(workdir: str | os.PathLike, name: str, rows: Iterable[Mapping[str, Any]],
           mode: str) -> None:
    folder = pathlib.Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(metrics.plain(row), allow_nan=False) + "\n" for row in rows)
    with (folder / name).open(mode, encoding="utf-8") as file:
        file.write(text)
