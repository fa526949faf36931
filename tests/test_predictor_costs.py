"""The cost-optimal predictor, and what holds for every kind of predictor, in jit too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_predictor import COSTS, after, observations

from dapo_jax import config
from dapo_jax.dynamic_sampling import predictor


def above(z: float) -> float:
    """P(Z > z) of a standard normal variable."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_costs_say_how_much_more_than_the_need_is_asked_for():
    state = after([(100, 20), (60, 19)], COSTS)  # A = 39.5 / 161
    rate = 39.5 / 161
    spread = math.sqrt(32 * (1 - rate)) / rate
    z = math.sqrt(2 * math.log(77.9 / (math.sqrt(2 * math.pi) * 0.45 * spread)))
    assert predictor.predict(state, 32, COSTS) == math.ceil(32 / rate + z * spread) == 162
    assert float(predictor.acceptance(state)) == rate
    # 8 groups absorbed, in spreads of the number of groups: a phi(z) = c s P(Z > room - z).
    room = 8 / math.sqrt(32 * (1 - rate))
    z = next(z for z in np.arange(z, 9, 1e-4) if 77.9 * math.exp(-z * z / 2) / math.sqrt(
        2 * math.pi) < 0.45 * spread * above(room - z))
    assert predictor.predict(state, 32, COSTS, absorbed=8) == math.ceil(32 / rate + z * spread)
    dear = predictor.calibrated(state, round_cost=77.9, prompt_cost=9.0)
    assert predictor.predict(dear, 32, COSTS) == math.ceil(32 / rate) == 131  # z = 0


def test_before_an_observation_or_without_costs_the_multiplier_is_asked_for():
    free = config.Predictor(kind="cost_optimal", multiplier=2.5)
    assert predictor.predict(predictor.init(COSTS), 32, COSTS) == 96
    assert predictor.predict(after([(64, 32)], free), 32, free) == 80
    state = predictor.calibrated(after([(64, 32)], free), round_cost=100.0, prompt_cost=1.0)
    assert 64 < predictor.predict(state, 32, free) < 100


