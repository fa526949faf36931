"""Which samples are learned from: pure strategies `(samples, key) -> rows`, one after another.

Each names rows i64[m], ascending, of the samples it is given. It reads their host columns (one that
asks for it, the policy's mean states of them beside) and draws from its key alone: the same samples
give the same rows in whatever order they stand, and a group's rows do not depend on other groups
(those of whole groups apart). A group of right and wrong samples keeps both where a strategy keeps
two or more of it, `reject_wrong` apart.

A strategy also says of which samples the advantages' statistics are (`Strategy.statistics`).
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import diverse as far
from dapo_jax.dynamic_sampling import history

STREAM = 4  # keeps these random numbers apart from others drawn from the run's seed


@dataclasses.dataclass(frozen=True)
class Key:
    """What random numbers and ages come from."""

    seed: int
    step: int  # the current one
    place: int = 0  # of the strategy among those applied


Choose = Callable[..., np.ndarray]  # (samples, key), and `states` where the strategy reads them
States = Callable[[types.Samples], np.ndarray]  # f32[n, D] of samples: learner/features.py
# Of one group: its rows i64[k] in random order -> those kept.
ChooseOfGroup = Callable[[types.Samples, np.ndarray], np.ndarray]

# The samples that advantages count after a strategy: those it kept; those of the groups it kept a
# sample of; those that were counted before.
KEPT, OF_KEPT_GROUPS, AS_BEFORE = "kept", "of_kept_groups", "as_before"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A named choice; `most` samples of a group are left, 0: any number."""

    name: str
    choose: Choose
    statistics: str
    most: int = 0
    reads_states: bool = False


def no_states(samples: types.Samples) -> np.ndarray:
    """Where there is no policy at hand; raises ValueError."""
    raise ValueError("a strategy reads the policy's hidden states: give select.apply a function "
                     "that makes them of samples (learner/features.of)")


def apply(
    strategies: tuple[Strategy, ...], samples: types.Samples, key: Key, *,
    states: States = no_states,
) -> types.Selected:
    """Let each strategy choose among what those before it kept of the valid samples. `states` is
    called for what is left, where a strategy reads them."""
    counted, rows = np.arange(len(samples)), np.flatnonzero(samples.valid)
    for place, strategy in enumerate(strategies):
        left = samples.take(rows)
        more = {"states": states(left)} if strategy.reads_states else {}
        rows = rows[strategy.choose(left, dataclasses.replace(key, place=place), **more)]
        if strategy.statistics == KEPT:
            counted = rows
        elif strategy.statistics == OF_KEPT_GROUPS:
            counted = counted[np.isin(samples.group[counted], samples.group[rows])]
    return types.Selected(samples.take(counted), np.isin(counted, rows))


def most(strategies: tuple[Strategy, ...], samples_per_prompt: int) -> int:
    """The most samples of a group that are left of so many."""
    return min([samples_per_prompt, *(one.most for one in strategies if one.most)])


# -------------------------------------------------------------------------------- rows of any group


def reject_wrong(samples: types.Samples, key: Key, *, least: float) -> np.ndarray:
    """Samples of at least this raw task reward: rejection sampling, arXiv 2308.01825."""
    return np.flatnonzero(samples.reward >= least)


def max_variance(samples: types.Samples, key: Key, *, count: int) -> np.ndarray:
    """The `count` samples of each group whose shaped rewards have the largest variance.

    PODS, arXiv 2504.13818: of rewards in order, these are some lowest and some highest. Which of
    equal rewards is drawn.
    """
    return _of_each_group(samples, key, functools.partial(_ends, count=count))


def diverse(samples: types.Samples, key: Key, *, count: int, ngram: int) -> np.ndarray:
    """Up to `count` completions of each group that lie far apart by their runs of tokens.

    The first is drawn, each further one is farthest from those chosen (the second from the other
    class, if there is one); fewer where all that is left equals something chosen.
    """
    return _of_each_group(samples, key, functools.partial(
        _apart, count=count, distances=lambda rows: far.ngram_distances(
            samples.tokens[rows], samples.loss_mask[rows], longest=ngram)))


