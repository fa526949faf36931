"""The figures of a report: PNG images drawn from metric lines of one or several runs."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.lines
import matplotlib.rcsetup
import matplotlib.ticker
import numpy as np

from dapo_jax.runtime import panels

COLOURS = panels.COLOURS
STYLES = ("-", "--", ":", "-.")
SMOOTH_ABOVE = 100  # points; from there on a running mean is drawn over the faint values
STYLE: dict[Any, Any] = {
         "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "axes.grid.axis": "y", "grid.color": "#e4e4e4", "axes.axisbelow": True,
         "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "legend.frameon": False, "legend.fontsize": 8, "axes.prop_cycle":
         matplotlib.rcsetup.cycler(color=COLOURS)}


def draw(panel: panels.Panel, runs: Mapping[str, panels.Lines]) -> bytes | None:
    """PNG of a panel over runs by name; None if no run has any of its metrics."""
    found = {name: panels.series(panel, lines) for name, lines in runs.items()}
    found = {name: series for name, series in found.items() if series}
    if not found:
        return None
    with matplotlib.rc_context(STYLE):
        columns = len(found) if panel.kind in ("stack", "map") else 1
        figure = matplotlib.figure.Figure(figsize=(6.4, 3.3), dpi=130, layout="constrained")
        axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
        if panel.kind in ("stack", "map"):
            for one, (name, series) in zip(axes, found.items(), strict=True):
                (_stack if panel.kind == "stack" else _map)(one, panel, series)
                _phase_border(one, runs[name])
                if columns > 1:
                    one.set_title(name, fontweight="normal", fontsize=8)
        else:
            _overlay(axes[0], panel, found)
            for lines in runs.values():
                _phase_border(axes[0], lines)
        _finish(axes, panel)
        if columns == 1:
            axes[0].set_title(panel.title)
        else:
            for one in axes[1:] if panel.kind == "stack" else ():
                one.get_legend().remove()
            figure.suptitle(panel.title, x=0.02, ha="left", fontsize=10, fontweight="bold")
        image = io.BytesIO()
        figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _overlay(axes: matplotlib.axes.Axes, panel: panels.Panel,
             found: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]]) -> None:
    """One run: a colour per metric. Several: a colour per run, a line style per metric."""
    labels = list(dict.fromkeys(label for series in found.values() for label in series))
    many = len(found) > 1
    key: dict[str, dict[str, Any]] = {}
    for place, (name, series) in enumerate(found.items()):
        for label, (steps, values) in series.items():
            number = labels.index(label)
            colour = COLOURS[(place if many else number) % len(COLOURS)]
            style = STYLES[number % len(STYLES)] if many else "-"
            if panel.kind == "bars":
                width = max(1.0, np.ptp(steps) / 150)
                axes.bar(steps, values, width=width, color=colour, alpha=0.6 if many else 1)
            else:
                values = np.where(values > 0, values, np.nan) if panel.log else values
                _line(axes, steps, values, color=colour, linestyle=style)
            key[name if many else label] = {"color": colour}
    if many and len(labels) > 1:
        key |= {label: {"color": "#777777", "linestyle": STYLES[number % len(STYLES)]}
                for number, label in enumerate(labels)}
    if len(key) > 1:
        _legend(axes, [matplotlib.lines.Line2D([], [], label=name, **look)
                       for name, look in key.items()])


def _line(axes: matplotlib.axes.Axes, steps: np.ndarray, values: np.ndarray, **look: Any) -> None:
    if len(values) <= SMOOTH_ABOVE:
        small: dict[str, Any] = {"marker": "o", "markersize": 3} if len(values) <= 30 else {}
        axes.plot(steps, values, linewidth=1.4, **small, **look)
        return
    width = len(values) // 40
    axes.plot(steps, values, linewidth=0.7, alpha=0.25, **look)
    axes.plot(steps, _running_mean(values, width), linewidth=1.5, **look)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of up to `width` values on either side, fewer at the ends; NaN is left out."""
    counted = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(counted, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(counted)])
    place = np.arange(len(values))
    reach = np.minimum(np.minimum(place, place[::-1]), width)  # as far on both sides: no bias
    low, high = place - reach, place + reach + 1
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _stack(axes: matplotlib.axes.Axes, panel: panels.Panel,
           series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    steps = np.unique(np.concatenate([where for where, _ in series.values()]))
    heights = np.zeros((len(series), len(steps)))
    for row, (where, values) in zip(heights, series.values(), strict=True):
        row[np.searchsorted(steps, where)] = values
    axes.stackplot(steps, heights, labels=list(series), colors=panel.colours, step="mid",
                   alpha=0.85, linewidth=0)
    _legend(axes, axes.get_legend_handles_labels()[0])


def _map(axes: matplotlib.axes.Axes, panel: panels.Panel,
         series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """A column per step, a row per label in order, the darker the larger the row's share."""
    steps = next(iter(series.values()))[0]
    parts = np.array([values for _, values in series.values()])
    total = parts.sum(axis=0)
    parts = np.where(total > 0, parts / np.maximum(total, 1e-12), np.nan)
    low, high = panel.limits
    assert low is not None and high is not None, "a map has both limits"
    edges = np.linspace(low, high, len(parts) + 1)
    middles = (steps[1:] + steps[:-1]) / 2
    columns = np.concatenate([[steps[0] - 0.5], middles, [steps[-1] + 0.5]])
    drawn = axes.pcolormesh(columns, edges, parts, cmap="Blues", norm=matplotlib.colors.PowerNorm(
        0.5, vmin=0, vmax=1), rasterized=True)
    axes.grid(False)
    axes.figure.colorbar(drawn, ax=axes, label="share of prompts", ticks=(0, 0.1, 0.3, 0.6, 1))


def _legend(axes: matplotlib.axes.Axes, handles: Sequence[Any]) -> None:
    """Below the axes, where it hides no values."""
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17),
                ncols=min(len(handles), 3), handlelength=1.8, columnspacing=1.2)


def _phase_border(axes: matplotlib.axes.Axes, lines: panels.Lines) -> None:
    phases = [(line["step"], line["phase"]) for line in lines if line.get("phase") in ("sft", "rl")]
    for (before, old), (after, new) in zip(phases, phases[1:], strict=False):
        if old != new:
            border = (before + after) / 2
            axes.axvline(border, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(f" {new}", (border, 0.99), xycoords=("data", "axes fraction"), fontsize=8,
                          color="#555555", va="top")


def _finish(axes: Sequence[matplotlib.axes.Axes], panel: panels.Panel) -> None:
    axes[0].set_ylabel(panel.unit)
    for one in axes:
        one.set_xlabel("step")
        one.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
        if panel.log:
            one.set_yscale("log")
            one.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 3.0)))
            one.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
            one.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        one.set_ylim(*panel.limits)
        one.margins(x=0.02)
