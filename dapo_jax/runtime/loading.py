"""Tensors of files straight into sharded parameters, one at a time: the host never holds more than
the tensor at hand."""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax import types
from dapo_jax.models import families
from dapo_jax.runtime import mesh as mesh_lib


def fill(like: types.Tree, pieces: Iterable[families.Piece]) -> types.Tree:
    """Parameters of the shapes, types and shardings of `like`, every part from a piece.

    A stacked parameter is written layer by layer into one buffer on the devices. The caller has
    checked that the pieces are complete.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    structs = {tuple(key.key for key in path): leaf for path, leaf in flat}
    stacked = {path: leaf for path, leaf in structs.items() if path[0] == "blocks"}
    arrays = _zeros(stacked)
    for piece in pieces:
        tensor, struct = piece.tensor, structs[piece.tensor.path]
        # Both waits: otherwise tensors that wait for their copy or their write pile up on the host.
        part = _to_devices(piece, struct.sharding).block_until_ready()
        del piece
        if tensor.layer is not None:
            row = mesh_lib.put(np.int32(tensor.layer), mesh_lib.replicated(struct.sharding.mesh))
            part = _writer(struct.sharding, tensor.order)(arrays[tensor.path], part, row)
        elif part.dtype != struct.dtype or tensor.order != tuple(range(part.ndim)):
            part = _placer(struct.sharding, struct.dtype, tensor.order)(part)
        arrays[tensor.path] = part.block_until_ready()
        del part
    return jax.tree.unflatten(structure, [arrays[path] for path in structs])


def _zeros(structs: dict[tuple, jax.ShapeDtypeStruct]) -> dict[tuple, jax.Array]:
    make = jax.jit(lambda: tuple(jnp.zeros(s.shape, s.dtype) for s in structs.values()),
                   out_shardings=tuple(s.sharding for s in structs.values()))
    return dict(zip(structs, make()))


def _to_devices(piece: families.Piece, sharding: NamedSharding) -> jax.Array:
    """The file's values, split as the parameter will be, so that no device gets more."""
    names = tuple(sharding.spec)
    names = names if piece.tensor.layer is None else names[1:]
    where = NamedSharding(sharding.mesh, PartitionSpec(*(names[i] for i in piece.tensor.order)))
    return jax.make_array_from_callback(
        piece.values.shape, where, lambda index: np.ascontiguousarray(piece.values[index]))


@functools.cache
def _placer(sharding: NamedSharding, dtype: np.dtype, order: tuple[int, ...]) -> Callable:
    return jax.jit(lambda part: part.transpose(np.argsort(order)).astype(dtype),
                   out_shardings=sharding)


@functools.cache
def _writer(sharding: NamedSharding, order: tuple[int, ...]) -> Callable:
    def write(whole: jax.Array, part: jax.Array, row: jax.Array) -> jax.Array:
        return whole.at[row].set(part.transpose(np.argsort(order)).astype(whole.dtype))
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
