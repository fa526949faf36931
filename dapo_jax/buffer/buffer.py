"""Groups that wait for the next step: whole groups in admission order, of bounded age."""

import numpy as np

from dapo_jax import types


def groups(buffer: types.Samples) -> int:
    """Number of groups."""
    return len(np.unique(buffer.group))


def mean_age(buffer: types.Samples, *, step: int) -> float:
    """Mean over the groups of the steps since they were sampled; NaN if there are none."""
    _, first = np.unique(buffer.group, return_index=True)
    return float(np.mean(step - buffer.born[first])) if len(first) else float("nan")


def add(buffer: types.Samples, samples: types.Samples) -> types.Samples:
    """Append groups. Raises ValueError if one is there already: half a group would be drawn."""
    twice = np.intersect1d(buffer.group, samples.group)
    if len(twice):
        raise ValueError(f"buffer.add: group {twice[0]} is in the buffer already; add a group "
                         "once, with all its samples")
    return types.concatenate(buffer, samples)


def draw(buffer: types.Samples, count: int) -> tuple[types.Samples, types.Samples]:
    """Split off the `count` groups that come first; fewer if there are fewer."""
    ids, first = np.unique(buffer.group, return_index=True)
    chosen = np.isin(buffer.group, ids[np.argsort(first)][:max(count, 0)])
    return buffer.take(chosen), buffer.take(~chosen)


def evict(buffer: types.Samples, *, step: int, carry_steps: int) -> tuple[types.Samples, int]:
    """Drop the groups sampled more than `carry_steps` steps before `step`; how many they were."""
    old = np.unique(buffer.group[step - buffer.born > carry_steps])
    return buffer.take(~np.isin(buffer.group, old)), len(old)


def limit(buffer: types.Samples, count: int) -> tuple[types.Samples, int]:
    """Drop all but the `count` groups that come first; how many were dropped."""
    first, rest = draw(buffer, count)
    return first, groups(rest)