def diverse_states(
    samples: types.Samples, key: Key, *, states: np.ndarray, count: int
) -> np.ndarray:
    """As `diverse`, by the policy's mean hidden states f32[n, D] of the completions."""
    return _of_each_group(samples, key, functools.partial(
        _apart, count=count, distances=lambda rows: far.state_distances(
            states[rows], samples.tokens[rows], samples.length[rows])))


def length_strata(samples: types.Samples, key: Key, *, count: int, strata: int) -> np.ndarray:
    """`count` samples of each group in equal shares from `strata` parts of like length.

    The parts are quantiles of the completions' tokens, the shares differ by at most 1, and within
    a part samples are drawn. A class that is left out then takes the place of the sample nearest
    in length.
    """
    return _of_each_group(samples, key, functools.partial(_shares, count=count, strata=strata))


def _of_each_group(samples: types.Samples, key: Key, choose: ChooseOfGroup) -> np.ndarray:
    """Rows that `choose` keeps of each group, whose rows it gets in an order drawn for it."""
    order = np.lexsort((samples.sample, samples.group))
    ids, starts = np.unique(samples.group[order], return_index=True)
    kept = []
    for group, rows in zip(ids, np.split(order, starts[1:])):
        drawn = _generator(key, int(group)).permutation(len(rows))
        kept.append(choose(samples, rows[drawn]))
    return np.sort(np.concatenate(kept)) if kept else order


def _generator(key: Key, *more: int) -> np.random.Generator:
    return np.random.default_rng([key.seed, STREAM, key.step, key.place, *more])


def _ends(samples: types.Samples, rows: np.ndarray, *, count: int) -> np.ndarray:
    size = len(rows)
    if size <= count:
        return rows
    rising = rows[np.argsort(samples.shaped[rows], kind="stable")]
    values = samples.shaped[rising].astype(np.float64)
    values -= values.mean()
    sums, squares = (np.append(0, np.cumsum(values ** power)) for power in (1, 2))
    high = np.arange(count + 1)  # so many from the upper end, the others from the lower
    total, square = (part[count - high] + part[-1] - part[size - high] for part in (sums, squares))
    best = int(np.argmax(square / count - (total / count) ** 2))
    return np.concatenate([rising[:count - best], rising[size - best:]])


