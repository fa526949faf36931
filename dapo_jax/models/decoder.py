"""The decoder's parts as Linen modules: attention, feed-forward part, block, and the scan over
blocks. How they are run stands in transformer.py.

Beside the collection `params` there may be one `lora` (models/lora.py): for a matrix W with an
entry {"a", "b"} there, the product y W becomes y W + (y A) B.
"""

from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from dapo_jax.models import attention, layers
from dapo_jax.models.spec import ModelSpec

Pair = tuple[jax.Array, jax.Array]  # keys, values
FULL, SLIDING = 0, 1  # kinds of layers
# What a block keeps for its backward pass, by ModelSpec.remat; "none" keeps everything.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # not attention's scores
}


class Context(NamedTuple):
    """What all layers share."""

    ropes: tuple[Pair, ...]  # cosines and sines [S, R, T, E/2] by kind of layer
    seen: attention.Seen
    # A tuple's own method of this name is not called.
    index: jax.Array | None = None  # type: ignore[assignment]  # the cache's column that is written
    rows: attention.Seen | None = None  # x [S, 1, P + R T, D] holds prompts, which `seen` is of,
    # and then the rows that continue them


class Block(nn.Module):
    """Attention and feed-forward part, each behind an RMSNorm and added to the stream."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, kind: jax.Array | int | None,
        context: Context,
    ) -> tuple[jax.Array, Pair]:
        """x [S, R, T, D] -> the same, and the row's own keys and values (None if context.rows).

        `own` is None (the tokens of x are all there are) or the row's cache, into which the
        token is written at `context.index`. `kind` is the layer's, None if there is only FULL.
        """
        x, own = Attention(self.spec, name="attention")(x, prompt, own, kind, context)
        return FeedForward(self.spec, name="mlp")(x), own


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, prompt: Pair | None, own: Pair | None, kind: jax.Array | int | None,
        context: Context,
    ) -> tuple[jax.Array, Pair]:
        """See Block."""
        s = self.spec
        y = _norm(self, "norm", x)
        query = _project(self, "query", y, s.heads)
        key, value = (_project(self, name, y, s.kv_heads) for name in ("key", "value"))
        if s.qk_norm:
            query, key = _norm(self, "query_norm", query), _norm(self, "key_norm", key)
        rope, window = _of_kind(s, kind, context)
        query, key = (layers.rotate(part, rope) for part in (query, key))
        how = attention.How(s.attention, (s.query_scalar or s.head_size) ** -0.5,
                            s.attention_softcap)
        if context.rows is None:
            new = _cached(key, value)
            own = new if own is None else _written(own, new, cast(jax.Array, context.index))
            mixed = attention.attend(query, own, prompt, context.seen, window=window, how=how)
        else:
            mixed = _with_rows(query, key, value, context, window=window, how=how)
        out = self.param("out", _logical(("heads", "head", "embed"), (0, 1)),
                         (s.heads, s.head_size, s.d_model), s.param_dtype)
        result = _product(self, "out", "srthe,hed->srtd", mixed, out.astype(x.dtype))
        if s.post_norms:
            result = _norm(self, "post_norm", result)
        return x + result, cast(Pair, own)


def _cached(key: jax.Array, value: jax.Array) -> Pair:
    """Keys and values [S, R, T, K, E] in the layouts of a cache."""
    return key.transpose(0, 1, 3, 4, 2), value.transpose(0, 1, 3, 2, 4)


def _written(own: Pair, new: Pair, index: jax.Array) -> Pair:
    """The row's cache with a token's keys and values in column `index`."""
    return (jax.lax.dynamic_update_slice_in_dim(own[0], new[0], index, axis=4),
            jax.lax.dynamic_update_slice_in_dim(own[1], new[1], index, axis=3))


def _with_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, context: Context, *,
    window: jax.Array | int | None, how: attention.How,
) -> jax.Array:
    """Attention [S, 1, P + R T, H, E] of prompts to themselves, of rows to their prompt and
    themselves."""
    own_rows = cast(attention.Seen, context.rows)
    slots, rows, width = own_rows.own.position.shape
    start = query.shape[2] - rows * width
    first = [part[:, :, :start] for part in (query, key, value)]
    rest = [part[:, 0, start:].reshape(slots, rows, width, *part.shape[3:])
            for part in (query, key, value)]
    prompt = _cached(*first[1:])
    mixed = attention.attend(first[0], prompt, None, context.seen, window=window, how=how)
    more = attention.attend(rest[0], _cached(*rest[1:]), (prompt[0][:, 0], prompt[1][:, 0]),
                            own_rows, window=window, how=how)
    return jnp.concatenate([mixed, more.reshape(slots, 1, -1, *more.shape[3:])], axis=2)


class FeedForward(nn.Module):
    """A gated linear unit (arXiv 2002.05202)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [S, R, T, D] -> the same."""
        s = self.spec
        shape = (s.d_model, s.ff)
        y = _norm(self, "norm", x)
        gate, up = (_product(self, name, "srtd,df->srtf", y, _kernel(self, name, shape, "ff"))
                    for name in ("gate", "up"))
        down = self.param("down", _logical(("ff", "embed"), (0,)), shape[::-1], s.param_dtype)
        # Of the gate's many steps only what goes in is kept for the backward pass.
        inner = jax.checkpoint(lambda gate, up: layers.ACTIVATIONS[s.activation](gate) * up,
                               prevent_cse=False)(gate, up)
        result = _product(self, "down", "srtf,fd->srtd", inner, down.astype(x.dtype))
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
        block = Block
        if s.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[s.remat])
        blocks = nn.scan(
            block, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True},
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
    scale: Any = module.param(name, nn.with_logical_partitioning(start, (axis,)), x.shape[-1:],
                              s.param_dtype)
    return layers.rms_norm(x, scale, eps=s.norm_eps, unit_offset=s.unit_offset)


def _project(module: nn.Module, name: str, y: jax.Array, heads: int) -> jax.Array:
    """y [S, R, T, D] in heads [S, R, T, heads, E]."""
    s = module.spec
    shape = (s.d_model, heads, s.head_size)
    result = _product(module, name, "srtd,dhe->srthe", y, _kernel(module, name, shape, "heads"))
    if s.qkv_bias:
        start = nn.with_logical_partitioning(nn.initializers.zeros, ("heads", "head"))
        bias: Any = module.param(f"{name}_bias", start, shape[1:], s.param_dtype)
        result += bias.astype(y.dtype)
    return result


def _product(
    module: nn.Module, name: str, letters: str, y: jax.Array, kernel: jax.Array
) -> jax.Array:
    """y times the kernel, plus what the adapter of that name adds, if there is one."""
    result = layers.product(letters, y, kernel)
    if not module.has_variable("lora", name):
        return result
    adapter = jax.tree.map(lambda leaf: leaf.astype(y.dtype), module.get_variable("lora", name))
    left, right = letters.split("->")[0].split(",")
    inputs = "".join(letter for letter in right if letter in left)
    low = jnp.einsum(f"{left},{inputs}z->srtz", y, adapter["a"])
    return result + jnp.einsum(f"srtz,z{right[len(inputs):]}->{letters.split('->')[1]}", low,
                               adapter["b"])


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


def _of_kind(
    spec: ModelSpec, kind: jax.Array | int | None, context: Context
) -> tuple[Pair, jax.Array | int | None]:
    """The rotations and the window of a layer; a window of FAR is none."""
    if kind is None:
        return context.ropes[FULL], None
    if isinstance(kind, int):
        return context.ropes[kind], spec.sliding_window if kind == SLIDING else None
    slides = kind == SLIDING
    rope = jax.tree.map(lambda full, sliding: jnp.where(slides, sliding, full), *context.ropes)
    return rope, jnp.where(slides, spec.sliding_window, attention.FAR)
