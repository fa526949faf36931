"""Which keys a token sees, and the implementations of attention, chosen by ModelSpec.attention.

xla      the plain form (layers.attend); an array of queries x keys exists
blocked  the plain form a block of queries at a time, recomputed in the backward pass
cudnn    jax.nn.dot_product_attention, flash attention on GPU; its mask is queries x keys. float32,
         capped scores and heads of an odd size or over 128 are beyond it: `blocked` does those
tpu      Pallas splash attention; no array of queries x keys exists. Sliding layers are beyond it,
         since it counts a window in places of one array: `blocked` does those

Letters as in layers.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from dapo_jax.models import layers, placement

Pair = tuple[jax.Array, jax.Array]  # keys, values
FAR = 2 ** 30  # the position of a key that no token sees
PADDING = -1  # the segment of one
BLOCK = 512  # queries at a time
LANES = 128  # what a TPU kernel's lengths are multiples of


class Places(NamedTuple):
    """Where tokens stand; an axis of 1 is alike for all. A token sees the keys of its own segment
    that stand at its position or before."""

    position: jax.Array  # i32[S or 1, R or 1, T]
    segment: jax.Array | None = None  # likewise; None: one segment


class Seen(NamedTuple):
    """Places of the queries, of the row's own keys, and of the slot's prompt's."""

    query: Places
    own: Places
    prompt: Places | None = None


class How(NamedTuple):
    """What attention does with scores, and by what it is done."""

    implementation: str  # "xla", "blocked", "cudnn" or "tpu"
    scale: float
    cap: float | None = None
    interpret: bool = False  # run the TPU kernel's own code on any machine: slow, for tests


def prompt_places(length: jax.Array, width: int) -> Places:
    """Of one prompt a slot, i32[S] tokens long, in arrays of `width`."""
    at = jnp.arange(width)
    return Places(jnp.where(at < length[:, None], at, FAR)[:, None])


def visible(query: Places, keys: Places, window: jax.Array | int | None) -> jax.Array:
    """bool[S or 1, R or 1, T, U]: whether each token sees each key; `window` counts the tokens
    that one sees, itself included."""
    back = query.position[..., :, None] - keys.position[..., None, :]
    seen = back >= 0
    if keys.segment is not None:
        asked = cast(jax.Array, query.segment)  # both have segments, or neither
        seen &= asked[..., :, None] == keys.segment[..., None, :]
    return seen if window is None else seen & (back < window)


def attend(
    query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen, *,
    window: jax.Array | int | None, how: How,
) -> jax.Array:
    """Attention [S, R, T, H, E] of queries of that shape over keys and values in the layouts of
    `layers.attend`. Of one token, which is what the sampler asks for, always the plain form."""
    run = _plain if query.shape[2] == 1 else IMPLEMENTATIONS[how.implementation]
    return run(query, own, prompt, seen, window, how)


def _plain(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
           window: jax.Array | int | None, how: How) -> jax.Array:
    prompt_mask = None if prompt is None else visible(
        seen.query, cast(Places, seen.prompt), window)
    return layers.attend(query, own, visible(seen.query, seen.own, window), prompt, prompt_mask,
                         scale=how.scale, cap=how.cap)


def _blocked(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
             window: jax.Array | int | None, how: How) -> jax.Array:
    tokens = query.shape[2]
    size = min(BLOCK, tokens)

    def split(x: jax.Array) -> jax.Array:
        """Axis 2 in blocks, blocks first."""
        pads = [(0, 0)] * x.ndim
        pads[2] = (0, -tokens % size)
        x = jnp.pad(x, pads)
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    # Gradients of keys are summed over the blocks in the type that they have here.
    wide = jax.tree.map(lambda x: x.astype(layers.wide_dtype(x)), (own, prompt))

    @jax.checkpoint
    def one(part: tuple[jax.Array, Places]) -> jax.Array:
        own, prompt = jax.tree.map(lambda x: x.astype(query.dtype), wide)
        return _plain(part[0], own, prompt, seen._replace(query=part[1]), window, how)

    mixed = jax.lax.map(one, (split(query), jax.tree.map(split, seen.query)))
    mixed = jnp.moveaxis(mixed, 0, 2)
    return mixed.reshape(*mixed.shape[:2], -1, *mixed.shape[4:])[:, :, :tokens]


def _cudnn_or_blocked(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
                      window: jax.Array | int | None, how: How) -> jax.Array:
    size, half = query.shape[-1], query.dtype in (jnp.bfloat16, jnp.float16)
    able = half and how.cap is None and size % 8 == 0 and size <= 128
    return (_cudnn if able else _blocked)(query, own, prompt, seen, window, how)


def _splash_or_blocked(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
                       window: jax.Array | int | None, how: How) -> jax.Array:
    """In a model with sliding layers the scan's current layer decides, when it runs."""
    if window is None:
        return _splash(query, own, prompt, seen, None, how)
    blocked: Callable = lambda q, *kv: _blocked(q, kv[0], kv[1], seen, window, how)  # noqa: E731
    if isinstance(window, int):
        return blocked(query, own, prompt)
    kernel: Callable = lambda q, *kv: _splash(q, kv[0], kv[1], seen, None, how)  # noqa: E731
    return jax.lax.cond(window >= FAR, kernel, blocked, query, own, prompt)


