"""Drawing tokens: one uniform number a token, and an inverted cumulative sum.

A number belongs to (seed, prompt, visit, sample, turn, position) and to nothing else, so a
sample does not depend on its batch, neighbours, order or device count.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dapo_jax.models import head

# The cumulative sum is looked up in so many blocks. Their number is fixed, not their width: a
# vocabulary split over devices is then cut between blocks, and no device gathers all of it.
BLOCKS = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and completions end; static in jitted functions."""

    max_new_tokens: int  # T
    stop_ids: tuple[int, ...]
    temperature: float = 1.0  # 0: the likeliest token; log-probs are then those of temperature 1
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # 0: all


def row_keys(
    root: jax.Array, prompt: jax.Array, visit: jax.Array, sample: jax.Array, *,
    turn: jax.Array | int = 0,
) -> jax.Array:
    """Key of each row, from its prompt's id, visit, sample number and turn i32[...] alone; one
    `turn` may be that of all rows."""
    def one(prompt: jax.Array, visit: jax.Array, sample: jax.Array, turn: jax.Array | int = turn
            ) -> jax.Array:
        key = root
        for number in (prompt, visit, sample, turn):
            key = jax.random.fold_in(key, number)
        return key
    for _ in prompt.shape:
        one = jax.vmap(one)
    return one(prompt, visit, sample, *(() if isinstance(turn, int) else (turn,)))


def uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
    """f32[...] in [0, 1): each row's number for a position of its completion, i32[...] or i32[]."""
    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, position))
    for _ in keys.shape:
        one = jax.vmap(one)
    return one(keys, jnp.broadcast_to(position, keys.shape))


def draw(logits: jax.Array, uniform: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Tokens i32[...] and their log-probabilities f32[...] from logits f32[..., V].

    The log-probability is of the full vocabulary with the temperature inside the softmax, also
    where top-k, top-p or min-p narrow what is drawn: that is the policy that is trained.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, head.log_softmax_at(logits, tokens)
    scaled = logits / sampling.temperature
    mass = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        mass = truncate(mass, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    tokens = invert(mass, uniform)
    return tokens, head.log_softmax_at(scaled, tokens)


def truncate(mass: jax.Array, *, top_k: int, top_p: float, min_p: float) -> jax.Array:
    """Zero all but the k largest masses, then all but the fewest that hold `top_p` of the rest,
    then all below `min_p` of the largest (Nguyen et al. 2024).

    Tokens of equal mass at the border are all kept.
    """
    if top_k or top_p < 1:
        mass = _largest(mass, top_k=top_k, top_p=top_p)
    if min_p:
        mass = jnp.where(mass >= min_p * mass.max(axis=-1, keepdims=True), mass, 0.0)
    return mass


def _largest(mass: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    descending = -jnp.sort(-mass, axis=-1)
    if top_k:
        floor = descending[..., min(top_k, mass.shape[-1]) - 1][..., None]
        mass = jnp.where(mass >= floor, mass, 0.0)
        descending = jnp.where(descending >= floor, descending, 0.0)
    if top_p < 1:
        before = jnp.cumsum(descending, axis=-1) - descending
        kept = before < top_p * descending.sum(axis=-1, keepdims=True)
        floor = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        mass = jnp.where(mass >= floor, mass, 0.0)
    return mass


def invert(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """The token at which the cumulative mass f32[..., V] first exceeds `uniform` of the whole.

    Never a token of zero mass: where rounding pushes the search onto one, the next with mass is
    taken, or the last of the block.
    """
    vocab = mass.shape[-1]
    mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, -vocab % BLOCKS)])
    blocks = mass.reshape(*mass.shape[:-1], BLOCKS, -1)
    sums = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    target = uniform * sums[..., -1]
    block = _first_above(sums, target, blocks.sum(axis=-1))
    before = jnp.where(block > 0, _at(sums, jnp.maximum(block - 1, 0)), 0.0)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    token = _first_above(jnp.cumsum(inside, axis=-1), target - before, inside)
    return (block * blocks.shape[-1] + token).astype(jnp.int32)


def _first_above(sums: jax.Array, target: jax.Array, mass: jax.Array) -> jax.Array:
    """The first index with mass whose sum exceeds the target, or the last one with mass.

    The sums alone may point at one without: made in parallel, each is rounded by itself, and a
    fused multiply-add can put the target a little below a block's start.
    """
    index, held = jnp.arange(mass.shape[-1]), mass > 0
    above = held & (index >= (sums <= target[..., None]).sum(axis=-1, keepdims=True))
    last = mass.shape[-1] - 1 - jnp.argmax(jnp.flip(held, axis=-1), axis=-1)
    return jnp.where(above.any(axis=-1), jnp.argmax(above, axis=-1), last)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
