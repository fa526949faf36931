import math

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.dynamic_sampling import fit, predictor, simulation

COSTS = simulation.Costs(round=50.0, sample=0.5)


def found(asked, kept, *, groups, cfg=config.Predictor()):
    return fit.series(asked, kept, groups=groups, cfg=cfg, seed=0, costs=COSTS, samples=4)


def test_needed_prompts_have_the_mean_of_a_random_order(monkeypatch):
    monkeypatch.setattr(fit, "ORDERS", 20_000)
    got = found([40, 10], [19, 2], groups=6)
    # the 6th of 19 among 40 in random order: 6 * 41 / 20; standard error 0.03
    assert np.mean(got.needed[0]) == pytest.approx(6 * 41 / 20, abs=0.1)
    # 4 more at the pooled rate 21.5 / 51: 4 / rate beyond the 10; standard error 0.05
    assert np.mean(got.needed[1]) == pytest.approx(10 + 4 * 51 / 21.5, abs=0.2)
    assert np.min(got.needed[0]) >= 6 and np.min(got.needed[1]) >= 14


def test_states_are_those_before_each_step():
    got = found([40, 30, 20], [10, 15, 5], groups=6)
    assert [int(state.count) for state in got.states] == [0, 1, 2]
    assert got.states[2].kept[-2:].tolist() == [10, 15]
    assert got.exact.tolist() == [24.0, 12.0, 24.0]


def test_seconds_of_a_score_are_those_of_its_rounds():
    needed = np.array([[5, 12, 9], [8, 7, 30]])
    state = predictor.init(config.Predictor())
    steps = fit.Series((state, state), needed, np.array([9.0, 15.0]), groups=4)
    cfg = config.Predictor(kind="fixed", multiplier=2.0)
    got = fit.score(steps, slice(None), cfg, costs=COSTS, samples=4)
    seconds = []
    for value in needed.ravel():
        total = 50 + 8 * 4 * 0.5
        if value > 8:
            total += 50 + math.ceil(1.25 * (value - 8)) * 4 * 0.5
        seconds.append(total)
    assert got.seconds == pytest.approx(np.mean(seconds))
    assert got.again == pytest.approx(3 / 6) and got.predicted == 8
    assert got.error == pytest.approx((1 + 7) / 2)


def test_constants_of_least_loss_are_approached_within_their_bounds():
    wanted = {"alpha": 1.7, "gamma": 0.5, "ratio1": 1.0, "ratio2": 0.8, "q": 1.3}
    got = fit.constants(config.Predictor(), lambda cfg: sum(
        (getattr(cfg, name) - value) ** 2 for name, value in wanted.items()), seed=0)
    for name, value in wanted.items():
        low, high = fit.BOUNDS[name]
        assert low <= getattr(got, name) <= high
        assert getattr(got, name) == pytest.approx(value, abs=0.15 * (high - low))
    assert max(got.ratio1, got.ratio2) == 1.0


def test_the_given_constants_are_kept_where_nothing_is_better():
    given = config.Predictor(alpha=0.9, q=1.1)
    assert fit.constants(given, lambda cfg: float(cfg != given), seed=0) == given


def test_a_fit_to_noisy_counts_asks_for_a_margin_as_cost_optimal_does(monkeypatch):
    monkeypatch.setattr(fit, "CANDIDATES", 60)
    monkeypatch.setattr(fit, "NEIGHBOURS", 8)
    rng = np.random.default_rng(1)
    kept = rng.binomial(160, 0.45, size=40)
    got = fit.study(np.full(40, 160), kept, groups=32, samples=8, costs=simulation.Costs(),
                    seed=0, progress=lambda text: None)
    fitted, plain, best = (got.scores[name][0].seconds for name in
                           ("window, fitted", "window, defaults", "cost_optimal"))
    assert fitted < plain - 1 and fitted == pytest.approx(best, rel=0.02)
    assert got.held_out == 30


def test_costs_are_the_least_squares_of_rounds_and_samples():
    rng = np.random.default_rng(0)
    rounds, samples = rng.integers(1, 4, 50).astype(float), rng.integers(100, 900, 50).astype(float)
    seconds = 3.0 * rounds + 0.02 * samples + rng.normal(size=50)
    got = fit.round_costs(seconds, rounds, samples)
    # normal equations of two unknowns, by hand
    a, b, c = rounds @ rounds, rounds @ samples, samples @ samples
    u, v = rounds @ seconds, samples @ seconds
    assert got.round == pytest.approx((c * u - b * v) / (a * c - b * b))
    assert got.sample == pytest.approx((a * v - b * u) / (a * c - b * b))
    rest = seconds - got.round * rounds - got.sample * samples
    spread = np.sum((seconds - seconds.mean()) ** 2)
    assert got.r_squared == pytest.approx(1 - (rest @ rest) / spread)


@pytest.mark.parametrize("rounds, samples", [([1, 1], [10, 20]), ([1, 1, 1], [10, 10, 10]),
                                             ([1, 2, 3], [10, 20, 30])])
def test_steps_that_do_not_tell_costs_apart_are_refused(rounds, samples):
    with pytest.raises(config.ConfigError, match="steps do not tell"):
        fit.round_costs(np.ones(len(rounds)), np.array(rounds, float), np.array(samples, float))
