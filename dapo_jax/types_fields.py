"""What the fields of types.py and types_sampler.py are made of."""

from typing import Any

Tree = Any  # nested dict of arrays
# A field of what the host makes for the device, or takes from it: a jax array there, numpy here,
# and a jax.ShapeDtypeStruct or a sharding where programs are compiled for it.
Leaf = Any
