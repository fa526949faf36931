"""Where arrays inside a compiled program lie, on the mesh of `jax.set_mesh`; without one there is
one device, and nothing to say."""

import jax
from jax.sharding import PartitionSpec

SLOTS = ("data", "fsdp")  # mesh axes that split slots


def slot_parts() -> int:
    """Into how many parts slots are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]


def tensor_parts() -> int:
    """Into how many parts heads, feed-forward part and vocabulary are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["tensor"]


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """x, each axis split over mesh axes or, None, whole; "tensor" only where it divides."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    spec = (None if axis == "tensor" and size % tensor_parts() else axis
            for axis, size in zip(axes, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
