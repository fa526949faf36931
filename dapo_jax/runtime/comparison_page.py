"""Compared policies as text, Markdown, a figure and JSON."""

import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import rich.box
import rich.console
import rich.table

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import metrics, plots

HEADS = ("policy", "seconds", "saved, %", "prompts", "samples", "rounds", "surplus", "dropped",
         "carried share, %", "oracle ratio")
MISSING = "-"
FILE_WIDTH = 180  # characters


@dataclasses.dataclass(frozen=True)
class Section:
    """One table with its title."""

    title: str
    rows: tuple[comparison.Row, ...]
    notes: tuple[str, ...] = ()


def cells(row: comparison.Row) -> tuple[str, ...]:
    """One policy's figures as text; a star marks steps beyond what was recorded."""
    mark = f" *{row.beyond}" if row.beyond else ""
    return (row.name + mark, _interval(row.seconds), _interval(row.saving),
            *(_number(value, digits) for value, digits in (
                (row.prompts, 1), (row.samples, 0), (row.rounds, 3), (row.surplus, 2),
                (row.dropped, 2), (100 * row.old, 1), (row.oracle_ratio, 3))))


def show(sections: Sequence[Section], *, width: int | None = None) -> None:
    """Print the tables on standard output."""
    console = rich.console.Console(width=width, highlight=False)
    if not console.is_terminal and width is None:  # a file takes lines of any length
        console = rich.console.Console(width=FILE_WIDTH, highlight=False)
    for section in sections:
        table = rich.table.Table(title=section.title, title_justify="left", box=rich.box.SIMPLE)
        for head in HEADS:
            table.add_column(head, justify="left" if head == HEADS[0] else "right",
                             no_wrap=not console.is_terminal)
        for row in section.rows:
            table.add_row(*cells(row))
        console.print(table)
        for note in section.notes:
            console.print(note, markup=False)


def markdown(title: str, sections: Sequence[Section], notes: Sequence[str]) -> str:
    """The tables as a Markdown page."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", "", _line(HEADS),
                  _line(["---"] + ["---:"] * (len(HEADS) - 1))]
        lines += [_line(cells(row)) for row in section.rows]
        lines += ["", *section.notes, ""] if section.notes else [""]
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def figure(sections: Sequence[Section]) -> bytes:
    """PNG: seconds saved by each policy with its interval, a panel per section."""
    with matplotlib.rc_context(plots.STYLE | {"axes.grid.axis": "x"}):
        most = max(len(section.rows) for section in sections)
        drawn = matplotlib.figure.Figure(figsize=(3.4 + 2.6 * len(sections), 1.4 + 0.26 * most),
                                         dpi=130, layout="constrained")
        every = drawn.subplots(1, len(sections), sharey=True, squeeze=False)[0]
        for axes, section in zip(every, sections, strict=True):
            for place, row in enumerate(section.rows):
                low, high = (bound if math.isfinite(bound) else row.saving.mean
                             for bound in (row.saving.low, row.saving.high))
                axes.plot([low, high], [place, place], color=plots.COLOURS[0], linewidth=1.6)
                axes.plot([row.saving.mean], [place], "o", color=plots.COLOURS[0], markersize=4)
            axes.axvline(0, color="#777777", linewidth=0.8)
            axes.set_title(section.title)
            axes.set_xlabel("seconds saved, %")
        every[0].set_yticks(range(len(sections[0].rows)), [row.name for row in sections[0].rows])
        every[0].set_ylim(most - 0.5, -0.5)
        image = io.BytesIO()
        drawn.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def write(out: pathlib.Path, name: str, *, title: str, sections: Sequence[Section],
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


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _interval(value: comparison.Interval) -> str:
    if not math.isfinite(value.mean):
        return MISSING
    if not math.isfinite(value.low):
        return f"{value.mean:.1f}"
    return f"{value.mean:.1f} [{value.low:.1f}, {value.high:.1f}]"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING
