"""Sums over samples where a row may hold several of them (types.Packed)."""

import jax
import jax.numpy as jnp


def totals(values: jax.Array, sample: jax.Array | None) -> jax.Array:
    """At each token of values f32[..., T], the sum over the sample that it belongs to.

    `sample` i32[..., T] is alike in the tokens of one sample of a row and differs between its
    samples, which stand one after another (`TrainBatch.packed.after`); None: a row is one sample.
    """
    if sample is None:
        return jnp.broadcast_to(values.sum(axis=-1, keepdims=True), values.shape)
    change = jnp.diff(sample, axis=-1, prepend=sample[..., :1]) != 0
    number = jnp.cumsum(change, axis=-1)  # from 0 within the row
    width = values.shape[-1]
    rows = jnp.arange(values.size // width, dtype=number.dtype).reshape(*values.shape[:-1], 1)
    flat = (rows * width + number).reshape(-1)
    sums = jax.ops.segment_sum(values.reshape(-1), flat, num_segments=values.size)
    return sums[flat].reshape(values.shape)
