"""Figures of an evaluation: avg@k, pass@k, maj@k and how answers end, with bootstrap intervals."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 1000  # of the prompts
LEVEL = 0.95  # of the intervals


@dataclasses.dataclass(frozen=True)
class Judged:
    """All answers to one prompt."""

    correct: np.ndarray  # bool[k]
    valid: np.ndarray  # bool[k] false: its scoring failed, which counts as wrong
    stopped: np.ndarray  # bool[k] false: truncated
    length: np.ndarray  # i32[k] tokens
    answers: tuple[str | None, ...]  # extracted; None: none was found
    dataset: str = ""
    level: str = ""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k draws is right, from `correct` of `samples` (arXiv 2107.03374,
    equation 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(correct: Sequence[bool] | np.ndarray, answers: Sequence[str | None]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones the first counts.

    Answers that are None have no vote; without any vote the majority is wrong.
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return bool(correct[list(answers).index(winner)])


def intervals(values: np.ndarray, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the bootstrap percentile intervals of the column means of f64[Q, F].

    Prompts (rows) are drawn with replacement; the same seed gives the same interval.
    """
    rng = np.random.default_rng(seed)
    means = np.stack([values[rng.integers(len(values), size=len(values))].mean(axis=0)
                      for _ in range(RESAMPLES)])
    tail = (1 - LEVEL) / 2
    return np.quantile(means, tail, axis=0), np.quantile(means, 1 - tail, axis=0)


def summary(prompts: Sequence[Judged], greedy: Sequence[Judged] = ()) -> dict[str, Any]:
    """Name to {value, low, high} over the prompts; all have the same number of answers.

    `greedy` holds the one greedy answer to each prompt, if it was asked for.
    """
    count = len(prompts[0].correct)
    columns = {f"avg@{count}": [one.correct.mean() for one in prompts],
               f"maj@{count}": [majority(one.correct, one.answers) for one in prompts]}
    columns |= {f"pass@{k}": [pass_at_k(count, int(one.correct.sum()), k) for one in prompts]
                for k in _powers(count)}
    columns |= {"greedy": [one.correct.mean() for one in greedy]} if greedy else {}
    columns |= {"truncated": [1 - one.stopped.mean() for one in prompts],
                "length": [one.length.mean() for one in prompts],
                "no_answer": [np.mean([answer is None for answer in one.answers])
                              for one in prompts],
                "invalid": [1 - one.valid.mean() for one in prompts]}
    values = np.array(list(columns.values()), np.float64).T
    low, high = intervals(values)
    return {name: {"value": float(values[:, place].mean()), "low": float(low[place]),
                   "high": float(high[place])} for place, name in enumerate(columns)}


def report(prompts: Sequence[Judged], greedy: Sequence[Judged] = ()) -> dict[str, Any]:
    """Summaries of all prompts, of each data set if there are several, and of each level."""
    result: dict[str, Any] = {"prompts": len(prompts), "samples": len(prompts[0].correct),
                              "overall": summary(prompts, greedy), "sets": {}, "levels": {}}
    for part, field in (("sets", "dataset"), ("levels", "level")):
        names = sorted({getattr(one, field) for one in prompts} - {""})
        for name in names if part == "levels" or len(names) > 1 else ():
            rows = [row for row, one in enumerate(prompts) if getattr(one, field) == name]
            result[part][name] = {"prompts": len(rows)} | summary(
                [prompts[row] for row in rows], [greedy[row] for row in rows] if greedy else ())
    return result


def metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """The report as flat metrics: eval/NAME, eval/SET/NAME, eval/level_LEVEL (avg@k), and the ends
    of the intervals of accuracies as eval/interval/NAME_low and _high."""
    average = f"avg@{report['samples']}"
    flat = {f"eval/{name}": one["value"] for name, one in report["overall"].items()}
    for name, figures in report["sets"].items():
        flat |= {f"eval/{name}/{figure}": one["value"] for figure, one in figures.items()
                 if figure != "prompts"}
    flat |= {f"eval/level_{level}": figures[average]["value"]
             for level, figures in report["levels"].items()}
    for name, one in report["overall"].items():
        if is_accuracy(name):
            flat |= {f"eval/interval/{name}_{end}": one[end] for end in ("low", "high")}
    return flat


def is_accuracy(name: str) -> bool:
    """Whether a figure is a share of right answers."""
    return name == "greedy" or name.startswith(("avg@", "pass@", "maj@"))


def table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the report: a row for all prompts, for each data set and each level."""
    parts = [("all", report["overall"] | {"prompts": report["prompts"]}),
             *report["sets"].items(),
             *((f"level {level}", one) for level, one in report["levels"].items())]
    names = list(report["overall"])
    rows = [[label, str(figures["prompts"]), *(_cell(name, figures[name]) for name in names)]
            for label, figures in parts]
    return ["", "prompts", *(name.replace("_", " ") for name in names)], rows


def markdown(report: Mapping[str, Any], *, title: str) -> str:
    """The table with a line that says what the figures are."""
    head, rows = table(report)
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"# {title}", "", " | ".join(["", *head, ""]).strip(),
             "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in cells), "",
             f"{report['samples']} answers a prompt, {report.get('sampling', '')}. avg@k: mean "
             "over answers; pass@k: one of k is right, unbiased; maj@k: the most frequent answer "
             f"is. In brackets: {LEVEL:.0%} bootstrap intervals over prompts. Lengths are in "
             "tokens."]
    return "\n".join(lines) + "\n"


def _cell(name: str, figure: Mapping[str, float]) -> str:
    if name == "length":
        return f"{figure['value']:.1f}"
    if is_accuracy(name):
        return f"{figure['value']:.3f} ({figure['low']:.3f}–{figure['high']:.3f})"
    return f"{figure['value']:.3f}"


def _powers(count: int) -> list[int]:
    """2, 4, 8, ... and the count itself; pass@1 is avg@k."""
    return sorted({2**i for i in range(1, int(math.log2(count)) + 1)} | {count})
