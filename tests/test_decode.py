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

SLOTS, WIDTH = 4, 8
TABLE = tiny.table()
ROOT = jax.random.key(7)


@functools.lru_cache
def program(**changes):
    """generate, compiled once for each way of sampling."""
    return jax.jit(functools.partial(decode.generate, tiny.SPEC, tiny.sampling(**changes),
                                     tiny.ROWS))


@pytest.fixture(scope="module")
def params():
    return tiny.params()


def prompts(ids, *, budget=tiny.NEW, visit=0, sample=0):
    """A slot for each prompt id; None is an idle slot."""
    tokens = np.zeros((len(ids), WIDTH), np.int32)
    used = [np.zeros(0, int) if i is None else TABLE.tokens[i] for i in ids]
    for target, row in zip(tokens, used):
        target[:len(row)] = row
    column = lambda x: np.broadcast_to(np.int32(x), (len(ids),))  # noqa: E731
    return types.Prompts(
        tokens, length=np.array([len(row) for row in used], np.int32),
        prompt=np.array([i or 0 for i in ids], np.int32), visit=column(visit),
        sample=column(sample), budget=np.broadcast_to(np.array(budget, np.int32), (len(ids),)))


def run(params, asked, **changes):
    return jax.tree.map(np.asarray, program(**changes)(params, asked, ROOT))


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


def test_log_probs_are_those_the_trainer_computes(params):  # B36, B38
    asked = prompts([0, 1, 2, 3])
    out = run(params, asked)
    zeros = np.zeros(out.tokens.shape, np.float32)
    batch = types.TrainBatch(asked.tokens, asked.length, out.tokens, out.logprobs, zeros, zeros,
                             zeros)
    settings = update.Settings(losses.LossSettings("token", 0.2, 0.2, 0.0, 0.0), 0.7, 16)
    want = jax.jit(update.token_logprobs, static_argnums=(0, 1))(tiny.SPEC, settings, params,
                                                                 batch)[0]
    own = np.arange(tiny.NEW) < out.length[..., None]
    assert own.sum() > 60 and len(set(map(tuple, out.tokens.reshape(-1, tiny.NEW)))) == 16
    np.testing.assert_allclose(out.logprobs[own], np.asarray(want)[own], atol=1e-5)
    check_ends(out, asked.budget, [tiny.STOP])


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
    out = run(params, dataclasses.replace(
        prompts([0, 0, 0, 0]), sample=np.array([0, 4, 2, 0], np.int32)))
    np.testing.assert_array_equal(out.tokens[0], out.tokens[3])
    np.testing.assert_array_equal(out.tokens[0, 2:], out.tokens[2, :2])
    np.testing.assert_array_equal(out.tokens[1, :2], out.tokens[2, 2:])
    assert not (out.tokens[0] == out.tokens[1]).all()


def test_another_visit_gives_other_samples(params):  # B57
    first, second = (run(params, prompts([0, 1, 2, 3], visit=visit)) for visit in (0, 1))
    assert not (first.tokens == second.tokens).all(axis=-1).any()


def always(params, token):
    """Parameters that make one token certain: its embedding is the only long one."""
    table = np.zeros_like(params["embedding"])
    table[:] = 1.0
    table[token] = 50.0
    blocks = jax.tree.map(np.zeros_like, params["blocks"])
    return params | {"embedding": table, "blocks": blocks, "norm": np.ones_like(params["norm"])}


def test_a_stop_token_may_be_the_first(params):  # B44
    asked = prompts([0, 1, 2, 3])
    out = run(always(params, tiny.STOP), asked)
    assert (out.length == 1).all() and out.stopped.all() and (out.tokens[..., 0] == tiny.STOP).all()
    assert not out.tokens[..., 1:].any()


def test_rows_that_never_stop_end_at_their_budget_as_truncated(params):  # B47
    budget = np.array([1, 2, 6, 3], np.int32)
    out = run(always(params, 5), prompts([0, 1, 2, 3], budget=budget))
    np.testing.assert_array_equal(out.length, np.repeat(budget[:, None], tiny.ROWS, axis=1))
    assert not out.stopped.any()
    check_ends(out, budget, [tiny.STOP])


def test_a_stop_token_at_the_budget_is_not_a_truncation(params):  # B47
    out = run(always(params, tiny.STOP), prompts([0, 1, 2, 3], budget=1))
    assert (out.length == 1).all() and out.stopped.all()


def test_idle_slots_come_back_empty_and_cost_nothing_to_the_others(params):
    out = run(params, prompts([None, 0, None, None]))
    assert not out.length[[0, 2, 3]].any() and not out.stopped[[0, 2, 3]].any()
    assert not out.tokens[[0, 2, 3]].any() and not out.logprobs[[0, 2, 3]].any()
    assert out.length[1].all()
    assert not run(params, prompts([None] * 4)).length.any()


def test_each_of_several_stop_ids_ends_a_row_and_is_kept(params):
    stop = tuple(range(0, 64, 4))  # a quarter of all tokens: 0, the padding, is among them
    asked = prompts([0, 1, 2, 3])
    out = run(params, asked, stop_ids=stop)
    check_ends(out, asked.budget, stop)
    ends = {int(out.tokens[s, r, out.length[s, r] - 1]) for s, r in np.argwhere(out.stopped)}
    assert len(ends) > 2 and len(set(out.length.ravel().tolist())) > 2


def test_a_prompt_is_run_once_however_many_rows_it_has(params):
    """Floating-point work of the prefill, and the size of what it hands on, do not grow with R."""
    def work(rows):
        how = tiny.sampling(max_new_tokens=1)
        traced = jax.make_jaxpr(functools.partial(decode.generate, tiny.SPEC, how, rows))(
            params, prompts([0, 1, 2, 3]), ROOT)
        return [eqn for eqn in traced.eqns if eqn.primitive.name in ("scan", "while")]

    for few, many in zip(work(2), work(32), strict=True):
        if few.primitive.name == "scan":  # the prefill's layers
            assert [v.aval.shape for v in few.outvars] == [v.aval.shape for v in many.outvars]
        else:
            caches = [[v.aval.shape for v in loop.invars if v.aval.shape[:2] == (2, SLOTS)]
                      for loop in (few, many)]
            assert caches[0] == caches[1]
            assert set(caches[0]) == {(2, SLOTS, 2, 8, WIDTH)}  # keys and values, by layer and slot
    hidden = jax.eval_shape(functools.partial(transformer.prefill, tiny.SPEC), params,
                            prompts([0, 1, 2, 3]).tokens, prompts([0, 1, 2, 3]).length)
    assert hidden[1].keys.shape == (2, SLOTS, 2, 8, WIDTH)
