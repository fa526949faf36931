"""Compared policies as text, Markdown, a figure and JSON."""

import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.figure
import rich.box
import rich.console
import rich.table

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import metrics, plots

HEADS = ("policy", "seconds", "saved, %", "prompts", "samples", "rounds", "surplus", "dropped",
         "carried, % of batch", "age", "oracle ratio")
CLOSED = "gap closed, %"
MISSING = "-"
FILE_WIDTH = 220  # characters


def heads(section: comparison.Section) -> tuple[str, ...]:
    """Column heads: those of all tables, then what the section has beside them."""
    closed = (CLOSED,) if section.rows[0].closed else ()
    return HEADS[:3] + closed + HEADS[3:] + tuple(section.rows[0].extra)


def cells(row: comparison.Row) -> tuple[str, ...]:
    """One policy's figures as text; a star marks steps beyond what was recorded."""
    mark = f" *{row.beyond}" if row.beyond else ""
    figures = tuple(_number(value, digits) for value, digits in (
        (row.prompts, 1), (row.samples, 0), (row.rounds, 3), (row.surplus, 2), (row.dropped, 2),
        (100 * row.old, 1), (row.age, 2), (row.oracle_ratio, 3)))
    fine = 1 if row.seconds.mean >= 10 else 3
    return (row.name + mark, _interval(row.seconds, fine), _interval(row.saving),
            *((_interval(row.closed),) if row.closed else ()), *figures,
            *(_number(value, 1) for value in row.extra.values()))


def show(sections: Sequence[comparison.Section]) -> None:
    """Print the tables on standard output."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:  # a file takes lines of any length
        console = rich.console.Console(width=FILE_WIDTH, highlight=False)
    for section in sections:
        table = rich.table.Table(title=section.title, title_justify="left", box=rich.box.SIMPLE)
        for place, head in enumerate(heads(section)):
            table.add_column(head, justify="right" if place else "left")
        for row in section.rows:
            table.add_row(*cells(row))
        console.print(table)
        for note in section.notes:
            console.print(note, markup=False)


def markdown(title: str, sections: Sequence[comparison.Section], notes: Sequence[str]) -> str:
    """The tables as a Markdown page."""
    lines = [f"# {title}", ""]
    for section in sections:
        names = heads(section)
        lines += [f"## {section.title}", "", *table(names, [cells(row) for row in section.rows])]
        lines += ["", *section.notes, ""] if section.notes else [""]
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def figure(sections: Sequence[comparison.Section]) -> bytes:
    """PNG: seconds saved by each policy with its interval, up to three panels in a row."""
    columns = min(3, len(sections))
    lines = -(-len(sections) // columns)
    most = max(len(section.rows) for section in sections)
    with matplotlib.rc_context(plots.STYLE | {"axes.grid.axis": "x"}):
        drawn = matplotlib.figure.Figure(
            figsize=(3.4 * columns + 1.2, lines * (1.3 + 0.24 * most)), dpi=130,
            layout="constrained")
        every = drawn.subplots(lines, columns, squeeze=False).ravel()
        for place, axes in enumerate(every):
            if place < len(sections):
                _panel(axes, sections[place], names=place % columns == 0 or not _same(
                    sections[place - 1], sections[place]))
            else:
                axes.set_visible(False)
        image = io.BytesIO()
        drawn.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _same(one: comparison.Section, other: comparison.Section) -> bool:
    return [row.name for row in one.rows] == [row.name for row in other.rows]


def _panel(axes: matplotlib.axes.Axes, section: comparison.Section, *, names: bool) -> None:
    for place, row in enumerate(section.rows):
        low, high = (bound if math.isfinite(bound) else row.saving.mean
                     for bound in (row.saving.low, row.saving.high))
        axes.plot([low, high], [place, place], color=plots.COLOURS[0], linewidth=1.6)
        axes.plot([row.saving.mean], [place], "o", color=plots.COLOURS[0], markersize=4)
    axes.axvline(0, color="#777777", linewidth=0.8)
    axes.set_title(section.title)
    axes.set_xlabel("seconds saved, %")
    axes.set_yticks(range(len(section.rows)), [row.name if names else "" for row in section.rows])
    axes.set_ylim(len(section.rows) - 0.5, -0.5)


def write(out: pathlib.Path, name: str, *, title: str, sections: Sequence[comparison.Section],
          notes: Sequence[str], settings: dict[str, Any]) -> list[pathlib.Path]:
    """Write OUT/NAME.md, .png and .json; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("md", "png", "json")]
    paths[0].write_text(markdown(title, sections, notes), encoding="utf-8")
    paths[1].write_bytes(figure(sections))
    content = {"title": title, "settings": settings, "notes": list(notes),
               "sections": [dataclasses.asdict(section) for section in sections]}
    paths[2].write_text(json.dumps(metrics.plain(content), indent=1, allow_nan=False) + "\n",
                        encoding="utf-8")
    return paths


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; all columns but the first are figures, to the right."""
    return ["| " + " | ".join(row) + " |"
            for row in (names, ["---", *["---:"] * (len(names) - 1)], *rows)]


def _interval(value: comparison.Interval, digits: int = 1) -> str:
    if not math.isfinite(value.mean):
        return MISSING
    mean, low, high = (f"{bound:.{digits}f}" for bound in (value.mean, value.low, value.high))
    if not math.isfinite(value.low):
        return mean
    below, above = value.mean - value.low, value.high - value.mean
    if abs(above - below) < 1e-9 * max(1.0, abs(value.mean)):
        return f"{mean} ±{above:.{digits}f}"
    return f"{mean} [{low}, {high}]"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING
