"""One decoder for all families: a Linen module and three ways to run it.

`prefill` runs prompts once, `extend` runs rows of given tokens after their slot's prompt (the
update), `decode` one token of each row (the sampler). All three are the same `Block`; the cache is
an argument and a result. Parameters are a plain nested dict of float32 arrays, blocks stacked
along a leading layer axis.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import layers
from dapo_jax.models.spec import ModelSpec

Pair = tuple[jax.Array, jax.Array]  # keys, values


class Block(nn.Module):
    """Attention and feed-forward part, each behind an RMSNorm and added to the stream."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, context: dict[str, Any]
    ) -> tuple[jax.Array, Pair]:
        """x [S, R, T, D] -> the same, and the row's own keys and values.

        `own` is None (the tokens of x are all there are) or the row's cache, into which the
        token is written at `context["index"]`.
        """
        x, own = Attention(self.spec, name="attention")(x, prompt, own, context)
        return FeedForward(self.spec, name="mlp")(x), own


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, context: dict[str, Any]
    ) -> tuple[jax.Array, Pair]:
        """See Block."""
        s = self.spec
        wide, narrow = (s.d_model, s.heads, s.head_size), (s.d_model, s.kv_heads, s.head_size)
        y = _norm(self, x)
        query = jnp.einsum("srtd,dhe->srthe", y, _kernel(self, "query", wide, "heads"))
        key = jnp.einsum("srtd,dke->srtke", y, _kernel(self, "key", narrow, "heads"))
        value = jnp.einsum("srtd,dke->srtke", y, _kernel(self, "value", narrow, "heads"))
        query, key = (layers.rotate(part, context["rope"]) for part in (query, key))
        key, value = key.transpose(0, 1, 3, 4, 2), value.transpose(0, 1, 3, 2, 4)
        if own is not None:
            column = context["index"]
            key = jax.lax.dynamic_update_slice_in_dim(own[0], key, column, axis=4)
            value = jax.lax.dynamic_update_slice_in_dim(own[1], value, column, axis=3)
        mixed = layers.attend(query, (key, value), context["own_mask"], prompt,
                              context["prompt_mask"])
        out = self.param("out", _logical(("heads", "head", "embed"), (0, 1)),
                         (s.heads, s.head_size, s.d_model), jnp.float32)
        return x + jnp.einsum("srthe,hed->srtd", mixed, out.astype(x.dtype)), (key, value)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [S, R, T, D] -> the same."""
        shape = (self.spec.d_model, self.spec.ff)
        y = _norm(self, x)
        gate = jnp.einsum("srtd,df->srtf", y, _kernel(self, "gate", shape, "ff"))
        up = jnp.einsum("srtd,df->srtf", y, _kernel(self, "up", shape, "ff"))
        down = self.param("down", _logical(("ff", "embed"), (0,)), shape[::-1], jnp.float32)
        return x + jnp.einsum("srtf,fd->srtd", nn.silu(gate) * up, down.astype(x.dtype))


class Decoder(nn.Module):
    """Embedding, scanned blocks, last norm. Logits are made elsewhere (models/head.py)."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, tokens: jax.Array, prompt: Pair | None, context: dict[str, Any]
    ) -> tuple[jax.Array, Pair]:
        """tokens i32[S, R, T] -> hidden [S, R, T, D] and each layer's keys and values."""
        s = self.spec
        table = self.param("embedding", _logical(("vocab", "embed"), (1,)), (s.vocab, s.d_model),
                           jnp.float32)
        block = nn.remat(Block, prevent_cse=False) if s.remat else Block
        blocks = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast), out_axes=0, length=s.layers,
            metadata_params={nn.PARTITION_NAME: "layers"})
        x = embed(table, tokens, s)
        x, own = blocks(s, name="blocks")(x, prompt, None, context)
        scale = self.param("norm", _logical(("embed",), None), (s.d_model,), jnp.float32)
        if not s.tied:
            # Declared with the rest so that one init makes every parameter.
            self.param("head", _logical(("embed", "vocab"), (0,)), (s.d_model, s.vocab),
                       jnp.float32)
        return layers.rms_norm(x, scale, eps=s.norm_eps), own


def _norm(module: nn.Module, x: jax.Array) -> jax.Array:
    scale = module.param("norm", _logical(("embed",), None), (module.spec.d_model,), jnp.float32)
    return layers.rms_norm(x, scale, eps=module.spec.norm_eps)


def _kernel(module: nn.Module, name: str, shape: tuple[int, ...], axis: str) -> jax.Array:
    names = ("embed", axis) + ("head",) * (len(shape) - 2)
    kernel = module.param(name, _logical(names, (0,)), shape, jnp.float32)
    return kernel.astype(module.spec.compute_dtype)


