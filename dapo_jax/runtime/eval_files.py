"""DIR/eval: each evaluation as step_N.json, a Markdown table step_N.md and a page step_N.html."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.runtime import eval_figures, eval_page, metrics, samples_log

FOLDER = "eval"


def write(workdir: str | os.PathLike, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
          *, step: int, page_rows: int) -> None:
    """Write the files of one evaluation, in place of an earlier one of that step.

    `page_rows` bounds the responses on the page; 0: no page.
    """
    folder = pathlib.Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"step_{step:06d}.html", report, rows if page_rows else (), step=step,
           limit=page_rows)


def write_page(path: str | os.PathLike, report: Mapping[str, Any],
               rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Write a page with all responses, and the figures as .json and .md beside it; ConfigError if
    that cannot be."""
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        _write(pathlib.Path(path), report, rows, step=step, limit=0)
    except OSError as error:
        raise config.ConfigError(f"--page={path} cannot be written: {error.strerror}") from error


def _write(page: pathlib.Path, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *,
           step: int, limit: int) -> None:
    title = f"Evaluation after step {step}"
    text = json.dumps(metrics.plain({**report, "step": step}), indent=1, allow_nan=False)
    page.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    page.with_suffix(".md").write_text(eval_figures.markdown(report, title=title),
                                       encoding="utf-8")
    if rows:
        page.write_text(eval_page.render(title, report, rows, limit=limit), encoding="utf-8")


def cut(workdir: str | os.PathLike, step: int) -> None:
    """Remove the files of evaluations after `step`; -1 removes all of them."""
    for path in _paths(workdir, "*"):
        if samples_log.step_of(path) > step:
            path.unlink()


def newest(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """The last evaluation's report, None if there is none that can be read."""
    for path in reversed(_paths(workdir, "json")):
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):  # torn; the one before it is whole
            continue
    return None


def pages(workdir: str | os.PathLike) -> list[str]:
    """Paths of the pages inside the work directory, earliest first."""
    return [f"{FOLDER}/{path.name}" for path in _paths(workdir, "html")]


def _paths(workdir: str | os.PathLike, kind: str) -> list[pathlib.Path]:
    found: Iterable[pathlib.Path] = (pathlib.Path(workdir) / FOLDER).glob(f"step_*.{kind}")
    return sorted((path for path in found if path.stem[5:].isdecimal()), key=samples_log.step_of)
