"""What the runs of a study of arms left: curves, and figures of them."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import metrics
from dapo_jax.studies import learning

# What is drawn and compared: name -> field of a metric line. All samples, not only the kept ones.
METRICS = {
    "repeatness": "repetition/mean",
    "repeating": "repetition/share",
    "answered": "reward/part/dapo_jax.envs.columns:answered",
    "stopped": "format/stopped",
    "length": "length/mean",
    "entropy": "policy/entropy",
    "gradient norm": "policy/grad_norm",
    "clipped high": "policy/clip_high",
    "truncated": "length/truncated",
    "reward": "reward/mean",
    "samples": "sampling/samples",
    "processor": "time/processor"}
EARLY, LATE = 0.2, 0.25  # shares of the steps that "early" and "late" mean; chosen before the runs
FIRST = 1 / 3  # of the steps: "faster early"


@dataclasses.dataclass(frozen=True)
class Curve:
    """The RL phase of one run; entry 0 of the accuracies is its start."""

    values: Mapping[str, np.ndarray]  # name in METRICS -> f64[steps], NaN where there is none
    at: np.ndarray  # i64[evaluations] steps before each evaluation
    accuracy: np.ndarray  # f64[evaluations] sampled held-out accuracy


Runs = Mapping[int, Curve]  # seed -> curve
Figure = Callable[[Curve], float]


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that is there, and what is not."""

    arms: Mapping[str, Runs]  # only finished runs
    missing: Sequence[str]


def read(where: Mapping[str, Mapping[int, pathlib.Path]]) -> Findings:
    """The curves of all finished runs, arm -> seed -> work directory; others are named in
    `missing`."""
    arms, missing = {}, []
    for arm, workdirs in where.items():
        arms[arm] = {seed: curve(workdir) for seed, workdir in workdirs.items()
                     if learning.finished(workdir)}
        if left := [str(seed) for seed in workdirs if seed not in arms[arm]]:
            missing.append(f"{arm}: no finished run of seed {', '.join(left)}")
    return Findings(arms, missing)


def curve(workdir: pathlib.Path) -> Curve:
    """Of DIR/metrics.jsonl; ConfigError where it holds no RL step or no evaluation before it."""
    lines = [json.loads(line) for line in
             metrics.whole_lines((workdir / "metrics.jsonl").read_bytes())]
    rl = [line for line in lines if line.get("phase") == "rl"]
    at = learning.curve(workdir)
    return Curve({name: np.array([np.nan if line.get(field) is None else line[field]
                                  for line in rl], np.float64)
                  for name, field in METRICS.items()}, at.at, at.accuracy)


def early(name: str) -> Figure:
    """Mean of a metric over the first fifth of the steps."""
    return lambda one: _mean(one.values[name][:max(1, round(EARLY * len(one.values[name])))])


def late(name: str) -> Figure:
    """Mean of a metric over the last quarter of the steps."""
    return lambda one: _mean(one.values[name][-max(1, round(LATE * len(one.values[name]))):])


def over_all(name: str) -> Figure:
    """Mean of a metric over all steps."""
    return lambda one: _mean(one.values[name])


def final_accuracy(one: Curve) -> float:
    """Mean held-out accuracy of the evaluations in the last quarter of the steps."""
    return _mean(one.accuracy[one.at >= (1 - LATE) * one.at[-1]])


def early_accuracy(one: Curve) -> float:
    """Mean gain of held-out accuracy over the evaluations in the first third of the steps."""
    inside = (one.at > 0) & (one.at <= FIRST * one.at[-1])
    return _mean(one.accuracy[inside]) - float(one.accuracy[0])


def unsteadiness(one: Curve) -> float:
    """Deviation / mean of the gradient norm after the first fifth of the steps."""
    values = one.values["gradient norm"]
    values = values[round(EARLY * len(values)):]
    values = values[np.isfinite(values)]
    return float(np.std(values) / np.mean(values)) if len(values) else float("nan")


def setback(one: Curve) -> float:
    """The largest fall of held-out accuracy below what an earlier evaluation gave."""
    return float(np.max(np.maximum.accumulate(one.accuracy) - one.accuracy))


def paired(own: Runs, other: Runs, figure: Figure, *, percent: bool = False
           ) -> comparison.Interval:
    """Mean difference own - other with Student's 95 % interval, paired by seed; `percent`: of the
    other's figure. NaN where a run has no figure or no seed is in both."""
    values = []
    for seed in sorted(set(own) & set(other)):
        first, second = figure(own[seed]), figure(other[seed])
        values.append(100 * (first / second - 1) if percent and second else
                      float("nan") if percent else first - second)
    return learning.interval(values)


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.mean(values)) if len(values) else float("nan")