def _logical(names: tuple[str, ...], fan_in: tuple[int, ...] | None) -> Any:
    """An initialiser with logical axis names: ones, or normal with 1 / fan_in variance."""
    if fan_in is None:
        return nn.with_logical_partitioning(nn.initializers.ones, names)
    outputs = tuple(i for i in range(len(names)) if i not in fan_in)
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=fan_in,
                                            out_axis=outputs)
    return nn.with_logical_partitioning(init, names)


def embed(table: jax.Array, tokens: jax.Array, spec: ModelSpec) -> jax.Array:
    """Rows of the table [V, D] for tokens i32[...], in the compute dtype."""
    return table[tokens].astype(spec.compute_dtype)


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
    context = _context(spec, tokens, jnp.ones((1, 1), bool), None)
    return Decoder(spec).init(key, tokens, None, context)["params"]


def _context(
    spec: ModelSpec, positions: jax.Array, own_mask: jax.Array, prompt_mask: jax.Array | None,
    index: jax.Array | None = None,
) -> dict[str, Any]:
    return {"rope": layers.rope_tables(positions, spec), "own_mask": own_mask,
            "prompt_mask": prompt_mask, "index": index}


def prefill(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, types.PromptCache]:
    """Run right-padded prompts i32[S, P] once.

    Returns the hidden state [S, D] of each prompt's last token and the cache that its rows share.
    Padding comes after the prompt, so causality alone keeps it out.
    """
    slots, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (slots, 1, width))
    causal = jnp.tril(jnp.ones((width, width), bool))
    hidden, (keys, values) = Decoder(spec).apply(
        {"params": params}, tokens[:, None], None, _context(spec, positions, causal, None))
    last = jnp.maximum(length - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden[:, 0], last, axis=1)[:, 0]
    return hidden, types.PromptCache(keys[:, :, 0], values[:, :, 0], length)


def extend(
    spec: ModelSpec, params: types.Tree, tokens: jax.Array, prompt: types.PromptCache
) -> jax.Array:
    """Hidden states [S, R, T, D] of rows i32[S, R, T] that continue their slot's prompt."""
    width = tokens.shape[2]
    causal = jnp.tril(jnp.ones((width, width), bool))
    positions = prompt.length[:, None, None] + jnp.arange(width)
    positions = jnp.broadcast_to(positions, tokens.shape)
    context = _context(spec, positions, causal, prompt_mask(prompt))
    return Decoder(spec).apply({"params": params}, tokens, (prompt.keys, prompt.values), context)[0]


def prompt_mask(prompt: types.PromptCache) -> jax.Array:
    """bool[S, P], true on each prompt's own tokens."""
    return jnp.arange(prompt.keys.shape[-1]) < prompt.length[:, None]


def decode(
    spec: ModelSpec, params: types.Tree, blocks: list[types.Tree], tokens: jax.Array,
    prompt: types.PromptCache, own: types.SampleCache, index: jax.Array,
) -> tuple[jax.Array, types.SampleCache]:
    """Feed token `index` of each row, i32[S, R]; hidden [S, R, D] and the cache with it in.

    `blocks` are the parameters of each layer (`unstack`), cut out once before the loop.
    """
    positions = (prompt.length + index)[:, None, None]
    width = own.keys[0].shape[-1]
    context = _context(spec, jnp.broadcast_to(positions, (*tokens.shape, 1)),
                       (jnp.arange(width) <= index)[None, :], prompt_mask(prompt), index)
    x = embed(params["embedding"], tokens[..., None], spec)
    keys, values = [], []
    for layer, block in enumerate(blocks):
        x, (key, value) = Block(spec).apply(
            {"params": block}, x, (prompt.keys[layer], prompt.values[layer]),
            (own.keys[layer], own.values[layer]), context)
        keys.append(key)
        values.append(value)
    x = layers.rms_norm(x, params["norm"], eps=spec.norm_eps)
    return x[:, :, 0], types.SampleCache(tuple(keys), tuple(values))


def unstack(spec: ModelSpec, params: types.Tree) -> list[types.Tree]:
    """Each block's parameters, kernels in the compute dtype."""
    def cut(layer: int) -> types.Tree:
        return jax.tree.map(lambda leaf: _cast(leaf[layer], spec), params["blocks"])
    return [cut(layer) for layer in range(spec.layers)]


def _cast(leaf: jax.Array, spec: ModelSpec) -> jax.Array:
    return leaf if leaf.ndim == 1 else leaf.astype(spec.compute_dtype)


def empty_cache(spec: ModelSpec, slots: int, rows: int, width: int) -> types.SampleCache:
    """A cache of zeros for rows of up to `width` tokens."""
    keys = jnp.zeros((slots, rows, spec.kv_heads, spec.head_size, width), spec.compute_dtype)
    values = keys.transpose(0, 1, 2, 4, 3)
    return types.SampleCache((keys,) * spec.layers, (values,) * spec.layers)
