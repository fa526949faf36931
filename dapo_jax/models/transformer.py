"""One decoder for all families: a Linen module and three ways to run it.

`prefill` runs prompts once, `extend` runs rows of given tokens after their slot's prompt (the
update), `decode` one token of each row (the sampler). All three are the same `Block`; the cache is
an argument and a result. Parameters are a plain nested dict of arrays, blocks stacked along a
leading layer axis. What differs between layers (a window of keys, the base of rotations) is data
that the scan over layers picks a view by.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import layers
from dapo_jax.models.spec import ModelSpec

Pair = tuple[jax.Array, jax.Array]  # keys, values
FULL, SLIDING = 0, 1  # kinds of layers, and where their views stand


class View(NamedTuple):
    """Where a layer's tokens stand and which keys they see."""

    rope: Pair  # cosines and sines [S, R, T, E/2]; here and below R is 1 where all rows are alike
    own: jax.Array  # bool[T, U] or [S, R, T, U]
    prompt: jax.Array | None  # bool[S, R, T, P]; T is 1 where all tokens are alike


class Context(NamedTuple):
    """What all layers share. A model with sliding layers has a second view, theirs."""

    views: tuple[View, ...]
    index: jax.Array | None = None  # the column of the row's cache that is written


class Block(nn.Module):
    """Attention and feed-forward part, each behind an RMSNorm and added to the stream."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, kind: jax.Array | None,
        context: Context,
    ) -> tuple[jax.Array, Pair]:
        """x [S, R, T, D] -> the same, and the row's own keys and values.

        `own` is None (the tokens of x are all there are) or the row's cache, into which the
        token is written at `context.index`. `kind` is the layer's view, None if there is one.
        """
        view = context.views[0]
        if kind is not None:
            view = jax.tree.map(lambda full, sliding: jnp.where(kind == SLIDING, sliding, full),
                                *context.views)
        x, own = Attention(self.spec, name="attention")(x, prompt, own, view, context.index)
        return FeedForward(self.spec, name="mlp")(x), own


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, view: View,
        index: jax.Array | None,
    ) -> tuple[jax.Array, Pair]:
        """See Block."""
        s = self.spec
        y = _norm(self, "norm", x)
        query = _project(self, "query", y, s.heads)
        key, value = (_project(self, name, y, s.kv_heads) for name in ("key", "value"))
        if s.qk_norm:
            query, key = _norm(self, "query_norm", query), _norm(self, "key_norm", key)
        query, key = (layers.rotate(part, view.rope) for part in (query, key))
        key, value = key.transpose(0, 1, 3, 4, 2), value.transpose(0, 1, 3, 2, 4)
        if own is not None:
            key = jax.lax.dynamic_update_slice_in_dim(own[0], key, index, axis=4)
            value = jax.lax.dynamic_update_slice_in_dim(own[1], value, index, axis=3)
        mixed = layers.attend(query, (key, value), view.own, prompt, view.prompt,
                              scale=(s.query_scalar or s.head_size) ** -0.5,
                              cap=s.attention_softcap)
        out = self.param("out", _logical(("heads", "head", "embed"), (0, 1)),
                         (s.heads, s.head_size, s.d_model), s.param_dtype)
        result = jnp.einsum("srthe,hed->srtd", mixed, out.astype(x.dtype))
        if s.post_norms:
            result = _norm(self, "post_norm", result)
        return x + result, (key, value)


class FeedForward(nn.Module):
    """A gated linear unit (arXiv 2002.05202)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [S, R, T, D] -> the same."""
        s = self.spec
        shape = (s.d_model, s.ff)
        y = _norm(self, "norm", x)
        gate = jnp.einsum("srtd,df->srtf", y, _kernel(self, "gate", shape, "ff"))
        up = jnp.einsum("srtd,df->srtf", y, _kernel(self, "up", shape, "ff"))
        down = self.param("down", _logical(("ff", "embed"), (0,)), shape[::-1], s.param_dtype)
        inner = layers.ACTIVATIONS[s.activation](gate) * up
        result = jnp.einsum("srtf,fd->srtd", inner, down.astype(x.dtype))
        if s.post_norms:
            result = _norm(self, "post_norm", result)
        return x + result


class Decoder(nn.Module):
    """Embedding, scanned blocks, last norm. Logits are made elsewhere (models/head.py)."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, tokens: jax.Array, prompt: Pair | None, context: Context
    ) -> tuple[jax.Array, Pair]:
        """tokens i32[S, R, T] -> hidden [S, R, T, D] and each layer's keys and values."""
        s = self.spec
        table = self.param("embedding", _logical(("vocab", "embed"), (1,)), (s.vocab, s.d_model),
                           s.param_dtype)
        block = nn.remat(Block, prevent_cse=False) if s.remat else Block
        blocks = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True},
            in_axes=(0, nn.broadcast, 0, nn.broadcast), out_axes=0, length=s.layers,
            metadata_params={nn.PARTITION_NAME: "layers"})
        kinds = jnp.asarray(s.sliding, jnp.int32) if any(s.sliding) else None
        x, own = blocks(s, name="blocks")(embed(table, tokens, s), prompt, None, kinds, context)
        x = _norm(self, "norm", x)
        if not s.tied:
            # Declared with the rest so that one init makes every parameter.
            self.param("head", _logical(("embed", "vocab"), (0,)), (s.d_model, s.vocab),
                       s.param_dtype)
        return x, own


