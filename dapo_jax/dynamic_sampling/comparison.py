"""Means of simulated policies and how sure they are: paired, with 95 % intervals."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from dapo_jax.dynamic_sampling import simulation

LEVEL = 0.95
RESAMPLES = 2000
BLOCK = 16  # steps drawn together: twice the window through which one step acts on later ones
WARM_UP = 100  # first steps that the reference means leave out


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; NaN bounds: too little to say."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One policy. Counts are means per step."""

    name: str
    seconds: Interval
    saving: Interval  # % of the base's seconds, paired with the base on the same outcomes
    prompts: float
    samples: float
    rounds: float
    again: float  # share of steps with more than one round
    surplus: float  # informative groups beyond the batch: carried or dropped
    carried: float
    dropped: float
    old: float  # share of trained groups that were carried
    age: float  # mean steps that trained groups have waited
    oracle_ratio: float
    beyond: int  # steps that asked for more prompts than there are; left out of the means
    closed: Interval | None = None  # % of the seconds between the base and the oracle
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Section:
    """One table with its title."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


MEANS = {"prompts": "asked", "samples": "samples", "rounds": "rounds", "carried": "carried",
         "dropped": "expired", "age": "age",
         "oracle_ratio": "oracle_ratio"}


def over_runs(values: Sequence[float] | np.ndarray) -> Interval:
    """Mean of one value per run, with Student's interval."""
    values = np.asarray(values, np.float64)
    mean, freedom = float(np.mean(values)), len(values) - 1
    if not freedom:
        return Interval(mean, float("nan"), float("nan"))
    half = special.stdtrit(freedom, 0.5 + LEVEL / 2) * np.std(values, ddof=1) / len(values) ** 0.5
    return Interval(mean, float(mean - half), float(mean + half))


def over_steps(seconds: np.ndarray, base: np.ndarray, *,
               seed: int = 0) -> tuple[Interval, Interval]:
    """Mean of `seconds` and its saving against `base` in %, both f64[steps] of the same steps.

    Intervals by a moving-block bootstrap over steps: a step acts on those that follow it through
    the window and the carried groups, so single steps are not independent.
    """
    steps, width = len(seconds), min(BLOCK, max(1, len(seconds) // 4))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, steps - width + 1, size=(RESAMPLES, -(-steps // width)))
    chosen = (starts[:, :, None] + np.arange(width)).reshape(RESAMPLES, -1)[:, :steps]
    means, bases = np.mean(seconds[chosen], axis=1), np.mean(base[chosen], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):  # few steps, some all from carried groups
        saved, draws = (100 * (1 - own / other) for own, other in (
            (np.mean(seconds), np.mean(base)), (means, bases)))
    return _percentiles(float(np.mean(seconds)), means), _percentiles(float(saved), draws)


def rows(traces: Mapping[str, Sequence[simulation.Trace]], *, base: str, first: int,
         oracle: str = "") -> list[Row]:
    """A row per policy over its runs, from step `first` on; `base` and `oracle` name two of them.

    Several runs: the unit is the run. One run: the unit is a block of steps.
    """
    return [_row(name, runs, traces[base], first, traces.get(oracle)) for name, runs in
            traces.items()]


def _row(name: str, runs: Sequence[simulation.Trace], base: Sequence[simulation.Trace], first: int,
         oracle: Sequence[simulation.Trace] | None) -> Row:
    if len(runs) > 1:
        own, other = _means(runs, first), _means(base, first)
        seconds, saving = over_runs(own), over_runs(100 * (1 - own / other))
        closed = over_runs(100 * (other - own) / (other - _means(oracle, first))
                           ) if oracle else None
    else:
        (seconds, saving), closed = _one_run(runs[0], base[0], first), None
    inside = [~run.beyond[first:] for run in runs]
    means: dict[str, Any] = {field: _average([getattr(run, source)[first:] for run in runs], inside)
             for field, source in MEANS.items()}
    return Row(name, seconds, saving, **means, surplus=means["carried"] + means["dropped"],
               again=_average([run.rounds[first:] > 1 for run in runs], inside),
               old=_average([(run.old / np.maximum(run.kept, 1))[first:] for run in runs], inside),
               beyond=int(sum(np.sum(run.beyond[first:]) for run in runs)), closed=closed)


def _means(runs: Sequence[simulation.Trace], first: int) -> np.ndarray:
    return np.array([np.mean(run.seconds[first:]) for run in runs])


def _average(values: Sequence[np.ndarray], inside: Sequence[np.ndarray]) -> float:
    """Mean of what is finite, over the steps inside; NaN if there are none."""
    chosen = np.concatenate([v[use] for v, use in zip(values, inside, strict=True)]).astype(float)
    chosen = chosen[np.isfinite(chosen)]
    return float(np.mean(chosen)) if len(chosen) else float("nan")


def _one_run(run: simulation.Trace, base: simulation.Trace,
             first: int) -> tuple[Interval, Interval]:
    own, both = ~run.beyond[first:], ~(run.beyond | base.beyond)[first:]
    nothing = Interval(*[float("nan")] * 3)
    seconds, other = run.seconds[first:], base.seconds[first:]
    mean = over_steps(seconds[own], seconds[own])[0] if np.any(own) else nothing
    saving = over_steps(seconds[both], other[both])[1] if np.any(both) else nothing
    return mean, saving


def _percentiles(mean: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [50 * (1 - LEVEL), 100 - 50 * (1 - LEVEL)])
    return Interval(mean, float(low), float(high))
