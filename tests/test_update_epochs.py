"""Several updates from one batch: recomputed log-probs, the reference model, and the guard."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import config_learner, reductions
from dapo_jax.learner import algorithms, optim, packing, step, train_states, update
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import mesh as mesh_lib

TABLE = tiny.table()
SHAPE = packing.PackShape(slots=4, rows=2, prompt_buckets=(8,), completion_buckets=(tiny.NEW,))
ALGORITHM = dataclasses.replace(
    algorithms.dapo(), old_logprobs="recomputed", kl_coef=0.1, kl_estimator="k3_weighted")
SETTINGS = update.Settings(algorithms.loss_settings(ALGORITHM), 0.7, 16, frozen=("embedding",))
RATES = config_learner.Optimizer(learning_rate=0.01, warmup_updates=0, freeze=("embedding",))
OPTIMIZER = optim.optimizer(RATES, 100)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def samples(params):
    engine = tiny.engine(how=tiny.sampling(stop_ids=tuple(range(2, 64, 8))), slots=(4,))
    plan = tiny.plan([2, 0, 1, 4], [4, 2, 4, 4])
    drawn = engines.run(engine, params, plan, table=TABLE, root=jax.random.key(7), step=1)
    reward = np.random.default_rng(0).integers(0, 3, len(drawn)).astype("f4")
    return dataclasses.replace(drawn, reward=reward, shaped=reward,
                               valid=np.ones(len(drawn), bool))


@pytest.fixture(scope="module")
def programs():
    return update.compile_programs(tiny.SPEC, SETTINGS, OPTIMIZER, tiny.mesh(), pack=SHAPE)


def place(tree):
    return mesh_lib.put(tree, mesh_lib.replicated(tiny.mesh()))


def new_state(params):
    return place(train_states.new_state(jax.tree.map(np.array, params), OPTIMIZER))


def work_of(samples, updates=2):
    return step.prepare(samples, algorithm=ALGORITHM, updates=updates, step=1, table=TABLE,
                        shape=SHAPE, max_length=tiny.NEW)


def learned(programs, params, work, epochs=1, reference=None):
    """The state after all updates and each update's values."""
    state, reference = new_state(params), place(params if reference is None else reference)
    with jax.transfer_guard("disallow"):
        work = step.scored(programs, state.params, work, reference=reference)
        state, metrics = step.learn(programs, state, work, epochs=epochs)
        found = mesh_lib.fetch(metrics)
    return mesh_lib.fetch(state), [reductions.results([one]) for one in found], work


def test_the_first_update_is_on_policy_and_a_second_epoch_is_not(programs, params, samples):  # B38
    state, values, work = learned(programs, params, work_of(samples), epochs=2)
    first, second, third, fourth = values
    for name, want in (("ratio_mean", 1), ("ratio_max", 1), ("clip_low", 0), ("clip_high", 0),
                       ("kl", 0), ("kl_reference", 0), ("importance_mean", 1), ("ess", 1)):
        assert first[f"policy/{name}"] == pytest.approx(want, abs=1e-5), name
    assert first["policy/grad_norm"] > 0.01
    assert all(one["policy/ratio_max"] > 1.005 for one in (second, third, fourth))
    assert all(one["policy/kl_reference"] > 1e-6 for one in (second, third, fourth))
    # Old log-probs of both mini-batches are those before the first update, as the sampler's are.
    assert all(one["policy/importance_mean"] == pytest.approx(1, abs=1e-5) for one in values)
    for one in work:
        for batch in one.batches:
            on = np.array(batch.weights) > 0
            np.testing.assert_allclose(np.array(batch.old)[on], np.array(batch.logprobs)[on],
                                       atol=1e-5)
    assert first["mismatch/max"] < 1e-5 and np.isnan(third["mismatch/mean"])
    assert int(state.updates) == 4


def test_what_the_sampler_was_off_is_weighed_and_not_in_the_ratio(programs, params, samples):
    carried = dataclasses.replace(samples, logprobs=samples.logprobs - np.float32(0.25))
    _, (values,), _ = learned(programs, params, work_of(carried, updates=1))
    assert values["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert values["policy/importance_mean"] == pytest.approx(np.exp(0.25), abs=1e-4)
    _, (plain,), _ = learned(programs, params, work_of(samples, updates=1))
    assert values["policy/grad_norm"] == pytest.approx(
        np.exp(0.25) * plain["policy/grad_norm"], rel=1e-4)


def test_the_reference_is_another_model(programs, params, samples):
    other = jax.tree.map(lambda leaf: leaf * np.float32(1.05), params)
    _, (values,), _ = learned(programs, params, work_of(samples, updates=1), reference=other)
    assert values["policy/kl_reference"] > 1e-5


def test_frozen_parameters_stay_bit_for_bit_and_the_rest_move(programs, params, samples):
    state, _, _ = learned(programs, params, work_of(samples))
    np.testing.assert_array_equal(state.params["embedding"], params["embedding"])
    rest = {name: leaf for name, leaf in state.params.items() if name != "embedding"}
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), rest,
                         {name: params[name] for name in rest})
    assert min(jax.tree.leaves(moved)) > 1e-4
    (one,) = step.scored(programs, place(params), work_of(samples, updates=1)[:1],
                         reference=place(params))
    sums = programs.start(place(params))
    for batch in one.batches:
        sums = programs.accumulate[8, tiny.NEW](sums, place(params), batch)
    assert (np.array(sums[0]["embedding"]) == 0).all()  # so they are in no norm either


@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing(programs, params, samples, junk):
    good, bad = work_of(samples)
    advantages = np.array(bad.batches[0].advantages)
    advantages[tuple(np.argwhere(bad.batches[0].weights > 0)[0])] = junk
    broken = dataclasses.replace(bad, batches=[
        dataclasses.replace(bad.batches[0], advantages=advantages), *bad.batches[1:]])
    alone, _, _ = learned(programs, params, [good])
    state, (first, second), _ = learned(programs, params, [good, broken])
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    assert (first["policy/skipped"], second["policy/skipped"]) == (0, 1)
    assert np.isnan(second["policy/loss"]) and second["policy/ratio_max"] == 0  # nothing counted
    # The next update goes on as if it had not been there, in moments and schedule too.
    after, (_, _, third), _ = learned(programs, params, [good, broken, good])
    twice, _, _ = learned(programs, params, [good, good])
    jax.tree.map(np.testing.assert_array_equal, after, twice)
    assert third["policy/skipped"] == 0


def test_where_nothing_is_compared_batches_stay_on_the_host():
    programs = update.Programs(None, None, None, old={}, reference={}, batch_sharding=None)
    assert update.scored(programs, "parameters", None, ["a batch"]) == ["a batch"]
