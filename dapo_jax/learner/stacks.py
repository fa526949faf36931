"""Microbatches of one shape in stacks, which one program runs in turn: each start of a program
allocates its temporary memory anew and lays out the weights again."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax import types
from dapo_jax.runtime import mesh as mesh_lib

Batches = types.TrainBatch | types.Stack


def shape(batch: Batches) -> tuple[int, int]:
    """Lengths (P, T) of its prompts and rows."""
    one = batch.batch if isinstance(batch, types.Stack) else batch
    return one.prompt_tokens.shape[-1], one.tokens.shape[-1]


def changed(batch: Batches, **fields: types.Leaf) -> Batches:
    """The microbatch, or the stack, with other fields of types.TrainBatch."""
    if isinstance(batch, types.Stack):
        return dataclasses.replace(batch, batch=dataclasses.replace(batch.batch, **fields))
    return dataclasses.replace(batch, **fields)


def stacked(batches: Iterable[Batches], sizes: Mapping[tuple[int, int], int]
            ) -> Iterator[Batches]:
    """The microbatches in stacks of `sizes` by shape (P, T): those of one shape that follow each
    other, on the host; where the size is 1, and where they are stacks, as they are."""
    for lengths, group in itertools.groupby(batches, shape):
        size, alike = sizes.get(lengths, 1), list(group)
        single = [batch for batch in alike if isinstance(batch, types.TrainBatch)]
        if size == 1 or len(single) < len(alike):
            yield from alike
        else:
            for start in range(0, len(single), size):
                yield _stack(single[start:start + size], size)


def _stack(batches: list[types.TrainBatch], size: int) -> types.Stack:
    def join(*leaves: np.ndarray) -> np.ndarray:
        joined = np.zeros((size, *leaves[0].shape), leaves[0].dtype)
        np.stack(leaves, out=joined[:len(leaves)])
        return joined
    count: Any = np.asarray(len(batches), np.int32)  # the pytree holds host arrays too
    return types.Stack(jax.tree.map(join, *batches), count)


def structs(batch: types.TrainBatch, size: int) -> Batches:
    """Shapes of a stack of `size` microbatches of this shape; of one, the microbatch itself."""
    if size == 1:
        return batch
    whole = NamedSharding(cast(NamedSharding, batch.tokens.sharding).mesh, PartitionSpec())
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return types.Stack(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
        (size, *leaf.shape), leaf.dtype, sharding=placed(leaf.sharding, size)), batch), count)


def placed(split: NamedSharding, size: int) -> NamedSharding:
    """Where a stack's fields lie: each microbatch as it would alone."""
    return split if size == 1 else NamedSharding(split.mesh, PartitionSpec(None, *split.spec))


def put(batch: Batches, split: NamedSharding) -> Batches:
    """On the devices, where it is not yet; `split` is a microbatch's sharding."""
    if isinstance(batch, types.TrainBatch):
        return mesh_lib.put(batch, split)
    return types.Stack(mesh_lib.put(batch.batch, placed(split, len(batch.batch.tokens))),
                       mesh_lib.put(batch.count, NamedSharding(split.mesh, PartitionSpec())))
