"""Draw one or several runs into one HTML page, with PNG files beside it.

    python -m dapo_jax.report runs/quickstart
    python -m dapo_jax.report runs/one runs/two --out=runs/both

Writes OUT/report.html (self-contained) and OUT/report/*.png, where OUT is the first DIR unless
given. Several runs are overlaid. Reads metrics.jsonl, config.json and samples/ of each DIR.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.runtime import eval_figures, eval_files, metrics, page, plots, samples_log

SAMPLES_SHOWN = 4  # of a file: right ones, and as many wrong ones


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


def read_run(workdir: pathlib.Path, *, name: str) -> Run:
    """Raises ConfigError if there are no metrics or a file cannot be read."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise config.ConfigError(f"{path} does not exist: {workdir} is no work directory of a run")
    content = path.read_bytes()
    whole = metrics.whole_lines(content)
    if not whole:
        raise config.ConfigError(f"{path} holds no metrics yet: wait for the first step")
    notes = []
    if sum(map(len, whole)) < len(content):
        notes.append(f"metrics.jsonl is torn after line {len(whole)}; the rest is left out")
    samples, more = _read_samples(workdir)
    return Run(name, tuple(map(json.loads, whole)), _read_config(workdir / "config.json"),
               tuple(samples), tuple(notes + more), eval_files.newest(workdir),
               tuple(eval_files.pages(workdir)))


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise config.ConfigError(f"{path} is no JSON object: {error}") from error


def _read_samples(workdir: pathlib.Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows to show of the first and last step and the last evaluation, and notes."""
    steps = samples_log.paths(workdir, "step")
    chosen = dict.fromkeys(steps[:1] + steps[-1:] + samples_log.paths(workdir, "eval")[-1:])
    rows, notes = [], []
    for path in chosen:
        found, torn = _parse_rows(path)
        if torn:
            notes.append(f"{path.name} is torn after row {len(found)}; the rest is left out")
        place = f"{'held out, ' if path.stem.startswith('eval') else ''}{samples_log.step_of(path)}"
        rows += [_shown(row, place) for row in _choose(found)]
    return rows, notes


def _parse_rows(path: pathlib.Path) -> tuple[list[dict[str, Any]], bool]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="backslashreplace").splitlines():
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            return rows, True
    return rows, False


def _choose(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few right and a few wrong rows, of different prompts where there are enough."""
    chosen = []
    for right in (True, False):
        some = [row for row in rows if _right(row) == right]
        firsts: dict[Any, Mapping[str, Any]] = {}
        for row in some:
            firsts.setdefault(row.get("prompt_id"), row)
        others = [row for row in some if row is not firsts[row.get("prompt_id")]]
        chosen += [*firsts.values(), *others][:SAMPLES_SHOWN]
    return chosen


def _right(row: Mapping[str, Any]) -> bool:
    return (row.get("reward") or 0) > 0


def _shown(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    words = {True: "yes", False: "no", None: "–"}
    reward = "failed" if row.get("valid") is False else _number(row.get("reward"))
    return {"place": place, "right": _right(row), "reward": reward,
            "length": row.get("length", "–"), "stopped": words[row.get("stopped")],
            "kept": words[row.get("kept")],
            **{name: row.get(name) for name in ("prompt", "completion", "answer")}}


# ------------------------------------------------------------------------------------------ summary


def summary(run: Run) -> dict[str, str]:
    """Label to text: what the head of the page says of a run."""
    last = run.lines[-1]["step"]
    phases = [line.get("phase") for line in run.lines]
    counts = {phase: phases.count(phase) for phase in ("sft", "rl") if phase in phases}
    seconds = math.fsum(value for line in run.lines if (value := line.get("time/step")))
    tokens = sum(value for line in run.lines if (value := line.get("sampling/tokens")))
    result = {"steps": ", ".join([str(last), *(f"{n} {phase}" for phase, n in counts.items())])}
    for name in sorted({name for line in run.lines for name in line if _is_accuracy(name)}):
        result[f"held-out {name.removeprefix('eval/')}"] = _first_last(run.lines, name)
    result["mean reward"] = _first_last(run.lines, "reward/mean")
    result["time in steps"] = f"{seconds / 60:.1f} min" if seconds else "–"
    result["tokens sampled"] = f"{tokens:,.0f}" if tokens else "–"
    for name, value in run.config.items():
        if name.startswith("_"):
            inner = value if isinstance(value, dict) else {name[1:]: value}
            result |= {str(key): str(text) for key, text in inner.items()}
    return result


def _is_accuracy(name: str) -> bool:
    parts = name.split("/")
    return (parts[0] == "eval" and "interval" not in parts
            and eval_figures.is_accuracy(parts[-1]))


def _evaluation(run: Run) -> dict[str, Any] | None:
    """The table of the run's last evaluation and where its responses are seen."""
    if run.evaluation is None:
        return None
    head, rows = eval_figures.table(run.evaluation)
    return {"step": run.evaluation.get("step"), "samples": run.evaluation["samples"],
            "head": head, "rows": rows, "page": run.pages[-1] if run.pages else ""}


def _first_last(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [line[name] for line in lines if line.get(name) is not None]
    return f"{_number(values[0])} → {_number(values[-1])}" if values else "–"


def _number(value: Any) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else "–"


# -------------------------------------------------------------------------------------------- entry


def write(runs: Sequence[Run], out: pathlib.Path) -> pathlib.Path:
    """Write OUT/report.html and OUT/report/*.png; returns the page's path."""
    lines = {run.name: run.lines for run in runs}
    images = {panel: plots.draw(panel, lines) for panel in plots.PANELS}
    folder = out / "report"
    folder.mkdir(parents=True, exist_ok=True)
    for panel, image in images.items():
        path = folder / f"{panel.name}.png"
        path.unlink(missing_ok=True)  # an earlier report may have had it
        if image:
            path.write_bytes(image)
    text = page.render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle="Reinforcement learning with verifiable rewards: dapo_jax",
        runs=[{"name": run.name, "summary": summary(run), "notes": run.notes,
               "samples": run.samples, "evaluation": _evaluation(run),
               "config": json.dumps(run.config, indent=2) if run.config else "no config.json"}
              for run in runs],
        plots=[{"title": panel.title, "note": panel.note, "image": image}
               for panel, image in images.items() if image],
        missing=[panel.title for panel, image in images.items() if not image])
    target = out / "report.html"
    target.write_text(text, encoding="utf-8")
    return target


def _names(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """Last parts of the paths, as many as tell them apart."""
    paths = [path.resolve() for path in workdirs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = [os.sep.join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 if a directory holds no run."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.report", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__)
    parser.add_argument("workdir", nargs="+", type=pathlib.Path, metavar="DIR",
                        help="work directory of a run; several are overlaid")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="where report.html and report/ go; default: the first DIR")
    given = parser.parse_args(arguments)
    workdirs = list(dict.fromkeys(given.workdir))
    try:
        names = _names(workdirs)
        runs = [read_run(path, name=name) for path, name in zip(workdirs, names, strict=True)]
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(write(runs, given.out or workdirs[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
