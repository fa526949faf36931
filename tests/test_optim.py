import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dapo_jax import config, config_learner
from dapo_jax.learner import optim


def rates(horizon, count, **changes):
    schedule = optim.schedule(config_learner.Optimizer(**changes), horizon)
    return [float(schedule(i)) for i in range(count)]


def test_warm_up_is_linear_and_counts_updates():  # B59, counted from 1
    got = rates(100, 7, learning_rate=1.0, warmup_updates=4)
    np.testing.assert_allclose(got, [0.25, 0.5, 0.75, 1, 1, 1, 1], atol=1e-6)


@pytest.mark.parametrize("name", optim.SCHEDULES)
def test_without_warm_up_the_first_update_uses_the_peak(name):
    assert rates(10, 1, learning_rate=2.0, warmup_updates=0, schedule=name) == [2.0]


@pytest.mark.parametrize("name,shape", [
    ("linear", lambda x: 1 - x), ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2)])
@pytest.mark.parametrize("warmup", [0, 4])
def test_decay_ends_at_the_horizon_at_the_end_factor_and_stays(name, shape, warmup):
    got = rates(12, 15, learning_rate=2.0, warmup_updates=warmup, end_factor=0.1, schedule=name)
    want = [2.0 * (0.1 + 0.9 * shape(min(1, (i - warmup) / (12 - warmup))))
            for i in range(warmup, 15)]
    np.testing.assert_allclose(got[warmup:], want, atol=1e-6)
    assert got[12] == got[14] == pytest.approx(0.2)


def test_a_warm_up_that_fills_the_horizon_is_refused():
    for name in ("linear", "cosine"):
        with pytest.raises(config.ConfigError, match=r"warmup_updates is 5, .* in 5 updates"):
            rates(5, 1, warmup_updates=5, schedule=name)
    assert len(rates(5, 3, warmup_updates=5)) == 3


def run(gradients, **changes):
    transform = optim.transform(config_learner.Optimizer(**changes), 100)
    params = {"w": jnp.array([1.0, -2.0])}
    state = transform.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = transform.update({"w": gradient}, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, jnp.asarray(gradient, jnp.float32))
    return np.array(params["w"])


def adamw_by_hand(gradients, *, rate, b1, b2, eps, decay, clip, warmup):
    params, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for i, g in enumerate(gradients):
        g = np.array(g, float)
        norm = np.sqrt((g ** 2).sum())
        g = g * min(1, clip / norm) if clip else g
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g ** 2
        direction = m / (1 - b1 ** (i + 1)) / (np.sqrt(v / (1 - b2 ** (i + 1))) + eps)
        share = min(1, (i + 1) / warmup if warmup else 1)
        params = params - rate * share * (direction + decay * params)
    return params


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("warmup", [0, 2])
def test_update_is_clipped_adamw_with_decoupled_decay(clip, warmup):
    gradients = [(3.0, 4.0), (0.1, -0.2), (0.5, 0.0)]
    got = run(gradients, learning_rate=0.1, warmup_updates=warmup, weight_decay=0.1, b1=0.8,
              b2=0.95, eps=1e-3, clip_norm=clip)
    want = adamw_by_hand(gradients, rate=0.1, b1=0.8, b2=0.95, eps=1e-3, decay=0.1, clip=clip,
                         warmup=warmup)
    np.testing.assert_allclose(got, want, atol=1e-5)  # float32 powers of b2 in the bias correction


def test_a_zero_gradient_changes_nothing_and_stays_finite():
    with jax.debug_nans(True):
        assert (run([(0, 0)], warmup_updates=0) == [1.0, -2.0]).all()


# ------------------------------------------------ parameters by name, narrow moments, Adafactor

PARAMS = {"blocks": {"mlp": {"norm": jnp.ones(3), "up": jnp.full((4, 3), 2.0)}},
          "norm": jnp.ones(3), "embedding": jnp.full((5, 3), -1.0)}


def moved(params=PARAMS, updates=1, **changes):
    """How far each parameter went under a gradient of 0.5, and the state."""
    transform = optim.transform(config_learner.Optimizer(
        learning_rate=0.1, warmup_updates=0, clip_norm=0.0, **changes), 100)
    before, state = params, transform.init(params)
    step = jax.jit(transform.update)
    for _ in range(updates):
        steps, state = step(jax.tree.map(lambda x: jnp.full_like(x, 0.5), params), state, params)
        params = optax.apply_updates(params, steps)
    return jax.tree.map(lambda a, b: np.array(a - b), params, before), state


