"""What a report's page shows of several runs, as plain values that its script draws."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import differences, eval_figures, panels, run_files
from dapo_jax.runtime.run_files import Run, number

POINTS = 1500  # of a curve; where there are more steps, several are averaged to one
# Fields in which runs of one setting may differ, besides the seed: journal.FREE, as a list of
# sections and fields of the flat configuration.
APART = ("seed", "checkpoint.", "log.", "processes.", "scoring.workers", "environment.workers",
         "_")
SEPARATORS = "0123456789/\\_-,= "
NAME_LIMIT = 60  # characters of a setting's name


def payload(runs: Sequence[Run], *, live: bool) -> dict[str, Any]:
    """The whole page: runs, settings (runs that differ in their seed only), curves, tables."""
    settings = grouped(runs)
    drawn = [(panel, [panels.series(panel, run.lines) for run in runs])
             for panel in panels.PANELS]
    width = _width(runs)
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs", "live": live,
        "runs": [_run(run) for run in runs],
        "settings": [{"name": name, "runs": members} for name, members in settings.items()],
        "sections": list(panels.SECTIONS), "colours": list(panels.COLOURS),
        "panels": [_panel(panel, found, width) for panel, found in drawn if any(found)],
        "missing": [panel.title for panel, found in drawn if not any(found)],
        "phases": [_phases(run) for run in runs], "comparisons": compared(runs, settings),
        "changes": changes(runs), "environment": _environment(runs)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """a.b -> value of nested sections."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {
            prefix + name: value}
    return found


def grouped(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Name of a setting -> places of its runs, which differ in their seed at most."""
    keys = [json.dumps({name: value for name, value in flat(run.config).items()
                        if not name.startswith(APART)}, sort_keys=True) for run in runs]
    members: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        # Without a configuration nothing says that two runs are of one setting.
        members.setdefault(key if runs[place].config else f"{place}", []).append(place)
    names = _names(runs, list(members.values()))
    return dict(zip(names, members.values(), strict=True))


def _names(runs: Sequence[Run], groups: Sequence[Sequence[int]]) -> list[str]:
    """By what the settings differ in, where that is short and tells them apart; else by a run."""
    if all(len(group) == 1 for group in groups):
        return [runs[group[0]].name for group in groups]
    firsts = [flat(runs[group[0]].config) for group in groups]
    fields = [name for name in dict.fromkeys(name for one in firsts for name in one)
              if not name.startswith(APART) and len({str(one.get(name)) for one in firsts}) > 1]
    names = [", ".join(f"{name} = {one.get(name)}" for name in fields) for one in firsts]
    if len(set(names)) == len(names) and all(0 < len(name) <= NAME_LIMIT for name in names):
        return names
    shared = [_shared([runs[place].name for place in group]) for group in groups]
    if all(shared) and len(set(shared)) == len(shared):
        return shared
    return [f"{runs[group[0]].name} and {len(group) - 1} more" if len(group) > 1
            else runs[group[0]].name for group in groups]


def _shared(names: Sequence[str]) -> str:
    """What the names begin with alike, without the word and the number of the seed."""
    if len(names) == 1:
        return names[0]
    start = os.path.commonprefix(list(names)).rstrip(SEPARATORS)
    return start.removesuffix("seed").rstrip(SEPARATORS)


def _run(run: Run) -> dict[str, Any]:
    evaluation = None
    if run.evaluation is not None:
        head, rows = eval_figures.table(run.evaluation)
        evaluation = {"step": run.evaluation.get("step"), "samples": run.evaluation["samples"],
                      "head": head, "rows": rows}
    return {"name": run.name, "seed": str(run.config.get("seed", "–")), "notes": list(run.notes),
            "summary": summary(run), "samples": list(run.samples), "evaluation": evaluation,
            "pages": list(run.pages), "borders": _borders(run),
            "config": json.dumps(run.config, indent=2) if run.config else "no config.json"}


def summary(run: Run) -> dict[str, str]:
    """Label to text: what the head of the page says of a run."""
    if not run.lines:
        return {"steps": "0"}
    last = run.lines[-1]["step"]
    phases = [line.get("phase") for line in run.lines]
    counts = {phase: phases.count(phase) for phase in ("sft", "rl") if phase in phases}
    seconds = math.fsum(value for line in run.lines if (value := line.get("time/step")))
    tokens = sum(value for line in run.lines if (value := line.get("sampling/tokens")))
    result = {"steps": ", ".join([str(last), *(f"{n} {phase}" for phase, n in counts.items())])}
    for name in sorted({name for line in run.lines for name in line if is_accuracy(name)}):
        result[f"held-out {name.removeprefix('eval/')}"] = _first_last(run.lines, name)
    result["mean reward"] = _first_last(run.lines, "reward/mean")
    result["time in steps"] = f"{seconds / 60:.1f} min" if seconds else "–"
    result["tokens sampled"] = f"{tokens:,.0f}" if tokens else "–"
    return result


def is_accuracy(name: str) -> bool:
    """Whether a metric is a held-out share of right answers."""
    parts = name.split("/")
    return (parts[0] == "eval" and "interval" not in parts
            and eval_figures.is_accuracy(parts[-1]))


def _first_last(lines: panels.Lines, name: str) -> str:
    values = [line[name] for line in lines if line.get(name) is not None]
    return f"{number(values[0])} → {number(values[-1])}" if values else "–"


def _borders(run: Run) -> list[tuple[float, str]]:
    """Where a phase begins, between two steps, and its name."""
    phases = [(line["step"], line["phase"]) for line in run.lines
              if line.get("phase") in ("sft", "rl")]
    return [((before + after) / 2, new) for (before, old), (after, new)
            in zip(phases, phases[1:], strict=False) if old != new]


# ------------------------------------------------------------------------------------------- curves


def _width(runs: Sequence[Run]) -> int:
    """Steps that are averaged to one point, the same for all runs so that their points meet."""
    last = max((line["step"] for run in runs for line in run.lines[-1:]), default=0)
    return max(1, math.ceil(last / POINTS))


def _panel(panel: panels.Panel, found: Sequence[panels.Series], width: int) -> dict[str, Any]:
    labels = list(dict.fromkeys(label for series in found for label in series))
    rows = [[run, labels.index(label), *thinned(*values, width)]
            for run, series in enumerate(found) for label, values in series.items()]
    plain = {field.name: getattr(panel, field.name) for field in dataclasses.fields(panel)
             if field.name not in ("metrics", "colours")}
    own = list(panel.colours) if panel.colours != panels.COLOURS else None
    return plain | {"labels": labels, "series": rows, "colours": own}


def thinned(steps: np.ndarray, values: np.ndarray, width: int) -> tuple[list[float], list[float]]:
    """Means over stretches of `width` steps, in five digits."""
    if width > 1:
        bins = steps // width
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        counts = np.diff(np.append(starts, len(steps)))
        values = np.add.reduceat(values, starts) / counts
        steps = bins[starts] * width + (width - 1) / 2
    return steps.tolist(), [float(f"{value:.5g}") for value in values]


# ------------------------------------------------------------------------------------------- tables


def _phases(run: Run) -> list[tuple[str, float]]:
    """Seconds of all steps by phase, and what is none of them."""
    found = {phase: math.fsum(line.get(f"time/{phase}") or 0 for line in run.lines)
             for phase in panels.PHASES}
    whole = math.fsum(line.get("time/step") or 0 for line in run.lines)
    # Checkpoints are written between steps.
    rest = whole - math.fsum(value for name, value in found.items() if name != "checkpoint")
    return [(name, value) for name, value in (found | {"other": max(rest, 0.0)}).items()
            if value > 0]


def compared(runs: Sequence[Run], settings: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The last held-out accuracies of every setting against the first one's, where two settings
    have two seeds in common."""
    base, found = next(iter(settings)), []
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line
                          if is_accuracy(name) and len(name.split("/")) == 2)
    for name in sorted(names):
        values = {setting: {runs[place].config.get("seed", 0): value for place in members
                            if (value := _last(runs[place], name)) is not None}
                  for setting, members in settings.items()}
        if differences.comparable(values):
            found += [[name.removeprefix("eval/"), one.name, one.words, _bounds(one.student),
                       _bounds(one.bootstrap), ", ".join(map(str, one.seeds))]
                      for one in differences.against(values, base)]
    return {"base": base, "rows": found}