def _apart(
    samples: types.Samples, rows: np.ndarray, *, count: int,
    distances: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    squared = distances(rows)
    right = samples.reward[rows] >= history.SUCCESS
    first, other = [0], np.flatnonzero(right != right[0])
    if len(other) and count > 1:
        first.append(int(other[np.argmax(squared[0, other])]))
    return rows[far.farthest(squared, count, first=first)]


def _shares(samples: types.Samples, rows: np.ndarray, *, count: int, strata: int) -> np.ndarray:
    if len(rows) <= count:
        return rows
    by_length = rows[np.argsort(samples.length[rows], kind="stable")]
    place = {row: index for index, row in enumerate(rows)}  # drawn: who comes first in a part
    parts = min(strata, count)
    kept = [sorted(part, key=place.__getitem__)[:count // parts + (number < count % parts)]
            for number, part in enumerate(np.array_split(by_length, parts))]
    return _with_both_classes(samples, rows, np.concatenate(kept))


def _with_both_classes(samples: types.Samples, rows: np.ndarray, kept: np.ndarray) -> np.ndarray:
    right = samples.reward >= history.SUCCESS
    lacking = rows[right[rows] != right[kept[0]]]
    if len(kept) < 2 or not len(lacking) or len(np.unique(right[kept])) == 2:
        return kept
    gaps = np.abs(samples.length[lacking, None].astype(np.int64) - samples.length[kept])
    new, old = np.unravel_index(np.argmin(gaps), gaps.shape)
    return np.append(np.delete(kept, old), lacking[new])


# ------------------------------------------------------------------------------------ whole groups


def max_age(samples: types.Samples, key: Key, *, steps: int) -> np.ndarray:
    """Groups sampled at most so many steps before the key's."""
    old = samples.group[key.step - samples.born > steps]
    return np.flatnonzero(~np.isin(samples.group, old))


def capacity(samples: types.Samples, key: Key, *, groups: int, evict: str) -> np.ndarray:
    """So many groups; those that leave first are the first in the order `evict`."""
    ids, first = np.unique(samples.group, return_index=True)
    leaving = np.lexsort((ids, samples.born[first], EVICTIONS[evict](samples, ids, key)))
    gone = ids[leaving[:max(len(ids) - groups, 0)]]
    return np.flatnonzero(~np.isin(samples.group, gone))


def _oldest(samples: types.Samples, ids: np.ndarray, key: Key) -> np.ndarray:
    return np.zeros(len(ids))


def _random(samples: types.Samples, ids: np.ndarray, key: Key) -> np.ndarray:
    return _generator(key).permutation(len(ids))


def _least_spread(samples: types.Samples, ids: np.ndarray, key: Key) -> np.ndarray:
    place = np.searchsorted(ids, samples.group)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, place, samples.shaped)
    np.maximum.at(high, place, samples.shaped)
    return high - low


# Name -> (samples, ids of the groups ascending, key) -> a number a group: the lowest leaves first,
# of equals the oldest, of these the first admitted.
EVICTIONS = {"oldest": _oldest, "random": _random, "least_spread": _least_spread}


# --------------------------------------------------------------------------- from the configuration


def strategies(cfg: config.Config) -> tuple[Strategy, ...]:
    """The strategies of `config.select`; ConfigError for a name or a number that is none."""
    found = tuple(_strategy(entry, cfg) for entry in cfg.select.strategies)
    if cfg.select.features == "hidden" and not any(one.reads_states for one in found):
        raise config.ConfigError(
            "config.select.features = 'hidden' has no effect, since no strategy reads features: "
            "add ('diverse', 2) to config.select.strategies, or leave config.select.features out")
    return found


def _strategy(entry: object, cfg: config.Config) -> Strategy:
    where = f"config.select.strategies has the entry {entry!r}"
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
        raise config.ConfigError(f"{where}; each is a name and a number: ('reject_wrong', 0.5)")
    name, number = entry
    if name not in STRATEGIES:
        hint = config.near(name, STRATEGIES) or f"; allowed: {', '.join(STRATEGIES)}"
        raise config.ConfigError(f"{where}, whose name is not known{hint}")
    least, make = STRATEGIES[name]
    whole = isinstance(number, int) and not isinstance(number, bool)
    if least is not None and not (whole and number >= least):
        raise config.ConfigError(f"{where}; its number must be a whole one of at least {least}")
    if least is None and not (whole or isinstance(number, float) and np.isfinite(number)):
        raise config.ConfigError(f"{where}; its number must be a finite reward")
    return make(name, number, cfg)


def _reject_wrong(name: str, number: float, cfg: config.Config) -> Strategy:
    return Strategy(name, functools.partial(reject_wrong, least=number), AS_BEFORE)


def _max_variance(name: str, number: int, cfg: config.Config) -> Strategy:
    return Strategy(name, functools.partial(max_variance, count=number), KEPT, number)


def _diverse(name: str, number: int, cfg: config.Config) -> Strategy:
    if cfg.select.features == "hidden":
        return Strategy(name, functools.partial(diverse_states, count=number), AS_BEFORE, number,
                        reads_states=True)
    choose = functools.partial(diverse, count=number, ngram=cfg.select.ngram)
    return Strategy(name, choose, AS_BEFORE, number)


def _length_strata(name: str, number: int, cfg: config.Config) -> Strategy:
    choose = functools.partial(length_strata, count=number, strata=cfg.select.strata)
    return Strategy(name, choose, AS_BEFORE, number)


def _max_age(name: str, number: int, cfg: config.Config) -> Strategy:
    return Strategy(name, functools.partial(max_age, steps=number), OF_KEPT_GROUPS)


def _capacity(name: str, number: int, cfg: config.Config) -> Strategy:
    choose = functools.partial(capacity, groups=number, evict=cfg.buffer.evict)
    return Strategy(name, choose, OF_KEPT_GROUPS)


# Name -> the least whole number that it takes (None: any finite number), and what makes it.
STRATEGIES = {
    "reject_wrong": (None, _reject_wrong),
    "max_variance": (2, _max_variance),
    "diverse": (1, _diverse),
    "length_strata": (1, _length_strata),
    "max_age": (0, _max_age),
    "capacity": (1, _capacity),
}
