"""What a run that trains an adapter (models/lora.py) has beside its state: the base model, held
once and never changed, what tells it from others, and the merge that the sampler runs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax import config, types
from dapo_jax.models import lora
from dapo_jax.models.spec import ModelSpec
from dapo_jax.runtime import mesh as mesh_lib

# Of a fingerprint: odd numbers by which places along an axis count, and the finaliser of
# MurmurHash3, which spreads each bit over all; both modulo 2^32, and neither loses a change.
_STRIDES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
_MIXING = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


@dataclasses.dataclass(frozen=True)
class Base:
    """The model under an adapter."""

    params: types.Tree
    mark: np.ndarray  # u32[leaves], see `fingerprint`
    merge: Callable[[types.Tree, types.Tree], types.Tree]  # compiled; (params, adapter) -> blocks


def opened(spec: ModelSpec, cfg: config.Lora, mesh: Mesh, params: types.Tree) -> Base:
    """The base model and its merge, compiled."""
    return Base(params, fingerprint(params), compile_merge(spec, cfg, mesh))


def compile_merge(
    spec: ModelSpec, cfg: config.Lora, mesh: mesh_lib.AnyMesh, *,
    build: mesh_lib.Build = mesh_lib.compiled,
) -> Callable:
    """(base, adapter) -> merged blocks, which lie as the model's own do; `build` makes the program
    of a jitted function, the mesh and shapes of the arguments."""
    structs = mesh_lib.model_structs(mesh, spec)
    # The blocks alone: embedding and head would be copied.
    merge = jax.jit(lambda base, adapter: lora.merge(base, adapter, cfg)["blocks"],
                    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, structs["blocks"]))
    return build(merge, mesh, structs, mesh_lib.trained_structs(mesh, spec, cfg))


def new(spec: ModelSpec, cfg: config.Lora, mesh: Mesh, key: jax.Array) -> types.Tree:
    """An adapter that changes nothing yet, made straight into its shards."""
    structs = mesh_lib.trained_structs(mesh, spec, cfg)
    make = jax.jit(lambda root: lora.init(spec, cfg, root),
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, structs))
    return make(key)


def sampled(base: Base | None, trained: types.Tree) -> types.Tree:
    """The parameters that completions are drawn with: the base with the adapter merged in, or,
    without a base, those that are trained."""
    if base is None:
        return trained
    return base.params | {"blocks": base.merge(base.params, trained)}


def fingerprint(params: types.Tree) -> np.ndarray:
    """A number for each parameter, u32[leaves], that changes with any bit of it, and does not
    depend on how it is split over devices."""
    return np.asarray(mesh_lib.fetch(_marks(jax.tree.leaves(params))), np.uint32)


def check(base: Base, mark: np.ndarray, *, where: str) -> None:
    """ConfigError if the adapter that `where` holds was trained on another base: `mark` u32[leaves]
    is its own."""
    names = [jax.tree_util.keystr(path, simple=True, separator=".")
             for path, _ in jax.tree.leaves_with_path(base.params)]
    differ = [name for name, one, other in zip(names, base.mark, mark, strict=True)
              if one != other]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise config.ConfigError(
            f"{where} holds an adapter of another base model: {', '.join(differ[:3])}{more} are "
            "not the parameters that it was trained on; set config.model to the model that was, "
            "with the same file and param_dtype")


@jax.jit
def _marks(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_mark(leaf) for leaf in leaves]


def _mark(leaf: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    x = bits.astype(jnp.uint32)
    for axis, stride in zip(range(leaf.ndim), _STRIDES):
        x += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride)
    for shift, factor in _MIXING:
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)
