"""The parts of a block as pure functions: norm, rotary positions, attention in two pieces.

Letters: S slots, R rows, T tokens of a row, P prompt tokens, U keys of a row, D model, H heads,
K kv heads, G query heads per kv head, E head size, F ff.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models import spec as spec_lib

MASKED = -1e30  # finite: a row whose keys are all masked stays free of NaN


def wide_dtype(x: jax.Array) -> jnp.dtype:
    """What sums over x are made in: float32, or float64 where x is."""
    return jnp.promote_types(x.dtype, jnp.float32)


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, unit_offset: bool = False
) -> jax.Array:
    """`x / rms(x) * scale` over the last axis, in float32 or wider (arXiv 1910.07467); with
    `unit_offset` the factor is 1 + scale."""
    # Without axes of 1, in which XLA for CPU sums the gradient 10 times as slowly.
    used = [size for size in x.shape[:-1] if size > 1]
    wide = x.astype(wide_dtype(x)).reshape(*used, x.shape[-1])
    if unit_offset:
        scale = 1 + scale.astype(wide.dtype)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale).astype(x.dtype).reshape(x.shape)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`; None changes nothing (arXiv 2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_frequencies(spec: spec_lib.ModelSpec, *, sliding: bool = False) -> np.ndarray:
    """Angle per position of each pair of a head: f32[E/2] (arXiv 2104.09864); `sliding` layers
    may have a base of their own, which is never scaled."""
    local = sliding and spec.local_rope_base is not None
    base: Any = spec.local_rope_base if local else spec.rope_base
    base = base ** (-np.arange(0, spec.head_size, 2, dtype=np.float64) / spec.head_size)
    scaling = None if local else spec.rope_scaling
    if scaling is None:
        return base.astype(np.float32)
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    # llama3: slow rotations are divided by the factor, fast ones kept, those between blended.
    turns = scaling.original_context * base / (2 * math.pi)
    blend = np.clip((turns - scaling.low_frequency)
                    / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0)
    return (base * (blend + (1 - blend) / scaling.factor)).astype(np.float32)


def rope_tables(
    positions: jax.Array, spec: spec_lib.ModelSpec, *, sliding: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines f32[..., E/2] for positions i32[...]."""
    frequencies = rope_frequencies(spec, sliding=sliding)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x[..., heads, E] by tables [..., E/2]; pairs are (i, i + E/2)."""
    cos, sin = (table[..., None, :].astype(x.dtype) for table in tables)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    query: jax.Array,
    own: tuple[jax.Array, jax.Array],
    own_mask: jax.Array,
    prompt: tuple[jax.Array, jax.Array] | None,
    prompt_mask: jax.Array | None,
    *, scale: float | None = None, cap: float | None = None,
) -> jax.Array:
    """Softmax attention over a row's own keys and, in the same softmax, its slot's prompt keys.

    query [S, R, T, H, E]; own ([S, R, K, E, U], [S, R, K, U, E]); own_mask bool[S, R, T, U];
    prompt ([S, K, E, P], [S, K, P, E]) is read once for all rows of the slot; prompt_mask
    bool[S, R, T, P]. Axes of masks but the last may be 1. Scores are times `scale` (None:
    E ** -0.5), then capped (`softcap`).
    Returns [S, R, T, H, E]. Scores and sums are float32 or wider.
    """
    slots, rows, tokens, heads, size = query.shape
    kv_heads = own[0].shape[2]
    scale = size**-0.5 if scale is None else scale
    query = query.reshape(slots, rows, tokens, kv_heads, heads // kv_heads, size) * scale
    # Queries are brought into the order of each product, or the keys, which are more, would be.
    query = query.transpose(0, 1, 3, 4, 2, 5)
    own_mask = own_mask[:, :, None, None] if own_mask.ndim == 4 else own_mask
    scores = softcap(_wide_product("srkgte,srkeu->srkgtu", query, own[0]), cap)
    scores = jnp.where(own_mask, scores, MASKED)
    top = scores.max(axis=-1)
    if prompt is not None:
        prompt_scores = softcap(_wide_product("skrgte,skep->skrgtp", _turn(query), prompt[0]), cap)
        prompt_scores = jnp.where(
            cast(jax.Array, prompt_mask)[:, None, :, None], prompt_scores, MASKED)
        top = jnp.maximum(top, _turn(prompt_scores.max(axis=-1)))
    top = jax.lax.stop_gradient(top)
    mass = jnp.exp(scores - top[..., None])
    total = mass.sum(axis=-1)
    mixed = _wide_product("srkgtu,srkue->srkgte", mass.astype(own[1].dtype), own[1])
    if prompt is not None:
        mass = jnp.exp(prompt_scores - _turn(top)[..., None])
        total = total + _turn(mass.sum(axis=-1))
        mixed = mixed + _turn(_wide_product(
            "skrgtp,skpe->skrgte", mass.astype(prompt[1].dtype), prompt[1]))
    mixed = (mixed / total[..., None]).transpose(0, 1, 4, 2, 3, 5)
    return mixed.reshape(slots, rows, tokens, heads, size).astype(query.dtype)


def _turn(x: jax.Array) -> jax.Array:
    """Between rows before kv heads, as a row's own cache has them, and after, as the prompt's."""
    return x.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(letters: str, y: jax.Array, kernel: jax.Array) -> jax.Array:
    """`einsum(letters, y, kernel)`. Its own gradient is what einsum's is, but for the order of the
    kernel's product, which is that of the kernel: XLA for CPU would turn a whole activation."""
    return jnp.einsum(letters, y, kernel)


def _product_forward(letters: str, y: jax.Array, kernel: jax.Array) -> tuple:
    return jnp.einsum(letters, y, kernel), (y, kernel)


def _product_backward(letters: str, kept: tuple, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, kernel = kept
    (left, right), out = letters.split("->")[0].split(","), letters.split("->")[1]
    return (jnp.einsum(f"{out},{right}->{left}", bar, kernel),
            jnp.einsum(f"{left},{out}->{right}", y, bar))


product.defvjp(_product_forward, _product_backward)


def _wide_product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(letters, x, y, preferred_element_type=wide_dtype(y))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
