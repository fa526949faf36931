"""Running microbatches, also those whose slots hold several prompts and whose rows hold several
samples (types.Packed). Each prompt is run once for all its samples; a token sees its own sample and
its own prompt, at the positions that they would have alone."""

from typing import cast

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import attention, transformer
from dapo_jax.models.spec import ModelSpec


def states(spec: ModelSpec, params: types.Tree, batch: types.TrainBatch) -> jax.Array:
    """The hidden states [S, R, T, D] that predict the batch's tokens: of the token before each or,
    for the first of a sample, of its prompt's last token."""
    if batch.packed is not None:
        return _packed_states(spec, params, batch.prompt_tokens, batch.tokens, batch.packed)
    slots, rows, width = batch.tokens.shape
    length = batch.prompt_length
    at = attention.Places(jnp.arange(batch.prompt_tokens.shape[1])[None, None])
    own = attention.Places(length[:, None, None] + jnp.arange(width - 1))
    hidden, rest = transformer.run_with_rows(
        spec, params, batch.prompt_tokens, batch.tokens[:, :, :-1], attention.Seen(at, at),
        attention.Seen(own, own, attention.prompt_places(length, batch.prompt_tokens.shape[1])))
    last = jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1)[:, None]
    return jnp.concatenate(
        [jnp.broadcast_to(last, (slots, rows, 1, last.shape[-1])), rest], axis=2)


def _packed_states(
    spec: ModelSpec, params: types.Tree, prompt_tokens: jax.Array, tokens: jax.Array,
    packed: types.Packed,
) -> jax.Array:
    prompt = _prompt_places(packed.segment)
    first = _starts(packed.after)
    own = jax.tree.map(lambda x: x[..., :-1], _own_places(prompt, packed.after, first))
    hidden, rest = transformer.run_with_rows(
        spec, params, prompt_tokens, tokens[..., :-1], attention.Seen(prompt, prompt),
        attention.Seen(own, own, prompt))
    before = _at(hidden, packed.after)
    shifted = jnp.concatenate([before[:, :, :1], rest], axis=2)
    return jnp.where(first[..., None], before, shifted)


def _starts(numbers: jax.Array) -> jax.Array:
    """bool[..., T]: whether a token differs in its number from the one before; the first does."""
    change = numbers[..., 1:] != numbers[..., :-1]
    return jnp.concatenate([jnp.ones_like(change, shape=(*numbers.shape[:-1], 1)), change], axis=-1)


def _offset(first: jax.Array) -> jax.Array:
    """i32[..., T]: how many tokens ago the last true one was."""
    at = jnp.arange(first.shape[-1])
    start = jax.lax.cummax(jnp.where(first, at, 0), axis=first.ndim - 1)
    return at - start


def _at(x: jax.Array, place: jax.Array) -> jax.Array:
    """x [S, P, ...] at places i32[S, R, T]; anything where the place is negative."""
    slots = jnp.arange(x.shape[0])[:, None, None]
    return x[slots, jnp.maximum(place, 0)]


def _prompt_places(segment: jax.Array) -> attention.Places:
    segment = segment[:, None]
    return attention.Places(_offset(_starts(segment)), segment)


def _own_places(
    prompt: attention.Places, after: jax.Array, first: jax.Array
) -> attention.Places:
    segment = jnp.where(after < 0, attention.PADDING, _at(
        cast(jax.Array, prompt.segment)[:, 0], after))
    return attention.Places(_at(prompt.position[:, 0], after) + 1 + _offset(first), segment)