def _norm(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """An RMSNorm over the last axis of x, which is D or, in heads, E."""
    s = module.spec
    axis = "head" if name in ("query_norm", "key_norm") else "embed"
    start = nn.initializers.zeros if s.unit_offset else nn.initializers.ones
    scale = module.param(name, nn.with_logical_partitioning(start, (axis,)), x.shape[-1:],
                         s.param_dtype)
    return layers.rms_norm(x, scale, eps=s.norm_eps, unit_offset=s.unit_offset)


def _project(module: nn.Module, name: str, y: jax.Array, heads: int) -> jax.Array:
    """y [S, R, T, D] in heads [S, R, T, heads, E]."""
    s = module.spec
    shape = (s.d_model, heads, s.head_size)
    result = jnp.einsum("srtd,dhe->srthe", y, _kernel(module, name, shape, "heads"))
    if s.qkv_bias:
        start = nn.with_logical_partitioning(nn.initializers.zeros, ("heads", "head"))
        result += module.param(f"{name}_bias", start, shape[1:], s.param_dtype).astype(y.dtype)
    return result


def _kernel(module: nn.Module, name: str, shape: tuple[int, ...], axis: str) -> jax.Array:
    names = ("embed", axis) + ("head",) * (len(shape) - 2)
    kernel = module.param(name, _logical(names, (0,)), shape, module.spec.param_dtype)
    return kernel.astype(module.spec.compute_dtype)


def _logical(names: tuple[str, ...], fan_in: tuple[int, ...]) -> Any:
    """A normal initialiser with variance 1 / fan_in, and logical axis names."""
    outputs = tuple(i for i in range(len(names)) if i not in fan_in)
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=fan_in,
                                            out_axis=outputs)
    return nn.with_logical_partitioning(init, names)


def embed(table: jax.Array, tokens: jax.Array, spec: ModelSpec) -> jax.Array:
    """Rows of the table [V, D] for tokens i32[...], in the compute dtype."""
    rows = table[tokens].astype(spec.compute_dtype)
    # The factor is rounded to the compute dtype, as in the models it is taken from.
    return rows * jnp.asarray(spec.d_model ** 0.5, rows.dtype) if spec.scale_embedding else rows


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
    context = _context(spec, tokens, jnp.zeros((1, 1), jnp.int32))
    return Decoder(spec).init(key, tokens, None, context)["params"]


