"""The page of a study of arms: its claims, what each arm was like, and their curves."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import matplotlib.axes
import matplotlib.figure
import numpy as np

from dapo_jax.runtime import plots
from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import jobs, learning, pages, verdicts

ACCURACY = "held-out accuracy"
PANELS = {"repeatness": "repeatness", "answered": "share with an answer in its form",
          "length": "tokens of a completion", "entropy": "entropy, nats per token",
          "gradient norm": "gradient norm", ACCURACY: ACCURACY}
PAIRED = (
    "Figures are differences of two arms, paired by seed, with Student's 95 % interval over seeds. "
    "`shown`: the whole interval lies on the claim's side of 0. `contradicted`: on the other side. "
    "`not shown`: 0 lies in it.",
    "With few seeds intervals are wide, so `not shown` does not say that a claim is false; and of "
    "many lines one or two may be decided by chance.",
    "First fifth, first third and last quarter are of the RL steps; they were chosen before the "
    "runs. Metrics are means over all samples of a step, also those that the filter drops.",
    "Without the filter a step samples as many prompts as it trains on, with it more: equal steps "
    "are not equal costs. The table of arms has both.")


@dataclasses.dataclass(frozen=True)
class Look:
    """How an arm is drawn: its place among the colours, and its line."""

    colour: int
    style: str = "-"


def claimed(found: findings.Findings, words: str, measure: str, own: str, other: str,
            figure: findings.Figure, *, source: str, sign: int = 1) -> verdicts.Claim:
    """The claim that a figure of arm `own` is above that of `other`, paired by seed (sign -1:
    below); of one arm's figure itself where there is no other."""
    runs = found.arms.get(own, {})
    value = (findings.paired(runs, found.arms.get(other, {}), figure) if other
             else learning.interval([figure(one) for one in runs.values()]))
    setting = f"{own} against {other}" if other else own
    return verdicts.claim(words, measure, setting, value, sign=sign, source=source)


def write(out: pathlib.Path, name: str, title: str, found: findings.Findings,
          claims: Sequence[verdicts.Claim], failures: Sequence[jobs.Failure], *,
          notes: Sequence[str], figure: str, arms: Sequence[str], quick: bool
          ) -> list[pathlib.Path]:
    """Write OUT/NAME.md of a study that one command measures, its data and its one figure, which
    shows `arms`; returns their paths."""
    looks = {arm: Look(place) for place, arm in enumerate(arms)}
    page = made(name, title, found, claims, command=lambda one: f"reproduce {name}", notes=notes,
                figures={figure: looks})
    return pages.write(out, page, failures, quick=quick)


def made(name: str, title: str, found: findings.Findings, claims: Sequence[verdicts.Claim], *,
         command: Callable[[verdicts.Claim], str], notes: Sequence[str],
         figures: Mapping[str, Mapping[str, Look]]) -> pages.Page:
    """The page; `command` says of a claim which command measures it, `figures` which arms each
    figure shows, and how."""
    rows = [(one.claim, one.measure, one.setting, verdicts.difference(one), one.verdict)
            for one in claims]
    below = pages.table(("claim", "measure", "setting", "difference", "verdict"), rows)
    below += ["", *(f"- {note}" for note in (*notes, *PAIRED)), "", *_arms(found)]
    arms = {arm: {seed: dataclasses.asdict(one) for seed, one in runs.items()}
            for arm, runs in found.arms.items()}
    return pages.Page(
        name, title, _summary(claims), below,
        [verdicts.line(one, command(one)) for one in claims],
        {figure: _figure(found, looks) for figure, looks in figures.items()},
        {"claims": [dataclasses.asdict(one) for one in claims], "arms": arms}, found.missing)


def _summary(claims: Sequence[verdicts.Claim]) -> list[str]:
    """The claims by verdict."""
    text = ["## In short", ""]
    for verdict in (verdicts.SHOWN, verdicts.CONTRADICTED, verdicts.NOT_SHOWN,
                    verdicts.NO_VERDICT):
        of = [f"- {one.claim} ({one.setting}; {one.measure}): {verdicts.difference(one)}"
              for one in claims if one.verdict == verdict]
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
            return verdicts.text(learning.interval([figure(one) for one in runs.values()]), digits)

        rows.append((
            arm, str(len(runs)), mean(lambda one: one.accuracy[0]), mean(findings.final_accuracy),
            *(mean(findings.late(name)) for name in ("repeatness", "answered", "stopped")),
            mean(findings.late("length"), 1), mean(findings.late("entropy")),
            mean(findings.early("gradient norm")), mean(findings.late("gradient norm")),
            *(mean(findings.over_all(name), digits) for name, digits in (
                ("clipped high", 5), ("truncated", 4), ("samples", 0))),
            mean(lambda one: float(np.nansum(one.values["processor"])), 0)))
    heads = ("arm", "runs", "accuracy at the start", "accuracy at the end", "repeatness, end",
             "with an answer, end", "stopped, end", "length, end", "entropy, end",
             "gradient norm, early", "gradient norm, end", "clipped above", "truncated",
             "samples / step", "processor s")
    return ["## Arms", "", *pages.table(heads, rows), ""] if rows else []


def _figure(found: findings.Findings, looks: Mapping[str, Look]) -> bytes | None:
    """A panel a metric: means over seeds as lines, from the least to the most as a band."""
    arms = {arm: look for arm, look in looks.items() if found.arms.get(arm)}
    if not arms:
        return None

    def draw(figure: matplotlib.figure.Figure) -> None:
        for axes, (panel, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            for arm, look in arms.items():
                _line(axes, found.arms[arm], panel, look, label=arm)
            if not np.isfinite(axes.dataLim.height):
                axes.text(0.5, 0.5, "no run here has it", transform=axes.transAxes, ha="center")
            axes.set_title(title)
        figure.axes[3].set_xlabel("RL step")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)

    return pages.png(draw, (11.0, 7.0))


def _line(axes: matplotlib.axes.Axes, runs: findings.Runs, panel: str, look: Look, *,
          label: str) -> None:
    curves = list(runs.values())
    if panel == ACCURACY:
        at, values = curves[0].at, np.stack([one.accuracy for one in curves])
    else:
        values = np.stack([pages.smooth(one.values[panel]) for one in curves])
        at = np.arange(1, values.shape[1] + 1)
    colour = plots.COLOURS[look.colour]
    axes.plot(at, values.mean(axis=0), look.style, color=colour, linewidth=1.2, label=label)
    axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12,
                      linewidth=0)
