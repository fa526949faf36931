"""What the parameters' way to another mesh of the same devices sends, counted from shapes."""

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dapo_jax import types

Box = tuple[tuple[int, int], ...]  # of an array, first and last place + 1 along each axis


def received(held: types.Tree, wanted: types.Tree) -> list[int]:
    """Bytes that each device gets to hold its part of `wanted` beyond what it holds of `held`;
    shapes with shardings over two meshes of the same devices in one order."""
    leaves = zip(jax.tree.leaves(held), jax.tree.leaves(wanted), strict=True)
    return [sum(column) for column in zip(*(
        [here.dtype.itemsize * (_size(to) - _shared(to, own))
         for own, to in zip(_boxes(here), _boxes(there), strict=True)]
        for here, there in leaves))]


def _boxes(leaf: jax.ShapeDtypeStruct) -> Iterator[Box]:
    """The part of the array that each device has, by its number in the mesh."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), "parameters lie on a mesh"
    sizes = dict(sharding.mesh.shape)
    split = [_named(axis) for axis in sharding.spec] + [()] * (leaf.ndim - len(sharding.spec))
    for place in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, place))
        yield tuple(_side(size, axes, at, sizes) for size, axes in zip(leaf.shape, split))


def _named(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,) if axis else ()


def _side(size: int, axes: Sequence[str], at: dict[str, int], sizes: dict[str, int]
          ) -> tuple[int, int]:
    parts, place = 1, 0
    for axis in axes:
        parts, place = parts * sizes[axis], place * sizes[axis] + at[axis]
    return size // parts * place, size // parts * (place + 1)


def _size(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def _shared(one: Box, other: Box) -> int:
    return math.prod(max(0, min(end, to) - max(start, begin))
                     for (start, end), (begin, to) in zip(one, other))
