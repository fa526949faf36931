"""The page of the study of dynamic batching: Markdown, figures and JSON."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import matplotlib.figure
import numpy as np

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import comparison_page, plots
from dapo_jax.studies import dynamic_batching_claims as claims
from dapo_jax.studies import dynamic_batching_findings as findings
from dapo_jax.studies import jobs, learning, pages, verdicts

NAME = "dynamic_batching"
TITLE = "Dynamic batching: what the source reports, and what was measured here"
NOTES = (
    "Intervals are 95 %: of part a Student's over all calls; of part b a bootstrap over blocks of "
    "steps, paired on the same recorded outcomes; of part c Student's over seeds, paired by seed.",
    "Verdicts: `agrees`: the source's figure lies in our interval and 0 does not, or the interval "
    "decides for its claim. `no difference shown`: 0 lies in it. The source's hardware, model and "
    "prompts are others than ours.",
    "Replays sample N = 32 groups for a batch, as the reference simulation does; `fixed` and "
    "`refill of the same size` ask again for as much as at first. Live, every policy asks again "
    "for what is missing only.",
    "Live times count sampling, scoring and learning; evaluations and checkpoints are left out. "
    "Processor seconds are those of the training process, all its threads.",
    "A time to an accuracy is read off the line between the evaluations beside it; where a run "
    "never gets there, the row has no interval and says how many did.")


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/dynamic_batching.md, its data and figures; returns their paths."""
    lines = claims.claims(found)
    live = {arm: {seed: dataclasses.asdict(one) for seed, one in runs.items()}
            for arm, runs in found.live.items()}
    data = {"claims": [dataclasses.asdict(line) for line in lines],
            "times": found.times and dataclasses.asdict(found.times),
            "replays": {size: dataclasses.asdict(one) for size, one in found.replays.items()},
            "live": live}
    page = pages.Page(NAME, TITLE, _summary(lines), _below(found, lines), lines,
                      {name: draw(found) for name, draw in FIGURES.items()}, data, found.missing)
    return pages.write(out, page, failures, quick=quick)


def _below(found: findings.Findings, lines: Sequence[verdicts.Line]) -> list[str]:
    text = pages.table(("claim", "source", "our command", "our figure", "verdict"),
                       [dataclasses.astuple(line) for line in lines])
    text += ["", *(f"- {note}" for note in NOTES), ""]
    for title, part in PARTS:
        if body := part(found):
            text += [f"## {title}", "", *body, ""]
    return text


