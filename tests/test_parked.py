import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.models import transformer
from dapo_jax.rollout import decode, parked

SLOTS, WIDTH, NEW, CHUNK = 4, 8, 12, 3
LENGTH, RING, ENTRIES, ADMITTED = WIDTH + NEW, NEW + CHUNK, 5, 4
TABLE = tiny.table()
ROOT = jax.random.key(7)
NOBODY = SLOTS  # a slot beyond all
CLOCK = RING - 2  # at first: what the first chunk writes lies at both ends of the ring
SPEC = dataclasses.replace(tiny.SPEC, layers=1, sliding=(True,), sliding_window=6)


@functools.lru_cache
def programs():
    """Slots of one row with a ring that is a chunk wider, and what parks and resumes."""
    how = tiny.sampling(max_new_tokens=NEW, stop_ids=(99,))
    part = functools.partial
    return {
        "empty": jax.jit(part(decode.empty, SPEC, slots=SLOTS, rows=1, width=WIDTH, new=RING,
                              turns=True)),
        "pool": jax.jit(part(parked.empty, SPEC, entries=ENTRIES, length=LENGTH)),
        "prefill": jax.jit(part(transformer.prefill, SPEC)),
        "admit": jax.jit(part(decode.admit, 1)),
        "decode": jax.jit(part(decode.decode, SPEC, how, CHUNK)),
        "lines": jax.jit(part(parked.lines, 1, LENGTH)),
        "store": jax.jit(part(parked.store, 1)),
        "extend": jax.jit(part(parked.extend, SPEC, 1)),
        "seat": jax.jit(part(parked.seat, 1)), "unstack": part(transformer.unstack, SPEC)}


@pytest.fixture(scope="module")
def params():
    return tiny.params(SPEC)


def column(*values, fill=0):
    return np.array([*values, *[fill] * (ADMITTED - len(values))], np.int32)


def admitted(run, params, budget, *, slots=(0, 1, 2, 3)):
    tokens = np.zeros((ADMITTED, WIDTH), np.int32)
    for row, prompt in zip(tokens, TABLE.tokens):
        row[:len(prompt)] = prompt
    length = column(*map(len, TABLE.tokens[:ADMITTED]))
    asked = types.Prompts(tokens, length, slot=column(*slots), prompt=column(0, 1, 2, 3),
                          visit=column(), sample=column(5, 6, 7, 8), count=column(1, 1, 1, 1),
                          budget=column(*budget))
    slots = dataclasses.replace(run["empty"](), clock=np.int32(CLOCK))
    return run["admit"](slots, asked, *run["prefill"](params, tokens, length))


def drawn(run, params, slots, chunks=1):
    """Tokens and log-probs by slot, in the order that they were drawn in."""
    found, weights = [[] for _ in range(SLOTS)], run["unstack"](params)
    for _ in range(chunks):
        slots, chunk = run["decode"](weights, slots, ROOT, np.int32(SLOTS))
        for step, slot in np.argwhere(np.asarray(chunk.sample)[:int(chunk.steps), :, 0] >= 0):
            found[slot].append((int(chunk.position[step, slot, 0]), int(chunk.token[step, slot, 0]),
                                float(chunk.logprob[step, slot, 0])))
    return slots, found


def keys_of(params, tokens):
    """Keys [N, K, E, L] and values of a whole sequence, run at once."""
    _, cache = jax.jit(transformer.prefill, static_argnums=0)(
        SPEC, params, np.array(tokens, np.int32)[None], np.array([len(tokens)], np.int32))
    return np.asarray(cache.keys)[:, 0], np.asarray(cache.values)[:, 0]


def parked_after(run, params, slots, chunks, entry):
    """The pool with slot 2's context, its tokens, and the slots."""
    slots, found = drawn(run, params, slots, chunks)
    tokens = [token for _, token, _ in found[2]]
    newest = (CLOCK + chunks * CHUNK - 1) % RING  # the column that the last iteration wrote
    contexts = run["lines"](slots, column(2), column(newest), column(len(tokens) - 1))
    return run["store"](run["pool"](), column(entry, fill=ENTRIES), contexts), tokens, slots


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_parked_context_is_that_of_the_whole_sequence(params, chunks):
    run = programs()
    pool, tokens, _ = parked_after(run, params, admitted(run, params, [NEW] * 4), chunks, 3)
    whole = [*TABLE.tokens[2], *tokens]
    assert len(tokens) == CHUNK * chunks
    reply, before = [9, 2, 33, 4], np.asarray(pool.keys)
    # In two pieces of which the second ends in padding.
    for piece in ([tokens[-1], *reply[:2]], reply[2:]):
        start = column(len(whole) - 1 if piece[0] == tokens[-1] else len(whole) + 2)
        padded = np.full((ADMITTED, 3), 50, np.int32)
        padded[0, :len(piece)] = piece
        pool = run["extend"](params, pool, column(3, fill=ENTRIES), padded, start,
                             column(len(piece)))
    whole = [*whole, *reply]
    np.testing.assert_array_equal(np.asarray(pool.keys)[..., len(whole):],
                                  before[..., len(whole):])
    keys, values = keys_of(params, whole)
    np.testing.assert_allclose(np.asarray(pool.keys)[:, 3, :, :, :len(whole)], keys, atol=1e-5)
    np.testing.assert_allclose(np.asarray(pool.values)[:, 3, :, :len(whole)], values, atol=1e-5)


def test_a_sample_that_was_parked_goes_on_as_one_that_was_not(params):
    run = programs()
    _, want = drawn(run, params, admitted(run, params, [NEW] * 4), 2)
    pool, tokens, slots = parked_after(run, params, admitted(run, params, [NEW] * 4), 1, 1)
    # Others draw on meanwhile: the clock is not where it was.
    slots, _ = drawn(run, params, slots, 1)
    free = dataclasses.replace(slots, live=slots.live & False)
    back = types.Resumed(
        entry=column(1), slot=column(0, fill=NOBODY), length=column(len(TABLE.tokens[2])),
        position=column(len(tokens)), token=column(tokens[-1]), prompt=column(2), visit=column(),
        sample=column(7), turn=column(), budget=column(2 * CHUNK))
    slots, got = drawn(run, params, run["seat"](free, pool, back), 2)
    assert [(at, token) for at, token, _ in got[0]] == [(at, token) for at, token, _ in want[2][3:]]
    np.testing.assert_allclose([p for *_, p in got[0]], [p for *_, p in want[2][3:]], atol=1e-5)
    assert not any(got[1:]) and not np.asarray(slots.live).any()


def test_a_turn_draws_numbers_of_its_own(params):
    run = programs()
    pool, tokens, slots = parked_after(run, params, admitted(run, params, [NEW] * 4), 1, 1)
    free = dataclasses.replace(slots, live=slots.live & False)
    again = column(1, 1, 1, 1)
    back = types.Resumed(
        entry=again, slot=column(0, 1, 2, 3), length=again * len(TABLE.tokens[2]),
        position=again * len(tokens), token=again * tokens[-1], prompt=again * 2, visit=column(),
        sample=again * 7, turn=column(0, 1, 2, 2), budget=again * NEW)
    _, got = drawn(run, params, run["seat"](free, pool, back), 1)
    texts = [tuple(token for _, token, _ in one) for one in got]
    assert texts[2] == texts[3] and len(set(texts)) == 3
