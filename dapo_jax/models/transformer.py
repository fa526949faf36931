"""One decoder for all families (decoder.py) and three ways to run it.

`prefill` runs prompts once, `extend` runs rows of given tokens after their slot's prompt (the
update), `decode` one token of each row (the sampler). All three are the same `Block`; the cache is
an argument and a result. Parameters are a plain nested dict of arrays, blocks stacked along a
leading layer axis. What differs between layers (a window of keys, the base of rotations) is picked
by the layer's kind, which the scan over layers carries.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import attention, decoder, layers
from dapo_jax.models.spec import ModelSpec


def init(spec: ModelSpec, key: jax.Array) -> types.Tree:
    """Random parameters; traceable, so that each shard is made where it belongs."""
    return nn.meta.unbox(_boxed(spec, key))


def logical_axes(spec: ModelSpec) -> types.Tree:
    """The parameter tree with a tuple of logical axis names at each leaf."""
    boxed = jax.eval_shape(lambda: _boxed(spec, jax.random.key(0)))
    return jax.tree.map(lambda leaf: tuple(leaf.names), boxed,
                        is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))


def _boxed(spec: ModelSpec, key: jax.Array) -> types.Tree:
    tokens = jnp.zeros((1, 1, 1), jnp.int32)
    places = attention.Places(tokens)
    context = _context(spec, tokens, attention.Seen(places, places))
    return decoder.Decoder(spec).init(key, tokens, None, context)["params"]


def _context(
    spec: ModelSpec, position: jax.Array, seen: attention.Seen, index: jax.Array | None = None
) -> decoder.Context:
    kinds = (False, True) if any(spec.sliding) else (False,)
    ropes = tuple(layers.rope_tables(position, spec, sliding=kind) for kind in kinds)
    return decoder.Context(ropes, seen, index)


def run(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, prompt: attention.Pair | None,
    seen: attention.Seen,
) -> tuple[jax.Array, attention.Pair]:
    """Hidden states [S, R, T, D] of tokens i32[S, R, T] and each layer's keys [N, S, R, K, E, T]
    and values [N, S, R, K, T, E]; `prompt` holds those of each slot's prompt."""
    context = _context(spec, seen.query.position, seen)
    result: Any = decoder.Decoder(spec).apply(_variables(params), tokens, prompt, context)
    return result


def _variables(params: types.Tree) -> types.Tree:
    """Linen's collections; see decoder.py."""
    plain = {"params": {name: leaf for name, leaf in params.items() if name != "lora"}}
    return plain | {"lora": params["lora"]} if "lora" in params else plain


def run_with_rows(
    spec: ModelSpec, params: types.Tree, prompt_tokens: jax.Array, tokens: jax.Array,
    seen: attention.Seen, rows: attention.Seen,
) -> tuple[jax.Array, jax.Array]:
    """Hidden states [S, P, D] of prompts i32[S, P] and [S, R, T, D] of rows i32[S, R, T] that
    continue them, as one pass: each matrix is used, and gathered from other devices, once."""
    slots, width = prompt_tokens.shape
    if not tokens.size:
        hidden, _ = run(spec, params, prompt_tokens[:, None], None, seen)
        return hidden[:, 0], jnp.zeros((*tokens.shape, hidden.shape[-1]), hidden.dtype)
    flat = lambda x: jnp.broadcast_to(x, tokens.shape).reshape(slots, 1, -1)  # noqa: E731
    prompts = jnp.broadcast_to(seen.query.position, (slots, 1, width))
    position = jnp.concatenate([prompts, flat(rows.query.position)], axis=2)
    own = rows.own._replace(position=jnp.broadcast_to(rows.own.position, tokens.shape))
    context = _context(spec, position, seen)._replace(rows=rows._replace(own=own))
    both = jnp.concatenate([prompt_tokens[:, None], flat(tokens)], axis=2)
    hidden, _ = decoder.Decoder(spec).apply(_variables(params), both, None, context)
    return hidden[:, 0, :width], hidden[:, 0, width:].reshape(*tokens.shape, -1)


