"""Whether two settings differ: runs paired by their seed, and what may be said of it in words.

What decides is Student's t of the paired differences, and of several comparisons made together
Holm's correction of it. The bootstrap interval stands beside it and decides nothing: resampled
differences never leave those that were seen, so with three seeds that agree it never holds 0,
which by chance alone happens in a quarter of all cases.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from dapo_jax.dynamic_sampling import comparison

LEVEL = comparison.LEVEL
LISTED = 6  # pairs up to which every resample is listed, 6 ** 6 of them; of more some are drawn
RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one setting against another, over the seeds that both have; NaN: too few to say."""

    name: str
    other: str
    seeds: tuple[int, ...]  # common ones
    mean: float  # own - other
    student: comparison.Interval  # 95 %
    bootstrap: comparison.Interval  # 95 %, percentiles
    chance: float  # two-sided p of Student's t, corrected where several were compared
    words: str


def against(settings: Mapping[str, Mapping[int, float]], base: str) -> list[Difference]:
    """Every other setting (name -> seed -> figure) against `base`, corrected for their number."""
    alone = [_paired(name, base, settings[name], settings[base])
             for name in settings if name != base]
    chances = holm([one.chance for one in alone])
    return [dataclasses.replace(one, chance=chance, words=_words(one, chance, len(alone)))
            for one, chance in zip(alone, chances, strict=True)]


def comparable(settings: Mapping[str, Mapping[int, float]]) -> bool:
    """Whether two or more settings have two or more seeds in common."""
    return any(len(one.keys() & other.keys()) >= 2
               for one, other in itertools.combinations(settings.values(), 2))


def _paired(name: str, base: str, own: Mapping[int, float], other: Mapping[int, float]
            ) -> Difference:
    seeds = tuple(sorted(seed for seed in own.keys() & other.keys()
                         if math.isfinite(own[seed]) and math.isfinite(other[seed])))
    values = np.array([own[seed] - other[seed] for seed in seeds], np.float64)
    unknown = comparison.Interval(*[math.nan] * 3)
    if not seeds:
        return Difference(name, base, seeds, math.nan, unknown, unknown, math.nan, "")
    return Difference(name, base, seeds, float(np.mean(values)), comparison.over_runs(values),
                      bootstrap(values), chance(values), "")


def bootstrap(values: Sequence[float] | np.ndarray) -> comparison.Interval:
    """Mean of the values with the percentile interval of the means of their resamples: of all of
    them where they can be listed, else of 10,000 drawn from a fixed seed."""
    values = np.asarray(values, np.float64)
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return comparison.Interval(mean, math.nan, math.nan)
    if count <= LISTED:
        chosen = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        chosen = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    low, high = np.percentile(values[chosen].mean(axis=1), [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return comparison.Interval(mean, float(low), float(high))


def chance(values: Sequence[float] | np.ndarray) -> float:
    """Two-sided p of Student's t that the mean of the values is 0; NaN of fewer than two. Where all
    are equal t has no meaning: the chance that all signs agree."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return math.nan
    error = np.std(values, ddof=1) / len(values) ** 0.5
    if not error:
        return 0.5 ** (len(values) - 1) if np.mean(values) else 1.0
    return float(2 * special.stdtr(len(values) - 1, -abs(np.mean(values) / error)))


def holm(chances: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the given order; NaN stays and is not counted."""
    order = sorted((place for place, one in enumerate(chances) if not math.isnan(one)),
                   key=lambda place: chances[place])
    corrected, least = list(chances), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * chances[place]))
        corrected[place] = least
    return corrected


def _words(one: Difference, corrected: float, compared: int) -> str:
    if not one.seeds:
        return "no seed in common"
    if len(one.seeds) == 1:
        return "one seed in common: that says nothing"
    if not one.mean and not one.student.high:
        return f"the same in all {len(one.seeds)} seeds"
    many = f", corrected for {compared} comparisons" if compared > 1 else ""
    way = "higher" if one.mean > 0 else "lower"
    p = f"p = {corrected:.2g}{many}"
    if corrected < 1 - LEVEL:
        return f"a real difference: {way} by {abs(one.mean):.3g} ({p})"
    reach = one.student.high - one.student.mean
    if reach < 1e-6 * abs(one.mean):  # of equal differences t says nothing; their signs do
        return ("no difference shown, although the seeds agree to the digit: "
                f"{len(one.seeds)} do so by chance ({p})")
    agree = ", although all seeds agree" if _agree(one) else ""
    return (f"no difference shown{agree}: {len(one.seeds)} seeds like these can show one of about "
            f"{reach:.2g} or more ({p})")


def _agree(one: Difference) -> bool:
    """Whether all paired differences have one sign, which is when no resample's mean has the
    other: the bootstrap of few seeds is that of their least and greatest."""
    return one.bootstrap.low * one.bootstrap.high > 0 and len(one.seeds) <= 3
