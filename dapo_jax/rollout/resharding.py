"""The way of the parameters from where they are trained to where they sample.

A sampler may split the same devices in another way than the trainer (config.rollout.mesh): its
parameters are moved once a call of `engine.serve`, and held beside the trainer's until it ends.
"""

import functools
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax import types
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.runtime import mesh as mesh_lib


def compile_move(
    spec: ModelSpec, trained: mesh_lib.AnyMesh, sampling: mesh_lib.AnyMesh, *,
    build: mesh_lib.Build = mesh_lib.compiled,
) -> Callable | None:
    """Parameters on the trainer's mesh -> the same on the sampler's; None where these are one.
    `build` makes the program of a jitted function, the mesh and shapes of the argument."""
    if trained == sampling:
        return None
    here, there = (mesh_lib.model_structs(mesh, spec) for mesh in (trained, sampling))
    move = jax.jit(lambda params: params,
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, there))
    return build(move, trained, here)


def moved_bytes(spec: ModelSpec, trained: Mesh, sampling: Mesh, weights: types.Tree) -> int:
    """Bytes that all devices together receive in a call of `engine.serve`, at the least: what each
    holds of the moved parameters, and then of decode's `weights` (shardings as of
    programs.weight_places), and did not hold before."""
    here, there = (mesh_lib.model_structs(mesh, spec) for mesh in (trained, sampling))
    moved = 0 if trained == sampling else sum(
        _received(leaf.shape, leaf.sharding, to.sharding, leaf.dtype.itemsize)
        for leaf, to in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True))
    cast = jax.eval_shape(functools.partial(transformer.unstack, spec), there)
    rest = {name: leaf for name, leaf in there.items() if name != "blocks"}
    block = jax.tree.map(_unstacked, there["blocks"])
    unstacked = jax.tree.leaves(rest | {"blocks": [block] * spec.layers})
    return moved + sum(
        _received(leaf.shape, held.sharding, to, leaf.dtype.itemsize) for leaf, held, to in zip(
            jax.tree.leaves(cast), unstacked, jax.tree.leaves(weights), strict=True))


def _unstacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One layer of a parameter that holds all."""
    split = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=split)


@functools.cache
def _received(shape: tuple[int, ...], held: NamedSharding, wanted: NamedSharding, size: int
              ) -> int:
    """Bytes that all devices get to hold their part, beyond what they hold of it."""
    before = held.devices_indices_map(shape)
    return size * sum(
        _volume(shape, index) - _volume(shape, index, before[device])
        for device, index in wanted.devices_indices_map(shape).items())


def _volume(shape: tuple[int, ...], *indices: tuple[slice, ...]) -> int:
    """Numbers in what the boxes share."""
    sides = []
    for axis, count in enumerate(shape):
        ends = [index[axis].indices(count) for index in indices]
        sides.append(max(0, min(end for _, end, _ in ends) - max(start for start, _, _ in ends)))
    return math.prod(sides)
