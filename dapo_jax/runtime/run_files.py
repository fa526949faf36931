"""Work directories as a report reads them: metric lines, configuration, a choice of samples."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.runtime import eval_files, metrics, samples_log

STEP_FILES, EVAL_FILES = 8, 3  # files of samples that are shown, spread over the run
ROWS = 24  # of a file, right and wrong ones alike; fewer where there are many runs
LEAST_ROWS = 4
TEXT_LIMIT = 4000  # characters of a prompt or completion that are kept


@dataclasses.dataclass(frozen=True)
class Run:
    """What a work directory tells."""

    name: str
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl
    config: dict[str, Any]
    samples: tuple[dict[str, Any], ...]  # rows to show
    notes: tuple[str, ...]
    evaluation: dict[str, Any] | None = None  # the last one's report
    pages: tuple[str, ...] = ()  # of evaluations, in the work directory


def read(workdir: pathlib.Path, *, name: str, rows: int = ROWS, empty: bool = False) -> Run:
    """What is there; `empty`: a run without a step yet is one too.

    Raises ConfigError if there are no metrics or a file cannot be read.
    """
    path = workdir / "metrics.jsonl"
    if not (path.is_file() or (empty and workdir.is_dir())):
        raise config.ConfigError(f"{path} does not exist: {workdir} is no work directory of a run")
    content = path.read_bytes() if path.is_file() else b""
    whole = metrics.whole_lines(content)
    if not (whole or empty):
        raise config.ConfigError(f"{path} holds no metrics yet: wait for the first step")
    notes = [] if whole else ["there are no metrics yet"]
    if whole and sum(map(len, whole)) < len(content):
        notes.append(f"metrics.jsonl is torn after line {len(whole)}; the rest is left out")
    samples, more = _samples(workdir, rows)
    return Run(name, tuple(map(json.loads, whole)), _config(workdir / "config.json"),
               tuple(samples), tuple(notes + more), eval_files.newest(workdir),
               tuple(pages(workdir)))


def pages(workdir: pathlib.Path) -> list[str]:
    """Pages of evaluations inside the work directory that are files of it, earliest first."""
    return [name for name in eval_files.pages(workdir)
            if not (workdir / name).is_symlink()]


def stamp(workdir: pathlib.Path) -> tuple:
    """Changes whenever one of the files that `read` looks at does."""
    files = [workdir / "metrics.jsonl", workdir / "config.json",
             *samples_log.paths(workdir, "step"), *samples_log.paths(workdir, "eval"),
             *(workdir / page for page in pages(workdir))]
    found = []
    for path in files:
        try:
            state = path.stat()
        except OSError:  # not there, or just replaced
            continue
        found.append((path.name, state.st_size, state.st_mtime_ns))
    return tuple(found)


def _config(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise config.ConfigError(f"{path} is no JSON object: {error}") from error


def _samples(workdir: pathlib.Path, rows: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows to show of steps and evaluations spread over the run, and notes."""
    chosen = (_spread(samples_log.paths(workdir, "step"), STEP_FILES)
              + _spread(samples_log.paths(workdir, "eval"), EVAL_FILES))
    shown, notes = [], []
    for path in chosen:
        found, torn = _parsed(path)
        if torn:
            notes.append(f"{path.name} is torn after row {len(found)}; the rest is left out")
        kind = "held out" if path.stem.startswith("eval") else "training"
        shown += [_row(row, kind, samples_log.step_of(path)) for row in _choose(found, rows)]
    return shown, notes


def _spread(paths: Sequence[pathlib.Path], most: int) -> list[pathlib.Path]:
    """First, last, and others at equal distances."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(place * (len(paths) - 1) / (most - 1))] for place in range(most)]


def _parsed(path: pathlib.Path) -> tuple[list[dict[str, Any]], bool]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="backslashreplace").splitlines():
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            return rows, True
    return rows, False


def _choose(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """As many right as wrong rows where there are, of different prompts first."""
    chosen = []
    for right in (True, False):
        some = [row for row in rows if _right(row) == right]
        firsts: dict[Any, Mapping[str, Any]] = {}
        for row in some:
            firsts.setdefault(row.get("prompt_id"), row)
        others = [row for row in some if row is not firsts[row.get("prompt_id")]]
        chosen += [*firsts.values(), *others][:most // 2]
    return chosen


def _right(row: Mapping[str, Any]) -> bool:
    return (row.get("reward") or 0) > 0


def _row(row: Mapping[str, Any], kind: str, step: int) -> dict[str, Any]:
    words = {True: "yes", False: "no", None: "–"}
    reward = "failed" if row.get("valid") is False else number(row.get("reward"))
    return {"kind": kind, "step": step, "right": _right(row), "reward": reward,
            "length": row.get("length", "–"), "stopped": words[row.get("stopped")],
            "kept": words[row.get("kept")], "level": str(row.get("level") or ""),
            **{name: _short(row.get(name)) for name in ("prompt", "completion", "answer")},
            **_turns(row.get("episode"))}


def _turns(episode: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the page shows of an episode in place of its completion."""
    if not episode:
        return {}
    said = [{"text": _short(turn["text"]), "reply": "" if turn["done"] else _short(turn["reply"]),
             "note": _note(at, turn), "fault": _faulty(turn)}
            for at, turn in enumerate(episode["turns"], start=1)]
    if episode["last_text"]:
        said.append({"text": _short(episode["last_text"]), "reply": "", "note": "", "fault": False})
    failure = episode["failure"] and f"{episode['failure']}: {episode['message']}"
    return {"turns": said, "ended": episode["ended"], "failure": _short(failure)}


def _note(at: int, turn: Mapping[str, Any]) -> str:
    parts = [f"{name.replace('_', ' ')} {number(value)}" for name, value in turn["parts"].items()]
    return _short(" · ".join([f"turn {at}", f"reward {number(turn['reward'])}",
                              f"{turn['seconds']:.3f} s", *parts]))


def _faulty(turn: Mapping[str, Any]) -> bool:
    return any(value and "error" in name for name, value in turn["parts"].items())


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    left = len(text) - TEXT_LIMIT
    return f"{text[:TEXT_LIMIT]} … {left} more characters" if left > 0 else text


def number(value: Any) -> str:
    """A figure in up to three decimals; a dash where there is none."""
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else "–"
