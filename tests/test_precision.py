"""Parameters in bfloat16: everything that adds small parts up stays float32."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import test_optim
import tiny

from dapo_jax import config_learner, types
from dapo_jax.learner import algorithms, optim, packing, train_states, update
from dapo_jax.runtime import mesh as mesh_lib

HALF = ml_dtypes.bfloat16
SPEC = dataclasses.replace(tiny.SPEC, param_dtype="bfloat16")
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 16)
RATES = config_learner.Optimizer(learning_rate=0.04, warmup_updates=0)
OPTIMIZER = optim.optimizer(RATES, 100)


@pytest.fixture(scope="module")
def programs():
    return update.compile_programs(SPEC, SETTINGS, OPTIMIZER, tiny.mesh(),
                                   pack=packing.PackShape(2, 2, (4,), (3,)))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ones = np.ones((2, 2, 3), np.float32)
    return types.TrainBatch(
        prompt_tokens=rng.integers(0, 64, (2, 4), np.int32), prompt_length=np.full(2, 4, np.int32),
        tokens=rng.integers(0, 64, (2, 2, 3), np.int32), logprobs=-4 * ones,
        advantages=rng.normal(size=(2, 2, 3)).astype(np.float32), weights=ones / 12, fresh=ones)


def place(tree):
    return mesh_lib.put(tree, mesh_lib.replicated(tiny.mesh()))


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def test_all_parameters_are_made_in_the_type_of_the_spec():
    assert dtypes(tiny.params(SPEC)) == {"bfloat16"}
    assert dtypes(tiny.params()) == {"float32"}


def test_half_parameters_compute_as_the_same_numbers_in_single():
    half, tokens = tiny.params(SPEC), np.arange(12, dtype=np.int32)[None]
    single = jax.tree.map(lambda leaf: leaf.astype(np.float32), half)
    np.testing.assert_array_equal(tiny.full_logits(SPEC, half, tokens),
                                  tiny.full_logits(tiny.SPEC, single, tokens))


def test_many_equal_microbatches_sum_to_as_many_times_one(programs, batch):
    """A bfloat16 sum stops growing at 256 times its parts."""
    params, placed = place(tiny.params(SPEC)), mesh_lib.put(batch, programs.batch_sharding)
    found = []
    for count in (1, 600):
        sums = programs.start(params)
        for _ in range(count):
            sums = programs.accumulate[4, 3](sums, params, placed)
        found.append(mesh_lib.fetch(sums[0]))
    assert dtypes(found[0]) == {"float32"}
    for one, many in zip(*map(jax.tree.leaves, found)):
        np.testing.assert_allclose(many, 600 * one, rtol=1e-4, atol=1e-7)


def test_moments_are_single_and_parameters_stay_half(programs, batch):
    state = place(train_states.new_state(tiny.params(SPEC), OPTIMIZER))
    before = mesh_lib.fetch(state.params)
    after = mesh_lib.fetch(update.update(programs, state, [batch])[0])
    assert dtypes(after.params) == {"bfloat16"}
    assert dtypes(after.opt_state) == {"float32", "int32"}
    for old, new in zip(*map(jax.tree.leaves, (before, after.params))):
        assert (old != new).any()


def test_a_step_is_the_single_precision_step_rounded_once():
    transform = optim.transform(config_learner.Optimizer(
        learning_rate=0.1, warmup_updates=0, weight_decay=0.1, b1=0.8, b2=0.95, eps=1e-3,
        clip_norm=1.0), 100)
    params = {"w": jnp.array([1.0, -2.0], HALF)}
    gradients = [(3.0, 4.0)]
    state = transform.init(params)
    steps, _ = transform.update({"w": jnp.array(gradients[0])}, state, params)
    want = test_optim.adamw_by_hand(gradients, rate=0.1, b1=0.8, b2=0.95, eps=1e-3, decay=0.1,
                                    clip=1.0, warmup=0)
    got = optax.apply_updates(params, steps)["w"]
    np.testing.assert_array_equal(np.asarray(got), want.astype(HALF))


def test_a_step_below_half_a_unit_is_lost_in_half_and_kept_in_single():
    """What the help text of config.model.param_dtype warns of."""
    transform = optim.transform(config_learner.Optimizer(learning_rate=1e-4, warmup_updates=0), 100)
    for dtype, moved in ((HALF, False), (np.float32, True)):
        params = {"w": jnp.ones(1, dtype)}
        steps, _ = transform.update({"w": jnp.ones(1)}, transform.init(params), params)
        assert bool((optax.apply_updates(params, steps)["w"] != 1).any()) == moved
