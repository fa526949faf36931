"""What came of a sweep: metrics by setting, averaged over seeds, as Markdown, CSV and a figure."""

import csv
import dataclasses
import io
import json
import pathlib
import shlex
from collections.abc import Collection, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from dapo_jax import sweeps
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import differences, plots
from dapo_jax.runtime import metrics as metric_files
from dapo_jax.studies import pages, runs, sweep_points

TICKS = 6  # values that are written below an axis, each
LOG_SPAN = 8  # largest over smallest value from which an axis is logarithmic


@dataclasses.dataclass(frozen=True)
class Row:
    """All seeds of one setting."""

    setting: sweeps.Setting  # without the seed
    planned: int  # runs
    ended: int  # of them: only these count
    values: dict[str, comparison.Interval | None]  # by metric; None: no run has it
    by_seed: dict[str, dict[int, float]]  # metric -> seed -> value of the run

    @property
    def label(self) -> str:
        """The setting in words."""
        return ", ".join(f"{name} = {value}" for name, value in self.setting.items()) or "as it is"


def usual(points: Sequence[sweep_points.Point]) -> tuple[str, ...]:
    """The metrics of a table where none is asked for."""
    found = [name for point in points for name in (
        f"eval/avg@{point.cfg.eval.samples}", *("eval/greedy",) * point.cfg.eval.greedy)]
    return tuple(dict.fromkeys(found))


def rows(points: Sequence[sweep_points.Point], metrics: Sequence[str]) -> list[Row]:
    """A row for each setting but for its seed, in the order of the sweep."""
    groups: list[tuple[sweeps.Setting, list[sweep_points.Point]]] = []
    for point in points:
        bare = {name: value for name, value in point.setting.items() if name != sweeps.SEED}
        same = [members for setting, members in groups if setting == bare]
        if same:
            same[0].append(point)
        else:
            groups.append((bare, [point]))
    return [_row(setting, members, metrics) for setting, members in groups]


def _row(setting: sweeps.Setting, members: Sequence[sweep_points.Point],
         metrics: Sequence[str]) -> Row:
    ended = {point.cfg.seed: last_values(point.workdir, metrics)
             for point in members if sweep_points.done(point)}
    by_seed = {name: {seed: one[name] for seed, one in ended.items() if name in one}
               for name in metrics}
    values = {name: comparison.over_runs(list(known.values())) if known else None
              for name, known in by_seed.items()}
    return Row(setting, len(members), len(ended), values, by_seed)


def last_values(workdir: pathlib.Path, metrics: Sequence[str]) -> dict[str, float]:
    """The last value of each metric in DIR/metrics.jsonl; those that are not there are left out."""
    lines = metric_files.whole_lines((workdir / "metrics.jsonl").read_bytes())
    found: dict[str, float] = {}
    for line in map(json.loads, lines):
        found |= {name: line[name] for name in metrics
                  if isinstance(line.get(name), int | float)}
    return found


def write(out: pathlib.Path, points: Sequence[sweep_points.Point], metrics: Sequence[str], *,
          failed: Collection[str], flags: Sequence[str]) -> tuple[pathlib.Path, ...]:
    """Write DIR/sweep.md, sweep.csv and sweep.png; returns their paths."""
    found = rows(points, metrics)
    out.mkdir(parents=True, exist_ok=True)
    text = _markdown(out, found, points, metrics, failed=failed, flags=flags)
    (out / "sweep.md").write_text(text, encoding="utf-8")
    (out / "sweep.csv").write_text(_csv(found, metrics), encoding="utf-8", newline="")
    width, height = 3.6 * len(metrics) + 1.4, max(2.8, 1.2 + 0.3 * len(found))
    (out / "sweep.png").write_bytes(pages.png(lambda figure: _draw(figure, found, metrics),
                                              (width, height)))
    return tuple(out / f"sweep.{kind}" for kind in ("md", "csv", "png"))


def _fields(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in found for name in row.setting))


def _markdown(out: pathlib.Path, found: Sequence[Row], points: Sequence[sweep_points.Point],
              metrics: Sequence[str], *, failed: Collection[str], flags: Sequence[str]) -> str:
    fields = _fields(found)
    body = [[*(str(row.setting.get(name, "")) for name in fields), f"{row.ended} of {row.planned}",
             *(_cell(row.values[name], bold=row in _highest(found, name)) for name in metrics)]
            for row in found]
    lines = ["# Sweep", "", f"`python -m dapo_jax.sweep {shlex.join(flags)} --out={out}`", "",
             *pages.table([*fields, "runs", *metrics], body), "",
             "The last value of each run that ended; mean over its seeds, in brackets the 95 % "
             "interval of that mean by Student's t where there are two or more. Bold: the highest "
             "mean, which is no proof of a difference.", "", *_differences(found, metrics),
             "![metrics by setting](sweep.png)", ""]
    lines += [f"Curves and samples: `python -m dapo_jax.report {out / 'runs'}/* --out={out}`.", ""]
    missing = [point for point in points if not sweep_points.done(point)]
    if missing:
        lines += ["## Without a result", ""]
        lines += [f"- {point.name}: {'failed' if point.name in failed else 'not finished'}; log: "
                  f"{runs.log(out, point.name)}" for point in missing]
        lines += ["", "The same command goes on with them.", ""]
    return "\n".join(lines)