def _context(
    spec: ModelSpec, positions: jax.Array, back: jax.Array,
    prompt: types.PromptCache | None = None, index: jax.Array | None = None,
) -> Context:
    """What layers see: tokens stand at positions i32[S, R, T] (R is 1 where all rows are alike);
    `back` i32[T, U] or [S, R, T, U] says how far each of the row's own keys lies behind each token,
    negative if it is not seen."""
    seen = None if prompt is None else prompt_mask(prompt)[:, None, None]
    views = (View(layers.rope_tables(positions, spec), back >= 0, seen),)
    if any(spec.sliding):
        near = seen
        if prompt is not None:
            behind = positions[..., None] - jnp.arange(prompt.keys[0].shape[-1])
            near = seen & (behind < spec.sliding_window)
        views += (View(layers.rope_tables(positions, spec, sliding=True),
                       (back >= 0) & (back < spec.sliding_window), near),)
    return Context(views, index)


def _triangle(width: int) -> jax.Array:
    steps = jnp.arange(width)
    return steps[:, None] - steps


def prefill(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, types.PromptCache]:
    """Run right-padded prompts i32[S, P] once.

    Returns the hidden state [S, D] of each prompt's last token and the cache that its rows share.
    Padding comes after the prompt, so causality alone keeps it out.
    """
    slots, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (slots, 1, width))
    hidden, (keys, values) = Decoder(spec).apply(
        {"params": params}, tokens[:, None], None, _context(spec, positions, _triangle(width)))
    last = jnp.maximum(length - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden[:, 0], last, axis=1)[:, 0]
    return hidden, types.PromptCache(keys[:, :, 0], values[:, :, 0], length)


def extend(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, prompt: types.PromptCache
) -> jax.Array:
    """Hidden states [S, R, T, D] of rows i32[S, R, T] that continue their slot's prompt."""
    width = tokens.shape[2]
    positions = prompt.length[:, None, None] + jnp.arange(width)
    context = _context(spec, positions, _triangle(width), prompt)
    return Decoder(spec).apply({"params": params}, tokens, (prompt.keys, prompt.values), context)[0]


def prompt_mask(prompt: types.PromptCache) -> jax.Array:
    """bool[S, P], true on each prompt's own tokens."""
    return jnp.arange(prompt.keys[0].shape[-1]) < prompt.length[:, None]


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
    back = jnp.where(back <= position[..., None], back, -1)[:, :, None]
    positions = (prompt.length[:, None] + position)[..., None]
    context = _context(spec, positions, back, prompt, column)
    x = embed(weights["embedding"], tokens[..., None], spec)
    keys, values = [], []
    for layer, block in enumerate(weights["blocks"]):
        view = context.views[int(spec.sliding[layer]) if spec.sliding else FULL]
        x, (key, value) = Block(spec).apply(
            {"params": block}, x, (prompt.keys[layer], prompt.values[layer]),
            (own.keys[layer], own.values[layer]), None, context._replace(views=(view,)))
        keys.append(key)
        values.append(value)
    x = layers.rms_norm(x, weights["norm"], eps=spec.norm_eps, unit_offset=spec.unit_offset)
    return x[:, :, 0], types.SampleCache(tuple(keys), tuple(values))


def unstack(spec: ModelSpec, params: types.Tree) -> types.Tree:
    """The parameters as `decode` and the head read them: a list of blocks, matrices in the compute
    dtype. Made once for many tokens."""
    def cut(layer: int) -> types.Tree:
        return jax.tree.map(lambda leaf: _cast(leaf[layer], spec), params["blocks"])
    rest = {name: _cast(leaf, spec) for name, leaf in params.items() if name != "blocks"}
    return rest | {"blocks": [cut(layer) for layer in range(spec.layers)]}


def _cast(leaf: jax.Array, spec: ModelSpec) -> jax.Array:
    return leaf if leaf.ndim == 1 else leaf.astype(spec.compute_dtype)
