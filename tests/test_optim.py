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
