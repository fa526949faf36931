"""The page of the study of the token-level loss: Markdown, figures and JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax
import matplotlib.axes
import matplotlib.figure
import numpy as np

from dapo_jax.runtime import metrics, plots
from dapo_jax.studies import jobs, pages
from dapo_jax.studies import token_loss_claims as claims
from dapo_jax.studies import token_loss_findings as findings

NAME = "token_loss"
ACCURACY = "held-out accuracy"
PANELS = {"repeatness": "repeatness", "answered": "share with an answer in its form",
          "length": "tokens of a completion", "entropy": "entropy, nats per token",
          "gradient norm": "gradient norm", ACCURACY: ACCURACY}
FIGURES = {"loss": (claims.TOKEN, claims.MICROBATCH), "advantage": claims.ADVANTAGES}
SMOOTH = 10  # steps of the running mean that is drawn
NOTES = (
    "An arm is the preset `dapo` (clip 0.2 / 0.28, no KL, no entropy term) with the advantage and "
    "the weights that its name gives, each with the filter of dynamic sampling and without it. All "
    "runs of a seed begin from the same warm start.",
    "Figures are differences of two arms, paired by seed, with Student's 95 % interval over seeds. "
    "`shown`: the whole interval lies on the claim's side of 0. `contradicted`: on the other side. "
    "`not shown`: 0 lies in it.",
    "With few seeds intervals are wide, so `not shown` does not say that a claim is false; and of "
    "so many lines one or two may be decided by chance.",
    "First fifth, first third and last quarter are of the RL steps; they were chosen before the "
    "runs. Metrics are means over all samples of a step, also those that the filter drops.",
    "Without the filter a step samples as many prompts as it trains on, with it more: equal steps "
    "are not equal costs. The table of arms has both.",
    "With rewards of 0 and 1 any group that has a gradient has a deviation of at least "
    "sqrt(G - 1) / G, with the filter or without: the bound that the article gives for dynamic "
    "sampling is arithmetic, and nothing here measures it.")


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/token_loss.md, .json and the figures; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {name: image for name in FIGURES if (image := _figure(found, name))}
    for name in FIGURES:
        (out / f"{name}.png").unlink(missing_ok=True)  # an earlier page may have had it
    for name, image in figures.items():
        (out / f"{name}.png").write_bytes(image)
    lines = claims.claims(found)
    page, data = out / f"{NAME}.md", out / f"{NAME}.json"
    page.write_text(_markdown(found, lines, failures, figures=list(figures), quick=quick),
                    encoding="utf-8")
    data.write_text(json.dumps(metrics.plain({
        "claims": [dataclasses.asdict(line) for line in lines], "missing": found.missing,
        "failed": [dataclasses.asdict(one) for one in failures],
        "arms": {arm: {seed: dataclasses.asdict(one) for seed, one in runs.items()}
                 for arm, runs in found.arms.items()}}), indent=1) + "\n", encoding="utf-8")
    return [page, data, *(out / f"{name}.png" for name in figures)]


def _markdown(found: findings.Findings, lines: Sequence[claims.Claim],
              failures: Sequence[jobs.Failure], *, figures: Sequence[str], quick: bool) -> str:
    device = jax.devices()[0]
    text = ["# The token-level loss, advantages and dynamic sampling: what shows at this size", "",
            f"On {len(jax.devices())} x {device.device_kind}, jax {jax.__version__}.", ""]
    if quick:
        text += ["**--quick: a few steps of a tiny model. No figure here means anything.**", ""]
    text += [*_summary(lines), "## Claims", ""]
    text += pages.table(
        ("claim of the article", "measure", "setting", "difference", "verdict"),
        [(line.claim, line.measure, line.setting, _difference(line), line.verdict)
         for line in lines])
    text += ["", *(f"- {note}" for note in NOTES), "", *_arms(found)]
    for name in figures:
        text += [f"![{name}]({name}.png)", ""]
    if found.missing or failures:
        text += ["## Missing", "", *(f"- {one}" for one in found.missing),
                 *(f"- failed: {one.name}:\n\n```\n{one.text}\n```" for one in failures), ""]
    return "\n".join(text)


def _difference(line: claims.Claim) -> str:
    return f"{claims.text(line.difference, 1 if line.unit else 4)} {line.unit}".strip()


def _summary(lines: Sequence[claims.Claim]) -> list[str]:
    """The claims by verdict."""
    text = ["## In short", ""]
    for verdict in (claims.SHOWN, claims.CONTRADICTED, claims.NOT_SHOWN, claims.NO_VERDICT):
        of = [f"- {line.claim} ({line.setting}; {line.measure}): {_difference(line)}"
              for line in lines if line.verdict == verdict]
        if of:
            text += [f"**{verdict.capitalize()}**", "", *of, ""]
    return text


def _arms(found: findings.Findings) -> list[str]:
    """What each arm was like, in figures of its own."""
    rows = []
    for arm, runs in found.arms.items():
        if not runs:
            continue

        def mean(figure: findings.Figure, digits: int = 3, runs: findings.Runs = runs) -> str:
            return claims.text(findings.interval([figure(one) for one in runs.values()]), digits)

        rows.append((
            arm, str(len(runs)), mean(lambda one: one.accuracy[0]), mean(findings.final_accuracy),
            *(mean(findings.late(name)) for name in ("repeatness", "answered", "stopped")),
            mean(findings.late("length"), 1), mean(findings.late("entropy")),
            mean(findings.early("gradient norm")), mean(findings.late("gradient norm")),
            mean(lambda one: float(np.nanmean(one.values["samples"])), 0),
            mean(lambda one: float(np.nansum(one.values["processor"])), 0)))
    heads = ("arm", "runs", "accuracy at the start", "accuracy at the end", "repeatness, end",
             "with an answer, end", "stopped, end", "length, end", "entropy, end",
             "gradient norm, early", "gradient norm, end", "samples / step", "processor s")
    return ["## Arms", "", *pages.table(heads, rows), ""] if rows else []


def _figure(found: findings.Findings, name: str) -> bytes | None:
    """A panel a metric: means over seeds as lines, from the least to the most as a band."""
    arms = [(place, style, arm) for place, kind in enumerate(FIGURES[name])
            for style, filtered in (("-", True), ("--", False))
            if found.arms.get(arm := claims.arm(kind, filtered=filtered))]
    if not arms:
        return None

    def draw(figure: matplotlib.figure.Figure) -> None:
        for axes, (panel, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            for place, style, arm in arms:
                _line(axes, found.arms[arm], panel, colour=plots.COLOURS[place], style=style,
                      label=arm)
            axes.set_title(title)
        figure.axes[3].set_xlabel("RL step")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)

    return pages.png(draw, (11.0, 7.0))


def _line(axes: matplotlib.axes.Axes, runs: findings.Runs, panel: str, *, colour: str, style: str,
          label: str) -> None:
    curves = list(runs.values())
    if panel == ACCURACY:
        at, values = curves[0].at, np.stack([one.accuracy for one in curves])
    else:
        values = np.stack([_smooth(one.values[panel]) for one in curves])
        at = np.arange(1, values.shape[1] + 1)
    axes.plot(at, values.mean(axis=0), style, color=colour, linewidth=1.2, label=label)
    axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12,
                      linewidth=0)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean of the last few finite values; NaN until there is one."""
    sums, counts = (np.cumsum(column) for column in (np.nan_to_num(values), np.isfinite(values)))
    before = np.arange(len(values)) - SMOOTH
    sums, counts = (column - np.where(before < 0, 0, column[np.maximum(before, 0)])
                    for column in (sums, counts))
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)