@pytest.mark.parametrize("costs", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_impossible_costs_are_refused(costs):
    with pytest.raises(ValueError, match="predictor.calibrated"):
        predictor.calibrated(predictor.init(COSTS), round_cost=costs[0], prompt_cost=costs[1])


@pytest.mark.parametrize("spread,ratio,room", [(20, 173, 0), (54, 60, 0), (54, 173, 0.0),
                                               (20, 173, 1.5), (54, 60, 1.0), (54, 173, 6.0)])
def test_the_margin_has_the_least_expected_cost(spread, ratio, room):
    # Cost in prompts of a margin of z spreads, summed in steps of 0.001: a further round, if it is
    # needed, and the prompts whose groups expire.
    grid = np.arange(0, 8, 0.001)
    expires = np.array([above(room - z) if room else 1.0 for z in grid])
    cost = ratio * np.array([above(z) for z in grid]) + spread * np.cumsum(expires) * 0.001
    got = float(predictor.margin(spread, ratio, room=room))
    # With no room a short margin may have two flat points; the formula's is the lower minimum.
    assert got == pytest.approx(grid[np.argmin(cost)], abs=2e-3)


@given(spread=st.floats(0.1, 1e4), ratio=st.floats(1e-3, 1e5), room=st.floats(0, 30))
def test_more_room_for_surplus_asks_for_no_less(spread, ratio, room):
    z = [float(predictor.margin(spread, ratio, room=r)) for r in (0.0, room, room + 1)]
    assert 0 <= z[0] <= z[1] + 1e-6 <= z[2] + 2e-6 < 60


any_kind = st.builds(
    config.Predictor, kind=st.sampled_from(sorted(predictor.WANTED)), window=st.integers(1, 6),
    multiplier=st.floats(0.5, 20), eager=st.booleans(), max_multiplier=st.floats(1, 50),
    round_cost=st.floats(0, 1e6), prompt_cost=st.floats(0, 1e3))


@settings(deadline=None)
@given(history=st.lists(observations, max_size=8), target=st.integers(1, 600), cfg=any_kind,
       absorbed=st.integers(0, 600))
def test_whatever_was_seen_the_answer_is_between_need_and_bound(history, target, cfg, absorbed):
    got = predictor.predict(after(history, cfg), target, cfg, absorbed=absorbed)
    assert target <= got <= predictor.bound(target, cfg) <= cfg.max_multiplier * target + 1


@given(history=st.lists(observations, min_size=1, max_size=8), target=st.integers(1, 300),
       factor=st.integers(2, 6))
def test_a_larger_target_needs_a_smaller_margin_per_group(history, target, factor):
    # The need is homogeneous, the spread grows with the root: margins of k^2 targets are those of
    # one, k times, where the further round costs k times as much.
    cfg = config.Predictor(kind="cost_optimal", max_multiplier=1e6)
    one, many = (predictor.calibrated(after(history, cfg), round_cost=173.0 * scale,
                                      prompt_cost=1.0) for scale in (1, factor))
    need = target / float(predictor.acceptance(one))
    margin = predictor.predict(one, target, cfg) - need
    scaled = predictor.predict(many, factor ** 2 * target, cfg) - factor ** 2 * need
    assert scaled == pytest.approx(factor * margin, abs=factor + 1)
    assert predictor.predict(one, factor * target, cfg) <= factor * predictor.predict(
        one, target, cfg)


@pytest.mark.parametrize("rate,ratio", [(0.3, 600), (0.3, 120), (0.6, 400), (0.15, 2000)])
def test_further_rounds_are_as_frequent_as_aimed_for(rate, ratio):
    cfg = config.Predictor(kind="cost_optimal", round_cost=ratio, prompt_cost=1.0,
                           max_multiplier=100)
    rng, need, further, aimed = np.random.default_rng(0), 32, 0, 0.0
    state, steps = predictor.init(cfg), 1500
    for step in range(-8, steps):
        asked = predictor.predict(state, need, cfg)
        kept = int(rng.binomial(asked, rate))
        if step >= 0:
            pooled = float(predictor.acceptance(state))
            spread = math.sqrt(need * (1 - pooled)) / pooled
            aimed += above(float(predictor.margin(spread, ratio))) / steps
            further += kept < need
        while kept < need:
            more = predictor.refill(need - kept, asked, kept, factor=1.25)
            asked, kept = asked + more, kept + int(rng.binomial(more, rate))
        state = predictor.update(state, asked, kept, cfg=cfg)
    assert abs(further / steps - aimed) < 0.03
    assert 0.005 < aimed < 0.3


@pytest.mark.parametrize("kind", sorted(predictor.WANTED))
def test_inside_jit_the_state_and_the_answers_are_those_of_the_host(kind):
    cfg = config.Predictor(kind=kind, window=4, round_cost=77.9, prompt_cost=0.45)
    ask = jax.jit(lambda state, target, absorbed: predictor.request(
        state, target, cfg, absorbed=absorbed, xp=jnp))
    put = jax.jit(functools.partial(predictor.append, xp=jnp))
    rng = np.random.default_rng(1)
    for wide in (True, False):
        with jax.enable_x64(wide):
            host = device = predictor.init(cfg)
            for _ in range(12):
                target, absorbed = int(rng.integers(0, 200)), int(rng.integers(0, 60))
                here = predictor.predict(host, target, cfg, absorbed=absorbed)
                there = int(ask(device, target, float(absorbed)))
                assert here == there if wide else abs(here - there) <= 1
                asked = int(rng.integers(1, 500))
                kept = int(rng.integers(0, asked + 1))
                host = predictor.update(host, asked, kept, cfg=cfg)
                device = put(device, asked, kept)
            assert str(vars(host)) == str({k: np.asarray(v) for k, v in vars(device).items()})


def test_a_state_saved_and_restored_predicts_the_same():
    state = after([(100, 20), (60, 19)], COSTS)
    leaves, shape = jax.tree.flatten(state)
    stored = [np.frombuffer(leaf.tobytes(), leaf.dtype).reshape(leaf.shape) for leaf in leaves]
    restored = jax.tree.unflatten(shape, stored)
    assert {leaf.dtype.name for leaf in leaves} == {"int32", "float32"}
    assert predictor.predict(restored, 32, COSTS) == predictor.predict(state, 32, COSTS)
    assert str(predictor.update(restored, 9, 3, cfg=COSTS)) == str(
        predictor.update(state, 9, 3, cfg=COSTS))