def _joined(own: Pair, prompt: Pair | None) -> Pair:
    """Keys and values [S, R, K, U, E], each row's prompt before its own."""
    keys, values = own[0].swapaxes(-1, -2), own[1]
    if prompt is None:
        return keys, values
    def before(x: jax.Array, y: jax.Array) -> jax.Array:
        spread = jnp.broadcast_to(x[:, None], (*y.shape[:2], *x.shape[1:]))
        return jnp.concatenate([spread, y], axis=3)
    return before(prompt[0].swapaxes(-1, -2), keys), before(prompt[1], values)


def _cudnn(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
           window: jax.Array | int | None, how: How, *, implementation: str = "cudnn") -> jax.Array:
    slots, rows, tokens = query.shape[:3]
    parts = [seen.own] if prompt is None else [cast(Places, seen.prompt), seen.own]
    mask = [jnp.broadcast_to(visible(seen.query, part, window),
                             (slots, rows, tokens, part.position.shape[-1])) for part in parts]
    flat = lambda x: x.reshape(slots * rows, *x.shape[2:])  # noqa: E731
    keys, values = (flat(x).swapaxes(1, 2) for x in _joined(own, prompt))
    mixed = jax.nn.dot_product_attention(
        flat(query), keys, values, mask=flat(jnp.concatenate(mask, axis=-1))[:, None],
        scale=how.scale, implementation=cast(Any, implementation))
    return mixed.reshape(query.shape)


def _splash(query: jax.Array, own: Pair, prompt: Pair | None, seen: Seen,
            window: jax.Array | int | None, how: How) -> jax.Array:
    """A causal mask over the prompt's keys and then the row's own, by place in the array, and
    segments: a row has one sample of a prompt, so its tokens see that prompt and themselves.
    Padding sees itself, so that nothing is NaN."""
    slots, rows, tokens, heads, _ = query.shape
    width = 0 if prompt is None else prompt[0].shape[-1]
    kernel = _kernel(tokens, width, how.cap, how.interpret)

    def segments(places: Places) -> jax.Array:
        segment = places.segment
        if segment is None:
            segment = jnp.where(places.position >= FAR, PADDING, 0)
        return jnp.broadcast_to(segment, (slots, rows, segment.shape[-1]))

    keys_in = [seen.own] if prompt is None else [cast(Places, seen.prompt), seen.own]
    ids = splash.SegmentIds(segments(seen.query),
                            jnp.concatenate([segments(part) for part in keys_in], axis=-1))
    run = _sharded(jax.vmap(jax.vmap(kernel)), heads, own[0].shape[2])
    mixed = run((query * how.scale).swapaxes(2, 3), *_joined(own, prompt), ids)
    return mixed.swapaxes(2, 3)


def _kernel(tokens: int, width: int, cap: float | None, interpret: bool
            ) -> Callable[..., jax.Array]:
    """A function of query [H, T, E], keys and values [K, P + T, E], segments; lengths that are
    not whole blocks are padded."""
    query_block, key_block = _block(tokens), _block(tokens + width)
    more_queries, more_keys = -tokens % query_block, -(tokens + width) % key_block
    sizes = splash.BlockSizes(
        block_q=query_block, block_kv=key_block, block_q_dkv=query_block, block_kv_dkv=key_block,
        block_q_dq=query_block, block_kv_dq=key_block)
    # A padded query sees padded keys from its own place on or, failing those, its own row's.
    shape = (tokens + more_queries, tokens + width + more_keys)

    def run(query: jax.Array, keys: jax.Array, values: jax.Array, ids: splash.SegmentIds
            ) -> jax.Array:
        mask = splash.MultiHeadMask([splash.CausalMask(shape, offset=width)] * query.shape[0])
        kernel = splash.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, attn_logits_soft_cap=cap,
            interpret=interpret)
        rows = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0)))  # noqa: E731
        ids = splash.SegmentIds(*(jnp.pad(x, (0, more), constant_values=PADDING) for x, more in
                                  zip(ids, (more_queries, more_keys))))
        return kernel(rows(query, more_queries), rows(keys, more_keys), rows(values, more_keys),
                      ids)[:, :tokens]

    return run


def _block(length: int) -> int:
    """The block in which the least of a length is padding, of those that fill a TPU's lanes."""
    return min((512, 256, LANES), key=lambda block: (-length % block, -block))


def _sharded(run: Callable, heads: int, kv_heads: int) -> Callable:
    """`run` on each device's own slots and heads: a kernel is not split by the compiler."""
    if jax.sharding.get_abstract_mesh().empty:
        return run
    tensor = placement.tensor_parts()
    on_heads = "tensor" if kv_heads % tensor == 0 and heads % tensor == 0 else None
    split = PartitionSpec(placement.SLOTS, None, on_heads)
    ids: Any = PartitionSpec(placement.SLOTS)
    return jax.shard_map(run, in_specs=(split, split, split, splash.SegmentIds(ids, ids)),
                         out_specs=split, check_vma=False)


IMPLEMENTATIONS = {"xla": _plain, "blocked": _blocked, "cudnn": _cudnn_or_blocked,
                   "tpu": _splash_or_blocked}


def resolve(chosen: str, backend: str) -> str:
    """The implementation that config.model.attention means on a backend."""
    return {"tpu": "tpu", "gpu": "cudnn"}.get(backend, "xla") if chosen == "auto" else chosen