def test_patterns_name_parameters_by_their_dotted_path():
    found = optim.matches(PARAMS, ("*norm",))
    assert found == {"blocks": {"mlp": {"norm": True, "up": False}}, "norm": True,
                     "embedding": False}
    assert jax.tree.leaves(optim.matches(PARAMS, ("blocks.*",))) == [True, True, False, False]
    assert not any(jax.tree.leaves(optim.matches(PARAMS, ())))
    optim.check_patterns(PARAMS, ("*norm", "blocks.mlp.u?"), where="rl.optimizer.freeze")
    with pytest.raises(config.ConfigError, match=r"config.rl.optimizer.freeze holds 'mlp.\*'.*"
                       "blocks.mlp.norm, blocks.mlp.up, embedding, norm"):
        optim.check_patterns(PARAMS, ("*norm", "mlp.*"), where="rl.optimizer.freeze")


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_decay_leaves_out_what_a_pattern_names(name):
    without, _ = moved(name=name)
    with_decay, _ = moved(name=name, weight_decay=0.1, no_decay=("*norm",))
    more = jax.tree.map(lambda a, b: a - b, with_decay, without)
    for path, value in (("embedding", -1.0), ("norm", 0.0)):
        np.testing.assert_allclose(more[path], -0.1 * 0.1 * value, atol=1e-6)
    np.testing.assert_allclose(more["blocks"]["mlp"]["up"], -0.1 * 0.1 * 2.0, atol=1e-6)
    np.testing.assert_allclose(more["blocks"]["mlp"]["norm"], 0, atol=1e-7)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_what_is_frozen_stays_and_has_no_moments(name):
    steps, state = moved(name=name, freeze=("embedding", "blocks.mlp.*"), weight_decay=0.1)
    assert (steps["embedding"] == 0).all() and (steps["blocks"]["mlp"]["up"] == 0).all()
    assert (steps["norm"] != 0).all()
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert (5, 3) not in shapes and (4, 3) not in shapes and (3,) in shapes


def test_frozen_gradients_are_not_in_the_norm_that_clips():
    transform = optim.transform(config_learner.Optimizer(
        learning_rate=1.0, warmup_updates=0, clip_norm=1.0, eps=1.0, freeze=("a",)), 10)
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    steps, _ = transform.update({"a": jnp.array([1e6]), "b": jnp.array([0.9])},
                                transform.init(params), params)
    np.testing.assert_allclose(steps["b"], -0.9 / 1.9, rtol=1e-5)


def test_narrow_moments_follow_the_wide_ones_where_rounding_to_the_nearest_would_not():
    """After large gradients, 400 updates of small ones at b2 = 0.999: each changes the second
    moment by less than bfloat16 holds."""
    def second_moment(dtype):
        transform = optim.transform(config_learner.Optimizer(
            learning_rate=0.0001, warmup_updates=0, b2=0.999, clip_norm=0.0, moment_dtype=dtype),
            1000)
        params = {"w": jnp.zeros(4096)}

        def step(state, size):
            _, state = transform.update({"w": jnp.full(4096, size)}, state, params)
            return state, ()
        sizes = jnp.array([10.0] * 20 + [0.1] * 400)
        state, _ = jax.jit(lambda s: jax.lax.scan(step, s, sizes))(transform.init(params))
        leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4096,)]
        assert len(leaves) == 2 and all(leaf.dtype == dtype for leaf in leaves)
        return np.array(leaves[1], np.float32)

    wide, narrow = second_moment("float32"), second_moment("bfloat16")
    assert narrow.mean() == pytest.approx(wide.mean(), rel=0.005)
    np.testing.assert_allclose(narrow, wide, rtol=0.2)
    assert wide[0] < 0.7 * (1 - 0.999 ** 20) * 100  # which is where it would have stood still


def test_rounding_at_random_is_right_on_the_mean_and_keeps_what_is_no_number():
    key = jax.random.key(0)
    exact = jnp.array([1.0, -0.5, 0.0, jnp.inf, -jnp.inf, 3.0e38])
    np.testing.assert_array_equal(optim._rounded(exact[:5], key).astype("f4"), exact[:5])
    assert np.isnan(np.array(optim._rounded(jnp.array([jnp.nan]), key), "f4")).all()
    between = jnp.full(20000, 1 + 2.0 ** -9)  # a quarter of the way to the next number
    rounded = np.array(optim._rounded(between, key), "f4")
    assert set(rounded.tolist()) == {1.0, 1 + 2.0 ** -7}
    assert rounded.mean() == pytest.approx(1 + 2.0 ** -9, abs=1e-4)


def test_adafactor_is_optax_s_with_absolute_rates():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(130, 140)), jnp.float32)}
    grads = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(130, 140)), jnp.float32)}
    theirs = optax.adafactor(0.1, multiply_by_parameter_scale=False, weight_decay_rate=None)
    ours = optim.transform(config_learner.Optimizer(
        name="adafactor", learning_rate=0.1, warmup_updates=0, clip_norm=0.0), 10)
    state = ours.init(params)
    np.testing.assert_allclose(ours.update(grads, state, params)[0]["w"],
                               theirs.update(grads, theirs.init(params), params)[0]["w"],
                               rtol=1e-6)
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == 140
