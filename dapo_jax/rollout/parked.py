"""What the device does with contexts of samples that wait for a reply: take them out of their
slots, keep them, append tokens to them, and put them into free slots again.

In a slot a sample's own keys lie in a ring that all rows share, and its prompt's apart. Parked, a
context is one line: token i of prompt and sample at place i. Between the two a line is turned, not
gathered place by place. Numbers of tokens and places are the host's, which keeps the books. `parts`
is as in decode.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import decode

KEYS, VALUES = -1, -2  # the axis of places


def empty(spec: ModelSpec, *, entries: int, length: int) -> types.Parked:
    """Room for so many contexts of up to `length` tokens."""
    keys = jnp.zeros((spec.layers, entries, spec.kv_heads, spec.head_size, length),
                     spec.compute_dtype)
    return types.Parked(keys, keys.swapaxes(-1, -2))


def lines(
    parts: int, length: int, slots: types.Slots, slot: jax.Array, column: jax.Array,
    count: jax.Array,
) -> types.Parked:
    """The contexts of samples that ended in slots of one row; of up to `length` tokens.

    `slot` i32[A] is counted within its part, the newest of the sample's `count` i32[A] keys stands
    in ring column `column` i32[A].
    """
    prompt = decode.taken(slots.cache.length, slot, parts)

    def line(cached: jax.Array, own: jax.Array, axis: int) -> jax.Array:
        cached, own = decode.taken(cached, slot, parts), decode.taken(own[:, 0], slot, parts)
        own = _turned(own, count - 1 - column, axis)
        new = length - cached.shape[axis]
        own = _turned(_wide(_cut(own, new, axis), length, axis), prompt, axis)
        return jnp.where(_before(prompt, length, axis), _wide(cached, length, axis), own)

    return types.Parked(*(
        jnp.stack([line(*pair, axis) for pair in zip(cached, own, strict=True)])
        for cached, own, axis in ((slots.cache.keys, slots.own.keys, KEYS),
                                  (slots.cache.values, slots.own.values, VALUES))))


def store(
    parts: int, pool: types.Parked, entry: jax.Array, contexts: types.Parked
) -> types.Parked:
    """The pool with contexts, A of them, at entries i32[A]; one beyond its part is dropped."""
    return jax.tree.map(
        jax.vmap(lambda old, new: decode.placed(old, new, entry, parts)), pool, contexts)


def extend(
    spec: ModelSpec, parts: int, params: types.Tree, pool: types.Parked, entry: jax.Array,
    tokens: jax.Array, start: jax.Array, count: jax.Array,
) -> types.Parked:
    """Append the first `count` of tokens i32[A, C] to contexts of `start` tokens; work and memory
    go with C, not with what is there already, but for attention's look at it."""
    context = _taken(pool, entry, parts)
    new = transformer.append(spec, params, tokens,
                             types.PromptCache(context.keys, context.values, start))
    length = context.keys.shape[KEYS]

    def joined(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        fresh = ~_before(start, length, axis) & _before(start + count, length, axis)
        turned = jax.vmap(lambda layer: _turned(_wide(layer, length, axis), start, axis))(new)
        return jnp.where(fresh, turned, old)

    return store(parts, pool, entry, types.Parked(joined(context.keys, new[0], KEYS),
                                                  joined(context.values, new[1], VALUES)))


def seat(
    parts: int, slots: types.Slots, pool: types.Parked, resumed: types.Resumed
) -> types.Slots:
    """Samples go on from their contexts in the slots that they name.

    A sample's last token has no key yet: it is the row's newest token, and the next iteration of
    `decode` runs it as it does any other.
    """
    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return decode.placed(old, new, resumed.slot, parts)

    ring, context = slots.own.keys[0].shape[KEYS], _taken(pool, resumed.entry, parts)
    shift = slots.clock + 1 - resumed.position  # the newest key is one column before the clock

    def own(old: jax.Array, line: jax.Array, axis: int) -> jax.Array:
        line = _turned(line, -resumed.length, axis)
        return put(old, _turned(_wide(line, ring, axis), shift, axis)[:, None])

    def cached(old: jax.Array, line: jax.Array, axis: int) -> jax.Array:
        return put(old, _cut(line, old.shape[axis], axis))

    def layers(write: Callable, old: tuple[jax.Array, ...], lines: jax.Array, axis: int
               ) -> tuple[jax.Array, ...]:
        return tuple(write(x, lines[layer], axis) for layer, x in enumerate(old))

    new: dict[str, jax.Array] = {
        name: getattr(resumed, name) for name in ("prompt", "visit", "budget", "turn")} | {
        name: getattr(resumed, name)[:, None] for name in ("token", "sample", "position")} | {
        "left": jnp.zeros_like(resumed.slot), "live": jnp.ones((len(resumed.slot), 1), bool)}
    moved: dict[str, Any] = {name: put(getattr(slots, name), value) for name, value in new.items()}
    return dataclasses.replace(
        slots, **moved,
        cache=types.PromptCache(layers(cached, slots.cache.keys, context.keys, KEYS),
                                layers(cached, slots.cache.values, context.values, VALUES),
                                put(slots.cache.length, resumed.length)),
        own=types.SampleCache(layers(own, slots.own.keys, context.keys, KEYS),
                              layers(own, slots.own.values, context.values, VALUES)))


def _taken(pool: types.Parked, entry: jax.Array, parts: int) -> types.Parked:
    return jax.tree.map(jax.vmap(lambda x: decode.taken(x, entry, parts)), pool)


def _turned(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """Each x[a] turned by its number of places along an axis."""
    return jax.vmap(lambda x, by: jnp.roll(x, by, axis=axis))(x, by)


def _cut(x: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, size, axis=x.ndim + axis)


def _wide(x: jax.Array, size: int, axis: int) -> jax.Array:
    """x filled with zeros along an axis, or cut to the size."""
    if x.shape[axis] >= size:
        return _cut(x, size, axis)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pads)


def _before(end: jax.Array, size: int, axis: int) -> jax.Array:
    """bool[A, 1, ...]: places before each `end` i32[A], along an axis of a line."""
    found = (jnp.arange(size) < end[:, None])[:, None]
    return found[:, :, None] if axis == KEYS else found[..., None]
