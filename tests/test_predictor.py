import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.dynamic_sampling import predictor

WINDOW = config.Predictor()
COSTS = config.Predictor(kind="cost_optimal", round_cost=77.9, prompt_cost=0.45)


def oracle(history: list[tuple[int, int]], target: int, cfg: config.Predictor) -> float:
    """The published formula as loops over the counts x_t, before bounds and rounding."""
    counts = []
    for asked, kept in history[-cfg.window:]:
        if kept:
            counts.append(target * asked / kept)
        else:
            counts.append(target * min((asked + 1) / 0.5, cfg.max_multiplier))
    if cfg.kind == "fixed" or not counts or (len(counts) < cfg.window and not cfg.eager):
        return cfg.multiplier * target
    mean = sum(counts) / len(counts)
    std = math.sqrt(sum((x - mean) ** 2 for x in counts) / len(counts))
    x1 = (mean + cfg.alpha * std) * cfg.ratio1
    above = below = 0.0
    for i, x in enumerate(reversed(counts)):
        above += cfg.gamma ** i * x
        below += cfg.gamma ** i
    x2 = above / below * cfg.ratio2
    return max(x1, x2) * cfg.q


def after(history: list[tuple[int, int]], cfg: config.Predictor):
    state = predictor.init(cfg)
    for asked, kept in history:
        state = predictor.update(state, asked, kept, cfg=cfg)
    return state


observations = st.integers(1, 2000).flatmap(
    lambda asked: st.tuples(st.just(asked), st.integers(0, asked)))
configurations = st.builds(
    config.Predictor, kind=st.sampled_from(["fixed", "window"]), window=st.integers(1, 8),
    multiplier=st.floats(0.5, 20), eager=st.booleans(), alpha=st.floats(0, 3),
    gamma=st.floats(0.05, 1), ratio1=st.floats(0.5, 2), ratio2=st.floats(0.5, 2),
    q=st.floats(0.5, 2), max_multiplier=st.floats(1, 50))


@given(history=st.lists(observations, max_size=12), target=st.integers(1, 600), cfg=configurations)
def test_the_answer_is_the_published_formula_within_its_bounds(history, target, cfg):
    got = predictor.predict(after(history, cfg), target, cfg)
    exact = oracle(history, target, cfg)
    low, high = (max(target, min(math.ceil(exact * (1 + shift)),
                                 math.ceil(cfg.max_multiplier * target * (1 + shift))))
                 for shift in (-1e-8, 1e-8))
    assert low <= got <= high
    assert target <= got <= math.ceil(cfg.max_multiplier * target)


@given(history=st.lists(observations, max_size=12), target=st.integers(1, 300),
       factor=st.integers(2, 6), cfg=configurations)
def test_the_answer_is_homogeneous_in_the_target(history, target, factor, cfg):
    state = after(history, cfg)
    one, many = (predictor.predict(state, t, cfg) for t in (target, factor * target))
    assert factor * (one - 1) < many <= factor * one


@pytest.mark.parametrize("history", [
    [], [(96, 96)] * 8, [(96, 0)] * 8, [(96, 32)], [(96, 32)] * 7 + [(640, 1)],
    [(1, 0)] * 8, [(10, 10)] * 4 + [(10, 0)] * 4], ids=str)
def test_every_kind_of_history_gives_a_finite_answer_between_need_and_bound(history):
    for cfg in (WINDOW, config.Predictor(eager=True), config.Predictor(kind="fixed"), COSTS):
        for absorbed in (0, 8, 64):
            got = predictor.predict(after(history, cfg), 32, cfg, absorbed=absorbed)
            assert 32 <= got <= 320


def test_preset_until_the_window_is_full_and_the_entries_there_are_when_eager():
    seven = [(64, 32)] * 7
    assert predictor.predict(after(seven, WINDOW), 32, WINDOW) == 96
    assert predictor.predict(after(seven + [(64, 32)], WINDOW), 32, WINDOW) == 68  # 2 * 32 * 1.05
    eager = config.Predictor(eager=True)
    assert predictor.predict(after([], eager), 32, eager) == 96
    assert predictor.predict(after([(64, 32)], eager), 32, eager) == 68