def prefill(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, types.PromptCache]:
    """Run right-padded prompts i32[S, P] once.

    Returns the hidden state [S, D] of each prompt's last token and the cache that its rows share.
    Padding comes after the prompt, so causality alone keeps it out.
    """
    places = attention.Places(jnp.arange(tokens.shape[1])[None, None])
    hidden, (keys, values) = run(spec, params, tokens[:, None], None,
                                 attention.Seen(places, places))
    last = jnp.maximum(length - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden[:, 0], last, axis=1)[:, 0]
    return hidden, types.PromptCache(keys[:, :, 0], values[:, :, 0], length)


def extend(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, prompt: types.PromptCache
) -> jax.Array:
    """Hidden states [S, R, T, D] of rows i32[S, R, T] that continue their slot's prompt."""
    return _after(spec, params, tokens, prompt)[0]


def append(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, context: types.PromptCache
) -> attention.Pair:
    """Keys [N, S, K, E, T] and values [N, S, K, T, E] of tokens i32[S, T] that continue a context.
    """
    keys, values = _after(spec, params, tokens[:, None], context)[1]
    return keys[:, :, 0], values[:, :, 0]


def _after(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, prompt: types.PromptCache
) -> tuple[jax.Array, attention.Pair]:
    places = attention.Places(prompt.length[:, None, None] + jnp.arange(tokens.shape[2]))
    seen = attention.Seen(places, places, _prompt_places(prompt))
    return run(spec, params, tokens, (prompt.keys, prompt.values), seen)


def _prompt_places(prompt: types.PromptCache) -> attention.Places:
    return attention.prompt_places(prompt.length, prompt.keys[0].shape[-1])


def decode(
    spec: ModelSpec, weights: types.Tree, tokens: jax.Array, prompt: types.PromptCache,
    own: types.SampleCache, *, column: jax.Array, position: jax.Array,
) -> tuple[jax.Array, types.SampleCache]:
    """Feed a token of each row, i32[S, R]; hidden [S, R, D] and the cache with it in.

    The token is number `position` i32[S, R] of its row, and all are written at one `column`
    i32[]. The columns are a ring: a row's own tokens are those up to `position` columns back.
    `weights` are those of `unstack`. A row at position -1 sees no key of its own; its hidden state
    means nothing.
    """
    width = own.keys[0].shape[-1]
    back = (column - jnp.arange(width)) % width
    newest = (prompt.length[:, None] + position)[..., None]
    written = jnp.where(back <= position[..., None], newest - back, attention.FAR)
    seen = attention.Seen(attention.Places(newest), attention.Places(written),
                          _prompt_places(prompt))
    context = _context(spec, newest, seen, column)
    x = decoder.embed(weights["embedding"], tokens[..., None], spec)
    keys: list[Any] = []
    values: list[Any] = []
    for layer, block in enumerate(weights["blocks"]):
        kind = int(spec.sliding[layer]) if any(spec.sliding) else None
        x, (key, value) = decoder.Block(spec).apply(
            {"params": block}, x, (prompt.keys[layer], prompt.values[layer]),
            (own.keys[layer], own.values[layer]), kind, context)
        keys.append(key)
        values.append(value)
    x = layers.rms_norm(x, weights["norm"], eps=spec.norm_eps, unit_offset=spec.unit_offset)
    return x[:, :, 0], types.SampleCache(tuple(keys), tuple(values))


def unstack(spec: ModelSpec, params: types.Tree) -> types.Tree:
    """The parameters as `decode` and the head read them: a list of blocks, matrices in the compute
    dtype. Made once for many tokens; adapters have to be merged before."""
    if "lora" in params:
        raise ValueError("the sampler runs merged parameters: lora.merge them first")

    def cut(layer: int) -> types.Tree:
        return jax.tree.map(lambda leaf: _cast(leaf[layer], spec), params["blocks"])
    rest = {name: _cast(leaf, spec) for name, leaf in params.items() if name != "blocks"}
    return rest | {"blocks": [cut(layer) for layer in range(spec.layers)]}


def _cast(leaf: jax.Array, spec: ModelSpec) -> jax.Array:
    return leaf if leaf.ndim == 1 else leaf.astype(spec.compute_dtype)
