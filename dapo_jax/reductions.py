"""Metrics that carry their reduction: those of parts merge exactly, on the device and the host."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Beside it stands the decorator of a dataclass, by which type checkers know one.
_pytree = jax.tree_util.register_dataclass



@_pytree
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean that merges exactly: `total / weight`."""

    total: jax.Array  # sum of weight * value
    weight: jax.Array


@_pytree
@dataclasses.dataclass(frozen=True)
class Max:
    """A maximum."""

    value: jax.Array


@_pytree
@dataclasses.dataclass(frozen=True)
class Sum:
    """A count."""

    value: jax.Array


@_pytree
@dataclasses.dataclass(frozen=True)
class Effective:
    """Kish's effective sample size as a share: total^2 / (count * squares)."""

    total: jax.Array  # sum of the values
    squares: jax.Array
    count: jax.Array


Metric = Mean | Max | Sum | Effective
Metrics = dict[str, Metric]


def merge(first: Metrics, second: Metrics) -> Metrics:
    """Combine two sets of metrics with the same names, each by its own reduction."""
    def join(a: Metric, b: Metric) -> Metric:
        return jax.tree.map(jnp.maximum if isinstance(a, Max) else jnp.add, a, b)
    return {name: join(first[name], second[name]) for name in first}


def results(fetched: Sequence[Metrics]) -> dict[str, float]:
    """Values of metrics that were fetched to the host; NaN where nothing was counted."""
    return {name: _result([metrics[name] for metrics in fetched])
            for name in (fetched[0] if fetched else ())}


def _result(parts: Sequence[Metric]) -> float:
    kind, columns = type(parts[0]), zip(*map(jax.tree.leaves, parts))
    if kind is Max:
        return float(max(*columns))
    sums = [float(sum(map(float, column))) for column in columns]
    if kind is Sum:
        return sums[0]
    if kind is Effective:
        total, squares, count = sums
        return total ** 2 / (count * squares) if count * squares else float("nan")
    total, weight = sums
    return total / weight if weight else float("nan")
