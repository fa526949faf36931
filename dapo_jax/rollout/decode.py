"""What the device does with slots: fill free ones with prompts, draw tokens, change their number.

Pure functions from a state to the next; `spec`, `sampling` and other plain values are static.
`parts` is the number of pieces that the slots are split into over devices: slots are numbered
within their part, so that filling and moving them never crosses devices.
"""

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import head, transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import draw


def empty(
    spec: ModelSpec, *, slots: int, rows: int, width: int, new: int, turns: bool = False
) -> types.Slots:
    """Idle slots for prompts of up to `width` tokens and samples of up to `new`; with `turns`
    those may be of several turns."""
    kept = (slots, spec.kv_heads, spec.head_size)

    def pair(shape: tuple[int, ...]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        keys = jnp.zeros(shape, spec.compute_dtype)
        return (keys,) * spec.layers, (keys.swapaxes(-1, -2),) * spec.layers

    by_slot = {name: jnp.zeros(slots, jnp.int32)
               for name in ("prompt", "visit", "budget", "next", "left")}
    by_row = {name: jnp.zeros((slots, rows), jnp.int32)
              for name in ("token", "sample", "position")}
    return types.Slots(
        cache=types.PromptCache(*pair((*kept, width)), jnp.zeros(slots, jnp.int32)),
        hidden=jnp.zeros((slots, spec.d_model), spec.compute_dtype),
        own=types.SampleCache(*pair((slots, rows, *kept[1:], new))), clock=jnp.int32(0),
        live=jnp.zeros((slots, rows), bool),
        turn=jnp.zeros(slots, jnp.int32) if turns else None, **by_slot, **by_row)


def admit(
    parts: int, slots: types.Slots, prompts: types.Prompts, hidden: jax.Array,
    cache: types.PromptCache,
) -> types.Slots:
    """Begin the first samples of prompts that were just run (transformer.prefill) in the slots
    they name.

    The keys that earlier rows left behind need no clearing: a row sees its own alone.
    """
    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return placed(old, new, prompts.slot, parts)

    rows = jnp.arange(slots.live.shape[1])
    begun = jnp.minimum(prompts.count, len(rows))
    new = {"hidden": hidden, "prompt": prompts.prompt, "visit": prompts.visit,
           "budget": prompts.budget, "next": prompts.sample + begun, "left": prompts.count - begun,
           "sample": prompts.sample[:, None] + rows, "live": rows < begun[:, None],
           "position": jnp.zeros((len(begun), len(rows)), jnp.int32)}
    if slots.turn is not None:
        new["turn"] = jnp.zeros_like(prompts.slot)
    return types.Slots(**vars(slots) | {name: put(getattr(slots, name), value)
                                        for name, value in new.items()} | {
        "cache": types.PromptCache(
            tuple(map(put, slots.cache.keys, cache.keys)),
            tuple(map(put, slots.cache.values, cache.values)),
            put(slots.cache.length, prompts.length))})


def placed(old: jax.Array, new: jax.Array, slot: jax.Array, parts: int) -> jax.Array:
    """Rows of `new` at their places of `old`, counted within a part; one beyond the part is
    dropped. Beyond a shorter axis of `new`, the old stays."""
    def one(old: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        window = tuple(slice(0, size) for size in new.shape[1:])
        return old.at[(slot, *window)].set(new, mode="drop")
    return jax.vmap(one)(*(_split(x, parts) for x in (old, new, slot))).reshape(old.shape)


def _split(x: jax.Array, parts: int) -> jax.Array:
    return x.reshape(parts, -1, *x.shape[1:])


def taken(x: jax.Array, source: jax.Array, parts: int) -> jax.Array:
    """Rows of x by their places within a part, i32[A]."""
    rows = jax.vmap(lambda x, at: x[at])(_split(x, parts), jnp.maximum(_split(source, parts), 0))
    return rows.reshape(source.shape[0], *x.shape[1:])


def resize(parts: int, slots: types.Slots, source: jax.Array) -> types.Slots:
    """As many slots as `source` i32[S'] names, each a copy of the old one, -1: an idle one."""
    moved = jax.tree.map(lambda x: x if x.ndim == 0 else taken(x, source, parts), slots)  # 0: clock
    return types.Slots(**vars(moved) | {"live": moved.live & (source >= 0)[:, None]})


def decode(
    spec: ModelSpec, sampling: draw.Sampling, chunk: int, weights: types.Tree, slots: types.Slots,
    root: jax.Array, enough: jax.Array,
) -> tuple[types.Slots, types.Chunk]:
    """Draw up to `chunk` tokens in every row; end early once `enough` slots are free, or all.

    `weights` are those of transformer.unstack, `root` is the run's key (draw.row_keys). A row that
    ends, at a stop token or at its budget, takes its slot's next sample. Every sample takes as many
    iterations as it has tokens: its first one runs no token, its state is the prompt's last.
    """
    shape = (chunk, *slots.live.shape)
    zero = jnp.zeros(shape, jnp.int32)
    log = types.Chunk(token=zero, logprob=zero.astype(jnp.float32), sample=zero - 1, position=zero,
                      steps=jnp.int32(0), free=_free(slots))
    enough = jnp.minimum(enough, shape[1])

    def goes_on(loop: tuple[types.Slots, types.Chunk]) -> jax.Array:
        return (loop[1].steps < chunk) & (loop[1].free.sum() < enough)

    def body(loop: tuple[types.Slots, types.Chunk]) -> tuple[types.Slots, types.Chunk]:
        slots, log = loop
        slots, drawn = _step(spec, sampling, weights, slots, root)
        columns = {name: jax.lax.dynamic_update_slice_in_dim(
            getattr(log, name), value[None], log.steps, axis=0) for name, value in drawn.items()}
        return slots, types.Chunk(**columns, steps=log.steps + 1, free=_free(slots))

    return jax.lax.while_loop(goes_on, body, (slots, log))


def _free(slots: types.Slots) -> jax.Array:
    return ~slots.live.any(axis=1)


def _step(
    spec: ModelSpec, sampling: draw.Sampling, weights: types.Tree, slots: types.Slots,
    root: jax.Array,
) -> tuple[types.Slots, dict[str, jax.Array]]:
    """One token of each row, and the columns of the log that say so."""
    position = slots.position
    hidden, own = transformer.decode(spec, weights, slots.token, slots.cache, slots.own,
                                     column=slots.clock, position=position - 1)
    hidden = jnp.where((position == 0)[..., None], slots.hidden[:, None], hidden)
    logits = head.logits(weights, hidden, softcap=spec.logit_softcap)
    prompt, visit = (jnp.broadcast_to(x[:, None], position.shape)
                     for x in (slots.prompt, slots.visit))
    turn = 0 if slots.turn is None else jnp.broadcast_to(slots.turn[:, None], position.shape)
    keys = draw.row_keys(root, prompt, visit, slots.sample, turn=turn)
    token, logprob = draw.draw(logits, draw.uniforms(keys, position), sampling)
    drawn = {"token": token, "logprob": logprob, "position": position,
             "sample": jnp.where(slots.live, slots.sample, -1)}
    stopped = jnp.isin(token, jnp.asarray(sampling.stop_ids, jnp.int32))
    ended = slots.live & (stopped | (position + 1 >= _budgets(slots)))
    clock = (slots.clock + 1) % slots.own.keys[0].shape[-1]
    slots = types.Slots(**vars(slots) | {"own": own, "token": token, "clock": clock})
    return _next_samples(slots, ended), drawn


def _budgets(slots: types.Slots) -> jax.Array:
    return slots.budget[:, None]


def _next_samples(slots: types.Slots, ended: jax.Array) -> types.Slots:
    """Rows that ended take their slot's next samples, in the order of rows."""
    place = jnp.cumsum(ended, axis=1) - ended
    begins = ended & (place < slots.left[:, None])
    begun = begins.sum(axis=1)
    return types.Slots(**vars(slots) | {
        "live": slots.live & (begins | ~ended),
        "sample": jnp.where(begins, slots.next[:, None] + place, slots.sample),
        "position": jnp.where(ended, 0, slots.position + 1),
        "next": slots.next + begun, "left": slots.left - begun})
