"""What pages of studies are made of: Markdown tables, PNG figures, and the files of a study."""

import dataclasses
import datetime
import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import matplotlib
import matplotlib.figure
import numpy as np

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import environment, metrics, plots
from dapo_jax.studies import jobs, verdicts

SMOOTH = 10  # steps of the running mean that is drawn
LINES = "_lines.json"  # behind a study's name: what the page of all studies reads


@dataclasses.dataclass(frozen=True)
class Page:
    """A study's page, before its files are written."""

    name: str  # of the study
    title: str
    summary: Sequence[str]  # lines of Markdown before the claims
    claims: Sequence[str]  # the table of claims, and what is below it
    lines: Sequence[verdicts.Line]
    figures: Mapping[str, bytes | None]
    data: Mapping[str, Any]  # for NAME.json
    missing: Sequence[str]


def write(out: pathlib.Path, page: Page, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/NAME.md, NAME.json, NAME_lines.json and the figures; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    for name, image in page.figures.items():
        (out / f"{name}.png").unlink(missing_ok=True)  # an earlier page may have had it
        if image:
            (out / f"{name}.png").write_bytes(image)
    drawn = [name for name, image in page.figures.items() if image]
    paths = [out / f"{page.name}.md", out / f"{page.name}.json", out / f"{page.name}{LINES}"]
    paths[0].write_text(_markdown(page, failures, drawn=drawn, quick=quick), encoding="utf-8")
    failed = [dataclasses.asdict(one) for one in failures]
    _json(paths[1], {**page.data, "missing": page.missing, "failed": failed})
    _json(paths[2], {"name": page.name, "title": page.title, "quick": quick, "machine": machine(),
                     "date": datetime.date.today().isoformat(),
                     "missing": [*page.missing, *(one.name for one in failures)],
                     "lines": [dataclasses.asdict(line) for line in page.lines]})
    return [*paths, *(out / f"{name}.png" for name in drawn)]


def _json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(metrics.plain(content), indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """The devices, the processor and the version of jax."""
    devices, processor = jax.devices(), environment.processor()
    of = f" ({processor}, {os.cpu_count()} cores)" if processor else ""
    return f"{len(devices)} x {devices[0].device_kind}{of}, jax {jax.__version__}"


def _markdown(page: Page, failures: Sequence[jobs.Failure], *, drawn: Sequence[str],
              quick: bool) -> str:
    text = [f"# {page.title}", "", f"On {machine()}.", ""]
    if quick:
        text += ["**--quick: a few steps of a tiny model. No figure here means anything.**", ""]
    text += [*page.summary, "## Claims", "", *page.claims, ""]
    for name in drawn:
        text += [f"![{name}]({name}.png)", ""]
    if page.missing or failures:
        text += ["## Missing", "", *(f"- {one}" for one in page.missing),
                 *(f"- failed: {one.name}:\n\n```\n{one.text}\n```" for one in failures), ""]
    return "\n".join(text)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in (heads, ["---"] * len(heads), *rows)]


def interval(value: comparison.Interval) -> str:
    """Mean and bounds of a figure in four digits; a dash where it is not known."""
    if not np.isfinite(value.mean):
        return "–"
    known = np.isfinite(value.low)
    return f"{value.mean:.4g}" + (f" ({value.low:.4g} to {value.high:.4g})" if known else "")


def png(draw: Callable[[matplotlib.figure.Figure], None], size: tuple[float, float]) -> bytes:
    """The image that `draw` makes of a figure of `size` inches."""
    with matplotlib.rc_context(plots.STYLE):
        figure = matplotlib.figure.Figure(figsize=size, dpi=130, layout="constrained")
        draw(figure)
        image = io.BytesIO()
        figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def smooth(values: np.ndarray) -> np.ndarray:
    """Running mean of the last few finite values; NaN until there is one."""
    sums, counts = (np.cumsum(column) for column in (np.nan_to_num(values), np.isfinite(values)))
    before = np.arange(len(values)) - SMOOTH
    sums, counts = (column - np.where(before < 0, 0, column[np.maximum(before, 0)])
                    for column in (sums, counts))
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)