def _differences(found: Sequence[Row], metrics: Sequence[str]) -> list[str]:
    """Each setting against the one of the highest mean, where they have two seeds in common."""
    body = []
    for metric in metrics:
        settings = {row.label: row.by_seed[metric] for row in found}
        best = _highest(found, metric)[:1]
        if best and differences.comparable(settings):
            body += [[metric, one.name, pages.interval(one.student), pages.interval(one.bootstrap),
                      one.words] for one in differences.against(settings, best[0].label)]
    if not body:
        return []
    return ["## Is it a real difference", "", *pages.table(
        ["metric", "setting", "less the highest's, by t", "by bootstrap", "in words"], body), "",
        "Runs are paired by seed. What is said goes by Student's t with Holm's correction for all "
        "settings of a metric; the bootstrap of so few seeds is too narrow to decide.", ""]


def _cell(value: comparison.Interval | None, *, bold: bool) -> str:
    if value is None:
        return "–"
    mean, *bounds = pages.interval(value).split(" ", 1)
    return " ".join([f"**{mean}**" if bold else mean, *bounds])


def _highest(found: Sequence[Row], metric: str) -> list[Row]:
    """The rows of the highest mean; none where there is nothing to compare."""
    known = [(value.mean, row) for row in found if (value := row.values[metric]) is not None]
    highest = max((mean for mean, _ in known), default=0.0)
    return [row for mean, row in known if mean == highest] if len(known) > 1 else []


def _csv(found: Sequence[Row], metrics: Sequence[str]) -> str:
    fields, text = _fields(found), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*fields, "runs", *(f"{name}{part}" for name in metrics
                                        for part in ("", " low", " high"))])
    for row in found:
        numbers: list[Any] = []
        for value in (row.values[name] for name in metrics):
            parts = (value.mean, value.low, value.high) if value else (np.nan,) * 3
            numbers += ["" if np.isnan(part) else repr(float(part)) for part in parts]
        writer.writerow([*(row.setting.get(name, "") for name in fields), row.ended, *numbers])
    return text.getvalue()


def _draw(figure: matplotlib.figure.Figure, found: Sequence[Row], metrics: Sequence[str]) -> None:
    """Along the values of the one field where it is a number, else a line for each setting."""
    fields = _fields(found)
    along = len(fields) == 1 and all(_number(row.setting.get(fields[0])) for row in found)
    axes = figure.subplots(1, len(metrics), squeeze=False, sharey=not along)[0]
    for one, metric in zip(axes, metrics, strict=True):
        one.set_title(metric)
        if along:
            _curve(one, found, metric, field=fields[0])
        else:
            _bars(one, found, metric)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reach(row: Row, metric: str) -> tuple[float, float, float]:
    """Mean, and how far the interval goes below and above it."""
    value = row.values[metric]
    if value is None:
        return np.nan, np.nan, np.nan
    return value.mean, value.mean - value.low, value.high - value.mean


def _curve(axes: matplotlib.axes.Axes, found: Sequence[Row], metric: str, *, field: str) -> None:
    ordered = sorted(found, key=lambda row: row.setting[field])
    at = np.array([row.setting[field] for row in ordered], np.float64)
    mean, below, above = np.array([_reach(row, metric) for row in ordered]).T
    axes.errorbar(at, mean, yerr=[below, above], marker="o", markersize=4,
                  capsize=3, color=plots.COLOURS[0])
    if at[0] > 0 and at[-1] / at[0] >= LOG_SPAN:
        axes.set_xscale("log")
    if len(at) <= TICKS:
        axes.set_xticks(at, [f"{value:g}" for value in at])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(field)


def _bars(axes: matplotlib.axes.Axes, found: Sequence[Row], metric: str) -> None:
    place = np.arange(len(found))[::-1]
    mean, below, above = np.array([_reach(row, metric) for row in found]).T
    axes.errorbar(mean, place, xerr=[below, above], linestyle="", marker="o",
                  markersize=4, capsize=3, color=plots.COLOURS[0])
    axes.set_yticks(place, [row.label for row in found], fontsize=7)
    axes.grid(True, axis="x")