def _last(run: Run, name: str) -> float | None:
    return next((line[name] for line in reversed(run.lines) if line.get(name) is not None), None)


def _bounds(value: comparison.Interval) -> str:
    if not math.isfinite(value.mean):
        return "–"
    text = f"{value.mean:+.3f}"
    return f"{text} ({value.low:+.3f} to {value.high:+.3f})" if math.isfinite(value.low) else text


def changes(runs: Sequence[Run]) -> dict[str, Any]:
    """Fields that differ between the runs, a column each; of one run, those that are not as by
    default."""
    columns = {run.name: flat({name: value for name, value in run.config.items()
                               if not name.startswith("_")}) for run in runs}
    if len(runs) == 1:
        columns = {"default": flat(config.to_json(config.Config()))} | columns
        if not runs[0].config:
            columns = {}
    names = dict.fromkeys(name for one in columns.values() for name in one)
    rows = [[name, *(_value(one, name) for one in columns.values())] for name in names
            if len({_value(one, name) for one in columns.values()}) > 1]
    return {"head": list(columns), "rows": rows}


def _value(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name], ensure_ascii=False) if name in fields else "–"


def _environment(runs: Sequence[Run]) -> list[list[str]]:
    """Label and a text per run: the entries of config.json that are no field."""
    found = [{key: str(text) for name, value in run.config.items() if name.startswith("_")
              for key, text in (value if isinstance(value, dict) else {name[1:]: value}).items()}
             for run in runs]
    labels = dict.fromkeys(label for one in found for label in one)
    return [[label, *(one.get(label, "–") for one in found)] for label in labels]


def rows_each(count: int) -> int:
    """Samples shown of a file where so many runs are."""
    return max(run_files.LEAST_ROWS, run_files.ROWS // count)
