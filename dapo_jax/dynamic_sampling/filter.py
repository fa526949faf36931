"""Which groups carry gradient: those whose rewards differ."""

import dataclasses

import numpy as np

from dapo_jax import config, types

INVALID, ALL_ZERO, ALL_ONE, INFORMATIVE = range(4)
METRICS = {"task": "reward", "shaped": "shaped"}


@dataclasses.dataclass(frozen=True)
class Classes:
    """One entry per group."""

    group: np.ndarray  # i32[g] ids, ascending
    kind: np.ndarray  # i8[g] INVALID, ALL_ZERO, ALL_ONE or INFORMATIVE


def informative(samples: types.Samples, cfg: config.Filter, *, least: int = 2) -> Classes:
    """Classify each group by its valid samples; rows may stand in any order.

    Informative: the chosen metric spreads by more than the tolerance. The others are all right or
    all wrong by their mean task reward (>= 0.5), whatever the metric. Fewer than `least` valid
    samples: invalid. The default metric is the task reward, because a length penalty lets groups
    that are entirely wrong look informative, and they teach short answers.
    """
    ids, row_group = np.unique(samples.group, return_inverse=True)
    rows = row_group[samples.valid]
    values = getattr(samples, METRICS[cfg.metric])[samples.valid].astype(np.float64)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, rows, values)
    np.maximum.at(high, rows, values)
    count = np.bincount(rows, minlength=len(ids))
    total = np.bincount(rows, weights=samples.reward[samples.valid], minlength=len(ids))
    kind = np.where(total >= 0.5 * count, ALL_ONE, ALL_ZERO)
    kind = np.where(high - low > cfg.tolerance, INFORMATIVE, kind)
    return Classes(ids, np.where(count < least, INVALID, kind).astype(np.int8))


def keep(samples: types.Samples, groups: np.ndarray) -> types.Samples:
    """The valid rows of `groups`, in their order."""
    return samples.take(samples.valid & np.isin(samples.group, groups))