def test_std_is_the_population_one_and_the_newest_step_weighs_most():
    cfg = config.Predictor(window=2, q=1.0)
    # Ratios 2 and 4: mean 3, std 1. Decayed: (4 + 0.8 * 2) / 1.8 = 3.11.
    assert predictor.predict(after([(20, 10), (40, 10)], cfg), 100, cfg) == 400
    recent = config.Predictor(window=2, q=1.0, alpha=0.0)
    assert predictor.predict(after([(20, 10), (40, 10)], recent), 100, recent) == 312
    assert predictor.predict(after([(40, 10), (20, 10)], recent), 100, recent) == 300


def test_a_constant_rate_does_not_make_the_answer_grow():
    cfg = config.Predictor(eager=True)
    state, answers = predictor.init(cfg), []
    for _ in range(40):
        asked = predictor.predict(state, 32, cfg)
        state = predictor.update(state, asked, asked // 2, cfg=cfg)
        answers.append(asked)
    assert max(answers[1:]) <= 70


def test_a_step_that_kept_nothing_is_remembered():
    cfg = config.Predictor(window=2, eager=True, alpha=0.0, gamma=1.0, q=1.0)
    state = after([(1, 0)], cfg)
    assert (state.asked.tolist(), state.kept.tolist(), int(state.count)) == ([0, 1], [0, 0], 1)
    assert predictor.predict(state, 10, cfg) == 40  # (1 + 1) / (0 + 0.5)
    assert predictor.predict(after([(1, 0), (20, 10)], cfg), 10, cfg) == 30
    assert predictor.predict(after([(96, 0)], cfg), 10, cfg) == 100  # capped at 10


def test_the_window_holds_the_newest_steps_oldest_first_and_update_is_pure():
    cfg = config.Predictor(window=3)
    state = after([(9, 1), (9, 2)], cfg)
    for array in (state.asked, state.kept, state.count):
        array.setflags(write=False)
    later = predictor.update(predictor.update(state, 9, 3, cfg=cfg), 9, 4, cfg=cfg)
    assert later.kept.tolist() == [2, 3, 4] and int(later.count) == 3
    assert state.kept.tolist() == [0, 1, 2] and state.kept.dtype == np.int32


@pytest.mark.parametrize("asked,kept", [(0, 0), (4, 5), (4, -1)])
def test_impossible_observations_are_refused(asked, kept):
    with pytest.raises(ValueError, match="predictor.update"):
        predictor.update(predictor.init(WINDOW), asked, kept, cfg=WINDOW)


def test_nothing_needed_asks_for_nothing():
    assert predictor.predict(after([(9, 3)] * 8, WINDOW), 0, WINDOW) == 0
    assert predictor.predict(predictor.init(WINDOW), -3, WINDOW) == 0
    assert predictor.refill(0, 96, 20, factor=1.25) == 0


@given(deficit=st.integers(0, 600), seen=observations, factor=st.floats(1, 3))
def test_a_refill_asks_for_the_deficit_only(deficit, seen, factor):
    asked, kept = seen
    exact = factor * deficit * (asked + 1) / (kept + 0.5)
    got = predictor.refill(deficit, asked, kept, factor=factor)
    assert math.ceil(exact * (1 - 1e-8)) <= got <= math.ceil(exact * (1 + 1e-8))
    assert got >= deficit


def test_refill_by_hand():
    assert predictor.refill(12, 96, 20, factor=1.25) == 71  # 15 * 97 / 20.5 = 70.98


@pytest.mark.parametrize("count,expected", [
    (0, 0), (1, 8), (8, 8), (9, 16), (33, 64), (64, 64), (65, 72), (70, 72), (100, 128),
    (130, 136)])
def test_requests_are_whole_rungs(count, expected):
    assert predictor.round_up(count, (8, 16, 32, 64)) == expected


def test_rounding_errors_do_not_ask_for_one_more():
    assert 2.2 * 25 > 55
    assert predictor.predict(predictor.init(WINDOW), 25, config.Predictor(multiplier=2.2)) == 55


def test_no_ladder_leaves_a_request_as_it_is():
    assert predictor.round_up(13, ()) == 13


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
