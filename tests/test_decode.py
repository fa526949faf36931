import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.learner import losses, update
from dapo_jax.models import transformer
from dapo_jax.rollout import decode

SLOTS, WIDTH, CHUNK = 4, 8, 4
TABLE = tiny.table()
ROOT = jax.random.key(7)


@functools.lru_cache
def programs(rows=tiny.ROWS, **changes):
    """The device's functions, compiled once for each way of sampling."""
    how = tiny.sampling(**changes)
    shape = {"slots": SLOTS, "rows": rows, "width": WIDTH, "new": how.max_new_tokens}
    return (jax.jit(functools.partial(decode.empty, tiny.SPEC, **shape)),
            jax.jit(functools.partial(transformer.prefill, tiny.SPEC)),
            jax.jit(functools.partial(decode.admit, 1)),
            jax.jit(functools.partial(decode.decode, tiny.SPEC, how, CHUNK)))


@pytest.fixture(scope="module")
def params():
    return tiny.params()


def prompts(ids, *, budget=tiny.NEW, visit=0, sample=0, count=tiny.ROWS):
    """Slot i for prompt ids[i]; None is an idle slot."""
    tokens = np.zeros((len(ids), WIDTH), np.int32)
    used = [np.zeros(0, int) if i is None else TABLE.tokens[i] for i in ids]
    for target, row in zip(tokens, used):
        target[:len(row)] = row
    column = lambda x: np.broadcast_to(np.array(x, np.int32), (len(ids),))  # noqa: E731
    return types.Prompts(
        tokens, length=np.array([len(row) for row in used], np.int32),
        slot=np.array([SLOTS if i is None else at for at, i in enumerate(ids)], np.int32),
        prompt=np.array([i or 0 for i in ids], np.int32), visit=column(visit),
        sample=column(sample), count=column(count), budget=column(budget))


@dataclasses.dataclass
class Out:
    """Samples by slot and number; 0 beyond their length."""

    tokens: np.ndarray
    logprobs: np.ndarray
    length: np.ndarray
    stopped: np.ndarray


def collected(chunks, samples, stop):
    """The log of chunks, read token by token."""
    out = Out(np.zeros((SLOTS, samples, tiny.NEW), np.int32), np.zeros((SLOTS, samples, tiny.NEW)),
              np.zeros((SLOTS, samples), np.int32), np.zeros((SLOTS, samples), bool))
    for chunk in chunks:
        for column, slot, row in np.ndindex(int(chunk.steps), *chunk.token.shape[1:]):
            sample = chunk.sample[column, slot, row]
            if sample < 0:
                continue
            at = chunk.position[column, slot, row]
            assert at == out.length[slot, sample]
            out.tokens[slot, sample, at] = chunk.token[column, slot, row]
            out.logprobs[slot, sample, at] = chunk.logprob[column, slot, row]
            out.length[slot, sample] = at + 1
            out.stopped[slot, sample] = chunk.token[column, slot, row] in stop
    return out


def drawn(slots, params, asked, *, rows=tiny.ROWS, samples=tiny.ROWS, **changes):
    """All samples of the prompts, by as many chunks as it takes; and the slots after them."""
    _, prefill, admit, draw_chunk = programs(rows, **changes)
    weights = transformer.unstack(tiny.SPEC, params)
    slots = admit(slots, asked, *prefill(params, asked.tokens, asked.length))
    chunks = []
    while slots.live.any():
        slots, chunk = draw_chunk(weights, slots, ROOT, np.int32(SLOTS))
        chunks.append(jax.tree.map(np.asarray, chunk))
        assert chunks[-1].steps > 0
    return collected(chunks, samples, changes.get("stop_ids", (tiny.STOP,))), slots


def run(params, asked, **changes):
    empty = programs(changes.get("rows", tiny.ROWS), **{
        name: value for name, value in changes.items() if name not in ("rows", "samples")})[0]
    return drawn(empty(), params, asked, **changes)[0]


def check_ends(out, budget, stop):
    """Lengths, flags and padding follow from the tokens, by plain loops."""
    for slot, row in np.ndindex(out.length.shape):
        length, tokens = out.length[slot, row], out.tokens[slot, row].tolist()
        assert out.stopped[slot, row] == (length > 0 and tokens[length - 1] in stop)
        assert not set(tokens[:max(length - 1, 0)]) & set(stop)
        assert out.stopped[slot, row] or length == budget[slot]
        assert length <= budget[slot]
        assert not any(tokens[length:]) and not out.logprobs[slot, row, length:].any()
        assert (out.logprobs[slot, row, :length] <= 0).all()


