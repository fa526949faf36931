"""A fit of `window` to a recorded run, as text, Markdown, a figure and JSON."""

import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence

import matplotlib
import matplotlib.figure
import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import fit
from dapo_jax.runtime import comparison_page, metrics, plots


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a fit found, and the numbers of the steps."""

    study: fit.Study
    step: np.ndarray  # i32[n]
    notes: Sequence[str]


HEADS = ("predictor", "seconds, fitted steps", "seconds, held out", "further rounds, held out",
         "mean error, held out", "predicted, held out")


def markdown(found: Fitted) -> str:
    """The constants, the scores, and how to use them."""
    fitted = found.study.predictor
    constants = ", ".join(f"{name} {getattr(fitted, name):.3f}" for name in fit.BOUNDS)
    rows = [(name, f"{used.seconds:.2f}", f"{held.seconds:.2f}", f"{100 * held.again:.1f} %",
             f"{held.error:.1f} prompts", f"{held.predicted:.1f} prompts")
            for name, (used, held) in found.study.scores.items()]
    lines = ["# `window` fitted to a recorded run", "",
             f"{constants}; window {fitted.window} steps", "",
             *comparison_page.table(HEADS, rows)]
    lines += ["", *found.notes, "", "```", *flags(fitted), "```", ""]
    return "\n".join(lines)


def flags(predictor: config.Predictor) -> list[str]:
    """The constants as flags of a run."""
    return [f"--config.dynamic_sampling.predictor.{name}={getattr(predictor, name):.4g}"
            for name in (*fit.BOUNDS, "window")]


def figure(found: Fitted) -> bytes:
    """PNG: prompts needed and predicted, step by step."""
    with matplotlib.rc_context(plots.STYLE):
        drawn = matplotlib.figure.Figure(figsize=(7.5, 3.6), dpi=130, layout="constrained")
        axes = drawn.subplots()
        axes.plot(found.step, found.study.exact, ".", color="#777777", label="needed: N T / K")
        for name, values in found.study.predicted.items():
            axes.plot(found.step, values, linewidth=1.3, label=f"predicted: {name}")
        axes.axvline(found.step[found.study.held_out] - 0.5, color="#555555", linestyle=(0, (4, 3)),
                     linewidth=0.8, label="held out from here")
        axes.set_xlabel("step")
        axes.set_ylabel("prompts")
        axes.set_ylim(0, None)
        axes.legend(ncols=2)
        image = io.BytesIO()
        drawn.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def write(out: pathlib.Path, found: Fitted) -> list[pathlib.Path]:
    """Write OUT/fit.md, .png and .json; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"fit.{kind}" for kind in ("md", "png", "json")]
    paths[0].write_text(markdown(found), encoding="utf-8")
    paths[1].write_bytes(figure(found))
    paths[2].write_text(json.dumps(metrics.plain(dataclasses.asdict(found)), indent=1) + "\n",
                        encoding="utf-8")
    return paths