def _summary(lines: Sequence[verdicts.Line]) -> list[str]:
    """What agrees, what does not, and what was not shown, in words."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(claims.standing(line), []).append(
            f"- {line.claim}: {line.verdict} ({line.figure})")
    text = ["## In short", ""]
    for name in sorted(groups):
        text += [f"**{name}**", "", *groups[name], ""]
    return text


def _of_times(found: findings.Findings) -> list[str]:
    if found.times is None:
        return []
    fits = {"wall": found.times.wall, "processor": found.times.processor} | {
        f"wall, G = {size} alone": one for size, one in found.times.by_size.items()}
    rows = [(name, verdicts.text(one.round, 4), verdicts.text(one.sample, 6),
             f"{one.r_squared:.4f}", f"{one.r_squared_medians:.4f}", f"{one.deviation:.3g}")
            for name, one in fits.items()]
    return [f"{len(found.times.rows)} calls of the engine of training, after the warm start. "
            "Shares of a round and replays use the line of their own G: the common one books what "
            "a prompt costs beside its samples as the round's.", "",
            *pages.table(("clock", "a: seconds of a round", "c: seconds of a sample",
                          "R2, all calls", "R2, medians of a size", "residual deviation, s"),
                         rows)]


def _of_replays(found: findings.Findings) -> list[str]:
    lines = []
    for one in found.replays.values():
        for section in _sections(one):
            names = comparison_page.heads(section)
            lines += [f"### {section.title}", "",
                      f"{one.steps} recorded steps, N = {one.groups}; informative: "
                      f"{100 * one.informative:.1f} % of the prompts.", "",
                      *pages.table(names, [comparison_page.cells(row) for row in section.rows]), ""]
    return lines


def _sections(one: findings.Replay) -> list[comparison.Section]:
    return [section for section in (one.here, one.source) if section]


def _of_live(found: findings.Findings) -> list[str]:
    live = {arm: runs for arm, runs in found.live.items() if runs}
    if not live:
        return []
    common = {seed: min(one.seconds[-1] for runs in live.values() for number, one in runs.items()
                        if number == seed)
              for seed in {seed for runs in live.values() for seed in runs}}
    rows = []
    for arm, runs in live.items():
        def mean(figure: Callable[[learning.Curve], float], digits: int = 1,
                 runs: Mapping[int, learning.Curve] = runs) -> str:
            return verdicts.text(learning.over_seeds(runs, figure), digits)
        equal = [learning.accuracy_at(one, common[seed]) for seed, one in runs.items()]
        rows.append((
            arm, str(len(runs)), mean(lambda one: learning.mean_step(one, "rollout"), 3),
            mean(lambda one: learning.mean_step(one, "samples"), 0),
            mean(lambda one: one.seconds[-1]), mean(lambda one: one.processor[-1]),
            mean(lambda one: one.accuracy[-1], 3), verdicts.text(comparison.over_runs(equal), 3),
            *(_reached(runs, wanted, clock) for wanted in claims.WANTED
              for clock in learning.CLOCKS)))
    heads = ("policy", "runs", "rollout s / step", "samples / step", "seconds", "processor s",
             "accuracy at the end", "accuracy when the seed's fastest run ends",
             *(f"{clock} to {wanted}" for wanted in claims.WANTED for clock in
               ("seconds", "processor s")))
    return pages.table(heads, rows)


def _reached(runs: Mapping[int, learning.Curve], wanted: float, clock: str) -> str:
    value = learning.over_seeds(runs, claims.reaching(wanted, clock))
    found = verdicts.text(value)
    return found if np.isfinite(value.mean) else learning.reached(runs, wanted)


def _times_figure(found: findings.Findings) -> bytes | None:
    if found.times is None:
        return None
    fitted, rows = found.times.wall, found.times.rows

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for place, size in enumerate(sorted({row["samples"] for row in rows})):
            own = [row for row in rows if row["samples"] == size]
            axes.plot([row["prompts"] * size for row in own], [row["seconds"] for row in own], "o",
                      color=plots.COLOURS[place], markersize=3, label=f"G = {size}")
        most = max(row["prompts"] * row["samples"] for row in rows)
        axes.plot([0, most], [fitted.round.mean, fitted.round.mean + fitted.sample.mean * most],
                  color="#555555", linewidth=1, label=f"a + c n G, R2 = {fitted.r_squared:.3f}")
        axes.set_xlabel("samples of a round, n G")
        axes.set_ylabel("seconds")
        axes.legend()

    return pages.png(draw, (6.0, 3.6))


def _replay_figure(found: findings.Findings) -> bytes | None:
    both = [(one.here, one.source) for one in found.replays.values()]
    sections = [section for place in zip(*both) for section in place if section]
    return comparison_page.figure(sections) if sections else None


def _learning_figure(found: findings.Findings) -> bytes | None:
    if not any(found.live.values()):
        return None

    def draw(figure: matplotlib.figure.Figure) -> None:
        for axes, clock in zip(figure.subplots(2, 2, sharey="row").T, learning.CLOCKS):
            for colour, (arm, runs) in zip(plots.COLOURS, found.live.items()):
                for place, one in enumerate(runs.values()):
                    style = {"color": colour, "linewidth": 1, "alpha": 0.8,
                             "label": "" if place else arm}
                    axes[0].plot(learning.clock_at_evaluations(one, clock), one.accuracy, **style)
                    axes[1].plot(getattr(one, clock), pages.smooth(one.reward), **style)
            axes[1].set_xlabel("seconds" if clock == "seconds" else "processor seconds")
        figure.axes[0].set_ylabel("held-out accuracy")
        figure.axes[2].set_ylabel("mean reward, all samples")
        figure.axes[0].legend()

    return pages.png(draw, (9.0, 6.0))


FIGURES = {"times": _times_figure, "replay": _replay_figure, "learning": _learning_figure}
PARTS = (("a. Seconds of a round", _of_times), ("b. Recorded runs, replayed", _of_replays),
         ("c. Live runs", _of_live))