@pytest.mark.parametrize("narrowed", [{}, {"top_k": 40, "top_p": 0.95, "min_p": 0.02}])
def test_log_probs_are_those_the_trainer_computes(params, narrowed):  # B36, B38
    """So the ratio of the first update is 1, also where some tokens are never drawn."""
    asked = prompts([0, 1, 2, 3])
    out = run(params, asked, **narrowed)
    zeros = np.zeros(out.tokens.shape, np.float32)
    batch = types.TrainBatch(asked.tokens, asked.length, out.tokens, out.logprobs, zeros, zeros,
                             zeros)
    settings = update.Settings(losses.LossSettings("token", 0.2, 0.2, 0.0, 0.0), 0.7, 16)
    want = jax.jit(update.token_logprobs, static_argnums=(0, 1))(tiny.SPEC, settings, params,
                                                                 batch)[0]
    own = np.arange(tiny.NEW) < out.length[..., None]
    assert own.sum() > 60 and len(set(map(tuple, out.tokens.reshape(-1, tiny.NEW)))) == 16
    np.testing.assert_allclose(np.exp(np.asarray(want) - out.logprobs)[own], 1, atol=1e-5)
    check_ends(out, asked.budget, [tiny.STOP])
    assert bool(narrowed) == (out.tokens != run(params, asked).tokens).any()


def greedy_by_full_forwards(params, prompt, count, stop):
    """Token by token through whole sequences; no cache, no prompt shared."""
    tokens = prompt.tolist()
    for _ in range(count):
        padded = np.zeros((1, WIDTH + tiny.NEW), np.int32)
        padded[0, :len(tokens)] = tokens
        tokens.append(int(tiny.full_logits(tiny.SPEC, params, padded)[0, len(tokens) - 1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt):]


def test_greedy_equals_a_loop_over_whole_sequences_without_a_cache(params):
    out = run(params, prompts([0, 1, 2, 3]), temperature=0.0)
    for slot in range(SLOTS):
        want = greedy_by_full_forwards(params, TABLE.tokens[slot], tiny.NEW, [tiny.STOP])
        for row in range(tiny.ROWS):
            assert out.tokens[slot, row, :out.length[slot, row]].tolist() == want


def test_a_row_depends_neither_on_its_place_nor_on_its_neighbours(params):  # promise 3
    first = run(params, prompts([0, 1, 2, 3]))
    moved = run(params, prompts([2, 0, 3, 1]))
    for slot, was in enumerate([2, 0, 3, 1]):
        np.testing.assert_array_equal(moved.tokens[slot], first.tokens[was])
        np.testing.assert_allclose(moved.logprobs[slot], first.logprobs[was], atol=1e-6)
    beside_others = run(params, prompts([0, None, 5, 6]))
    np.testing.assert_array_equal(beside_others.tokens[0], first.tokens[0])


def test_samples_are_numbered_on_where_a_group_takes_several_slots(params):
    out = run(params, prompts([0, 0, 0, 0], sample=[0, 4, 2, 0]), samples=8)
    np.testing.assert_array_equal(out.tokens[0, :4], out.tokens[3, :4])
    np.testing.assert_array_equal(out.tokens[0, 2:4], out.tokens[2, 2:4])
    np.testing.assert_array_equal(out.tokens[1, 4:6], out.tokens[2, 4:6])
    assert not (out.tokens[0, :4] == out.tokens[1, 4:]).all()


def test_another_visit_gives_other_samples(params):  # B57
    first, second = (run(params, prompts([0, 1, 2, 3], visit=visit)) for visit in (0, 1))
    assert not (first.tokens == second.tokens).all(axis=-1).any()


def test_a_stop_token_may_be_the_first(params):  # B44
    asked = prompts([0, 1, 2, 3])
    out = run(tiny.always(params, tiny.STOP), asked)
    assert (out.length == 1).all() and out.stopped.all() and (out.tokens[..., 0] == tiny.STOP).all()
    assert not out.tokens[..., 1:].any()


def test_rows_that_never_stop_end_at_their_budget_as_truncated(params):  # B47
    budget = np.array([1, 2, 6, 3], np.int32)
    out = run(tiny.always(params, 5), prompts([0, 1, 2, 3], budget=budget))
    np.testing.assert_array_equal(out.length, np.repeat(budget[:, None], tiny.ROWS, axis=1))
    assert not out.stopped.any()
    check_ends(out, budget, [tiny.STOP])


def test_a_stop_token_at_the_budget_is_not_a_truncation(params):  # B47
    out = run(tiny.always(params, tiny.STOP), prompts([0, 1, 2, 3], budget=1))
    assert (out.length == 1).all() and out.stopped.all()


def test_idle_slots_come_back_empty_and_cost_nothing_to_the_others(params):
    out = run(params, prompts([None, 0, None, None]))
    assert not out.length[[0, 2, 3]].any()
    assert out.length[1].all()
    assert not run(params, prompts([None] * 4)).length.any()


def test_each_of_several_stop_ids_ends_a_row_and_is_kept(params):
    stop = tuple(range(0, 64, 4))  # a quarter of all tokens: 0, the padding, is among them
    asked = prompts([0, 1, 2, 3])
    out = run(params, asked, stop_ids=stop)
    check_ends(out, asked.budget, stop)
    ends = {int(out.tokens[s, r, out.length[s, r] - 1]) for s, r in np.argwhere(out.stopped)}
    assert len(ends) > 2 and len(set(out.length.ravel().tolist())) > 2


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_that_ends_takes_the_next_sample_of_its_slot(params, rows):  # promise 3
    stop = tuple(range(0, 64, 4))
    asked = prompts([0, 1, 2, 3], count=7)
    want = run(params, asked, rows=7, samples=7, stop_ids=stop)
    got = run(params, asked, rows=rows, samples=7, stop_ids=stop)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.length, want.length)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert len(set(want.length.ravel().tolist())) > 3


