"""Held-out accuracy and reward against the time that a run took, from its metrics."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import metrics

CLOCKS = ("seconds", "processor")
EARLY = 50  # steps in which the selection effect of the filter is looked at


@dataclasses.dataclass(frozen=True)
class Curve:
    """The RL phase of one run, f64[steps] each; entry 0 of the accuracies is its start.

    Seconds count sampling, scoring and learning; evaluations and checkpoints are left out.
    """

    seconds: np.ndarray  # since the phase began, after each step
    processor: np.ndarray  # the same, of the processor
    rollout: np.ndarray  # seconds of generating, of each step
    step: np.ndarray  # seconds of each step
    samples: np.ndarray
    reward: np.ndarray  # mean over all samples
    kept_reward: np.ndarray  # mean over the samples of kept groups
    at: np.ndarray  # i64[evaluations] steps before each evaluation
    accuracy: np.ndarray  # f64[evaluations] sampled held-out accuracy


def curve(workdir: pathlib.Path) -> Curve:
    """Of DIR/metrics.jsonl. Raises ConfigError where it holds no RL step or no evaluation."""
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.whole_lines(path.read_bytes())]
    rl = [line for line in lines if line.get("phase") == "rl"]
    before = [line for line in lines if line.get("phase") != "rl" and accuracy(line) is not None]
    if not rl or not before:
        raise config.ConfigError(f"{path} holds no step of RL or no evaluation before it")
    step = _column(rl, "time/step") - _column(rl, "time/eval", 0.0)
    found = [(0, accuracy(before[-1]))] + [
        (place, value) for place, line in enumerate(rl, start=1)
        if (value := accuracy(line)) is not None]
    at, values = map(np.array, zip(*found, strict=True))
    return Curve(np.cumsum(step), np.cumsum(_column(rl, "time/processor")),
                 _column(rl, "time/rollout"), step, _column(rl, "sampling/samples"),
                 _column(rl, "reward/mean"), _column(rl, "reward/kept_mean"), at, values)


def accuracy(line: Mapping[str, Any]) -> float | None:
    """The sampled accuracy of a metric line, None if it has none."""
    return next((line[name] for name in line
                 if name.startswith("eval/avg@") and name.removeprefix("eval/avg@").isdecimal()),
                None)


def _column(lines: Sequence[Mapping[str, Any]], name: str,
            missing: float = float("nan")) -> np.ndarray:
    values = [line.get(name) for line in lines]
    return np.array([missing if value is None else value for value in values], np.float64)


def clock_at_evaluations(one: Curve, clock: str) -> np.ndarray:
    """Seconds of `clock` at each evaluation, f64[evaluations]; 0 at the start."""
    return np.concatenate([[0.0], getattr(one, clock)])[one.at]


def time_to(one: Curve, wanted: float, clock: str) -> float:
    """Seconds until the held-out accuracy first is `wanted`, on the line between evaluations; NaN
    if it never is."""
    times, values = clock_at_evaluations(one, clock), one.accuracy
    reached = np.flatnonzero(values >= wanted)
    if not len(reached):
        return float("nan")
    place = int(reached[0])
    if not place:
        return 0.0
    share = (wanted - values[place - 1]) / (values[place] - values[place - 1])
    return float(times[place - 1] + share * (times[place] - times[place - 1]))


def reached(runs: Mapping[int, Curve], wanted: float) -> str:
    """How many of the runs ever have this held-out accuracy, in words."""
    there = sum(bool(np.any(one.accuracy >= wanted)) for one in runs.values())
    return f"reached by {there} of {len(runs)}"


def accuracy_at(one: Curve, seconds: float) -> float:
    """Held-out accuracy when so many seconds had passed, on the line between evaluations."""
    return float(np.interp(seconds, clock_at_evaluations(one, "seconds"), one.accuracy))


def over_seeds(runs: Mapping[int, Curve], figure: Callable[[Curve], float]) -> comparison.Interval:
    """Mean of a figure over runs with Student's interval; NaN where a run has none."""
    return interval([figure(one) for one in runs.values()])


def saved(runs: Mapping[int, Curve], base: Mapping[int, Curve],
          figure: Callable[[Curve], float]) -> comparison.Interval:
    """How much smaller the figure is than the base's in %, paired by seed; NaN where that is 0."""
    pairs = [(figure(runs[seed]), figure(base[seed])) for seed in runs if seed in base]
    return interval([100 * (1 - own / other) if other else float("nan") for own, other in pairs])


def interval(values: Sequence[float]) -> comparison.Interval:
    """Mean of a value per seed and its interval; NaN if one of them is, or there is none."""
    if not len(values) or not np.all(np.isfinite(values)):
        return comparison.Interval(*[float("nan")] * 3)
    return comparison.over_runs(values)


def mean_step(one: Curve, name: str) -> float:
    """Mean per step of a column, without the first step, which warms up; NaN entries left out."""
    values = getattr(one, name)[1:]
    values = values[np.isfinite(values)]
    return float(np.mean(values)) if len(values) else float("nan")


def sampling_share(one: Curve) -> float:
    """Generating's share of the seconds of a step, in %."""
    return 100 * mean_step(one, "rollout") / mean_step(one, "step")


def selection(one: Curve) -> float:
    """By how much kept groups' mean reward exceeds that of all samples, early in the run."""
    return float(np.nanmean(one.kept_reward[:EARLY] - one.reward[:EARLY]))


def finished(workdir: pathlib.Path) -> bool:
    """Whether the run logged the last step that its configuration asks for."""
    settings, lines = workdir / "config.json", workdir / "metrics.jsonl"
    if not (settings.is_file() and lines.is_file()):
        return False
    cfg = json.loads(settings.read_text(encoding="utf-8"))
    found = metrics.whole_lines(lines.read_bytes())
    last = json.loads(found[-1])["step"] if found else 0
    return last >= cfg["sft"]["steps"] + cfg["rl"]["steps"]
