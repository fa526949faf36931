import jax
import numpy as np
import pytest
import tiny

from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import metrics

TABLE = tiny.table()
LADDER = (2, 4)


@pytest.fixture(scope="module")
def root():
    return jax.random.key(7)


@pytest.fixture(scope="module")
def params():
    return mesh_lib.put(tiny.params(), mesh_lib.replicated(tiny.mesh()))


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(slots=LADDER, buckets=(4, 8))


def sample(engine, params, root, plan, step=0):
    return engines.run(engine, params, plan, table=TABLE, root=root, step=step)


def test_rows_come_back_in_plan_order_with_their_identity(engine, params, root):
    plan = tiny.plan([3, 0, 6, 1, 3], [4, 2, 4, 1, 3], visit=5, group=[9, 8, 7, 6, 5])
    samples = sample(engine, params, root, plan, step=11)
    want = [(group, prompt, number)
            for group, prompt, size in zip(plan.group, plan.prompt, plan.size)
            for number in range(size)]
    assert list(zip(samples.group, samples.prompt, samples.sample)) == want
    assert (samples.visit == 5).all() and (samples.born == 11).all() and not samples.valid.any()
    np.testing.assert_array_equal(samples.loss_mask.sum(1), samples.length)
    # Prompt 3 is asked for twice at the same visit: the same samples, in another slot.
    np.testing.assert_array_equal(samples.tokens[:3], samples.tokens[-3:])


def test_a_sample_does_not_depend_on_the_plan_it_is_in(engine, params, root):  # promise 3
    alone = sample(engine, params, root, tiny.plan([6], 4))  # bucket 8, two slots
    among = sample(engine, params, root, tiny.plan([0, 1, 2, 4, 5, 7, 6, 3, 0], 4))
    rows = np.flatnonzero(among.prompt == 6)
    np.testing.assert_array_equal(among.tokens[rows], alone.tokens)
    short = sample(engine, params, root, tiny.plan([1], 4))  # bucket 4 instead of 8
    rows = np.flatnonzero(among.prompt == 1)
    np.testing.assert_array_equal(among.tokens[rows], short.tokens)
    np.testing.assert_allclose(among.logprobs[rows], short.logprobs, atol=1e-5)


def test_groups_larger_than_a_slot_and_plans_larger_than_the_ladder_are_cut(engine, params, root):
    plan = tiny.plan([0, 1, 2, 3], [11, 3, 4, 9])  # 3 + 1 + 1 + 3 slots, in calls of 4
    samples = sample(engine, params, root, plan)
    assert np.bincount(samples.group).tolist() == [11, 3, 4, 9]
    for prompt in (0, 3):
        rows = samples.prompt == prompt
        np.testing.assert_array_equal(samples.sample[rows], np.arange(rows.sum()))
        assert len({tuple(row) for row in samples.tokens[rows].tolist()}) > rows.sum() - 2
        first = sample(engine, params, root, tiny.plan([prompt], 4))
        np.testing.assert_array_equal(samples.tokens[rows][:4], first.tokens)


def test_an_empty_slot_costs_no_sample_and_no_sample_comes_of_an_empty_slot(engine, params, root):
    samples = sample(engine, params, root, tiny.plan([2, 4, 5], [1, 1, 1]))
    assert len(samples) == 3 and (samples.length > 0).all()


def test_nothing_compiles_after_the_engine_is_made(engine, params, root):  # promise 2
    sample(engine, params, root, tiny.plan([0], 4))
    metrics.count_compiles()
    before = metrics.compile_count()
    for size, prompts in ((1, [3]), (4, [0, 1, 2]), (9, [6, 2, 4, 5, 1]), (3, list(range(8)))):
        sample(engine, params, root, tiny.plan(prompts, size))
    assert metrics.compile_count() == before


def test_the_context_limits_each_prompt_by_its_own_length(params, root):  # B47
    engine = tiny.engine(how=tiny.sampling(stop_ids=(99,)), slots=(4,), max_context=6)
    samples = sample(engine, params, root, tiny.plan([0, 1, 3], 4))  # prompts of 4, 3, 1 tokens
    assert samples.length.tolist() == [2] * 4 + [3] * 4 + [5] * 4
    assert not samples.stopped.any()


def test_stopped_and_truncated_samples_are_told_apart(engine, params, root):  # B44, B47
    samples = sample(engine, params, root, tiny.plan(range(8), 12))
    for tokens, mask, length, stopped in zip(samples.tokens, samples.loss_mask, samples.length,
                                             samples.stopped):
        found = np.flatnonzero(tokens[:length] == tiny.STOP)
        assert found.tolist() == ([length - 1] if stopped else [])
        assert stopped or length == tiny.NEW
        assert mask.tolist() == [True] * length + [False] * (tiny.NEW - length)
    assert 0 < samples.stopped.sum() < len(samples)


@pytest.mark.parametrize("parts", [(4, 1, 1), (1, 2, 2)])
def test_samples_do_not_depend_on_the_mesh(engine, params, root, parts):  # promise 3
    mesh = tiny.mesh(*parts)
    spread = tiny.engine(on=mesh, slots=(4,))
    plan = tiny.plan([0, 1, 2, 6], 4)
    want = sample(engine, params, root, plan)
    placed = mesh_lib.put(tiny.params(), mesh_lib.param_shardings(mesh, tiny.SPEC))
    got = sample(spread, placed, mesh_lib.put(root, mesh_lib.replicated(mesh)), plan)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