def test_a_refilled_slot_sees_nothing_of_who_sat_there(params):
    _, slots = drawn(programs()[0](), params, prompts([4, 6, 6, 4], budget=4))
    assert int(slots.clock) != 0
    got, _ = drawn(slots, params, prompts([0, 1, 2, 3]))
    want = run(params, prompts([0, 1, 2, 3]))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def begun(params, budget):
    """Slots at work on prompts 0 to 3, whose samples all go to their budgets."""
    empty, prefill, admit, draw_chunk = programs()
    asked = prompts([0, 1, 2, 3], budget=budget)
    tree = tiny.always(params, 5)
    slots = admit(empty(), asked, *prefill(tree, asked.tokens, asked.length))
    return slots, functools.partial(draw_chunk, transformer.unstack(tiny.SPEC, tree))


def test_a_chunk_ends_once_enough_slots_are_free(params):
    slots, draw_chunk = begun(params, [1, 2, 3, 6])
    for enough, steps in ((1, 1), (2, 1), (4, 4)):
        slots, chunk = draw_chunk(slots, ROOT, np.int32(enough))
        assert int(chunk.steps) == steps
        assert not (np.asarray(chunk.sample)[steps:] >= 0).any()
    assert np.asarray(chunk.free).all()


def test_slots_move_to_another_number_of_slots_and_go_on(params):
    slots, draw_chunk = begun(params, [6, 1, 1, 6])
    slots, _ = draw_chunk(slots, ROOT, np.int32(2))
    moved = decode.resize(1, slots, np.array([3, -1, 0, -1], np.int32))
    np.testing.assert_array_equal(np.asarray(moved.live).any(1), [True, False, True, False])
    chunks = [draw_chunk(state, ROOT, np.int32(SLOTS))[1] for state in (slots, moved)]
    stayed, went = (jax.tree.map(np.asarray, chunk) for chunk in chunks)
    assert stayed.steps == went.steps == CHUNK and (stayed.position[:, 0] > 0).all()
    for name in ("token", "position", "sample"):
        was, now = getattr(stayed, name), getattr(went, name)
        np.testing.assert_array_equal(now[:, [0, 2]], was[:, [3, 0]])


def test_a_prompt_is_run_once_however_many_rows_it_has(params):
    """What a prefill hands on, and what the loop reads of it, do not grow with R."""
    prefilled = jax.eval_shape(functools.partial(transformer.prefill, tiny.SPEC), params,
                               prompts([0, 1, 2, 3]).tokens, prompts([0, 1, 2, 3]).length)
    assert prefilled[1].keys.shape == (2, SLOTS, 2, 8, WIDTH)
    for rows in (2, 32):
        slots = jax.eval_shape(functools.partial(decode.empty, tiny.SPEC, slots=SLOTS, rows=rows,
                                                 width=WIDTH, new=tiny.NEW))
        assert {key.shape for key in slots.cache.keys} == {(SLOTS, 2, 8, WIDTH)}
