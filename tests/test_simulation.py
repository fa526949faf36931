import dataclasses

import numpy as np
import pytest

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import comparison, controller, policies, simulation

COSTS = simulation.Costs()
TABLE = {  # published savings over fixed 3 N in %, for G = 8, 16, 32
    "fixed 2 N": (-4.8, 17.5, 23.0),
    "window, refill of the same size": (1.1, 18.8, 34.9),
    "cost_optimal": (7.0, 21.7, 36.2),
    "cost_optimal, surplus carried": (13.0, 27.1, 40.7),
    "oracle: exact number": (14.2, 28.0, 41.4),
    "oracle: only informative prompts": (23.8, 35.1, 46.0),
}


def savings(samples, *, runs, steps, first, seed=1):
    """Mean saving in % of every policy of the reference table."""
    world = simulation.Reference(samples=samples, steps=steps)
    traces = {}
    for number in range(runs):
        flags = simulation.reference_flags(world, seed=[seed, samples, number])
        for policy in policies.reference(COSTS, samples):
            traces.setdefault(policy.name, []).append(simulation.run(
                policy, simulation.pool_draw(flags, samples), groups=32, steps=steps,
                costs=COSTS)[0])
    return {row.name: row.saving.mean
            for row in comparison.rows(traces, base=policies.BASE, first=first)}


@pytest.mark.slow
@pytest.mark.parametrize("column, samples, least", [(0, 8, 12.5), (1, 16, 26.5), (2, 32, 40.0)])
def test_the_reference_simulation_gives_the_published_table(column, samples, least):
    got = savings(samples, runs=12, steps=400, first=100)
    for name, cells in TABLE.items():
        assert got[name] == pytest.approx(cells[column], abs=1.0), name
    assert got["cost_optimal, surplus carried"] >= least
    assert got["cost_optimal, margin for carried surplus"] >= least


def test_one_run_comes_near_the_published_table():
    # A run's saving deviates by up to about 1 point from the mean of 12.
    got = savings(16, runs=1, steps=400, first=100)
    for name, cells in TABLE.items():
        assert got[name] == pytest.approx(cells[1], abs=3.0), name


def outcome_samples(plan, right):
    """Samples of two per prompt, informative where `right` is true."""
    rows = len(plan.prompt)
    reward = np.stack([right, np.zeros(rows)], 1).astype(np.float32).ravel()
    every = np.ones(2 * rows, np.int32)
    return types.Samples(
        tokens=every[:, None], loss_mask=every[:, None] > 0, logprobs=np.zeros((2 * rows, 1)),
        length=every, stopped=every > 0, reward=reward, shaped=reward, valid=every > 0,
        group=np.repeat(plan.group, 2), prompt=np.repeat(plan.prompt, 2),
        visit=np.repeat(plan.visit, 2), sample=np.tile(np.int32([0, 1]), rows), born=0 * every)


@pytest.mark.parametrize("carry_steps, share, kind", [
    (0, 0.0, "window"), (1, 0.0, "cost_optimal"), (1, 0.25, "cost_optimal"),
    (2, 0.0, "fixed")])
def test_requests_refills_and_carried_groups_are_the_controllers(carry_steps, share, kind):
    groups, steps = 8, 30
    dynamic = config.DynamicSampling(
        predictor=config.Predictor(kind=kind, window=4, multiplier=2.0, round_cost=77.9,
                                   prompt_cost=0.9),
        carry_steps=carry_steps, carry_share=share, max_rounds=100)
    flags = np.random.default_rng(5).random((steps, 400)) < 0.5
    trace, _ = simulation.run(simulation.Policy("it", dynamic), simulation.pool_draw(
        flags, 2), groups=groups, steps=steps, costs=COSTS)
    size = controller.CollectSettings(
        groups=groups, samples_per_prompt=2, filter_enabled=True, filter=config.Filter(),
        dynamic=dataclasses.replace(dynamic, max_prompts=400), seed=0, epochs=0)
    state = controller.init(5000, seed=0, cfg=dynamic)
    carried = types.no_samples(1)
    for step in range(steps):
        asked = 0

        def sample(plan, step=step):
            nonlocal asked
            right = flags[step][asked:asked + len(plan.prompt)]
            asked += len(plan.prompt)
            found = outcome_samples(plan, right)
            return dataclasses.replace(found, born=np.full(len(found), step, np.int32))

        state, carried, _, report = controller.collect(state, carried, step=step, sample=sample,
                                                       size=size)
        for ours, theirs in {"needed": "needed", "predicted": "predicted", "asked": "asked",
                             "informative": "informative", "rounds": "rounds", "kept": "kept",
                             "carried": "carried", "expired": "expired"}.items():
            assert getattr(trace, ours)[step] == getattr(report, theirs), (step, ours)
        assert trace.oracle_ratio[step] == pytest.approx(report.oracle_ratio, nan_ok=True)


def one(flags, **changes):
    policy = simulation.Policy("it", config.DynamicSampling(
        predictor=config.Predictor(kind="fixed", multiplier=1.0), carry_steps=0), **changes)
    return simulation.run(policy, simulation.pool_draw(np.array(flags, bool), 3), groups=2,
                          steps=len(flags), costs=simulation.Costs(10.0, 1.0))[0]


def test_seconds_are_those_of_the_rounds_and_the_samples():
    trace = one([[1, 0, 1, 1, 0, 0]], refill="same")
    assert trace.rounds[0] == 2 and trace.asked[0] == 4 and trace.samples[0] == 12
    assert trace.seconds[0] == 2 * 10 + 12 * 1
    assert trace.oracle_ratio[0] == pytest.approx(4 / 3)
    assert trace.expired[0] == 1


def test_oracles_pay_for_one_round():
    flags = [[0, 1, 0, 0, 1, 1]]
    exact, only = one(flags, oracle="exact"), one(flags, oracle="informative")
    assert exact.asked[0] == 5 and exact.seconds[0] == 10 + 15
    assert only.asked[0] == 2 and only.seconds[0] == 10 + 6


def test_a_step_that_needs_more_than_its_pool_is_marked_and_nothing_is_invented():
    trace = one([[0, 1, 0], [1, 1, 0]])
    assert trace.beyond.tolist() == [True, False]
    assert trace.asked.tolist() == [3, 2] and trace.kept.tolist() == [1, 2]


def test_flags_have_the_chance_of_a_mixed_group_under_the_drift():
    world = simulation.Reference(samples=8, steps=400)
    flags = simulation.reference_flags(world, seed=[3])
    p = np.random.default_rng(4).beta(1.0, 10.2, 100_000)
    for step in (0, 399):
        logit = np.log(p / (1 - p)) + 0.81 * (step + 1) / 400
        rate = 1 / (1 + np.exp(-logit))
        expected = np.mean(1 - rate ** 8 - (1 - rate) ** 8)
        # 20 steps of 640 prompts: the standard error is 0.0044
        near = flags[max(0, step - 19):step + 1] if step else flags[:20]
        assert np.mean(near) == pytest.approx(expected, abs=0.015)


def test_student_interval_of_runs():
    got = comparison.over_runs([1.0, 2.0, 3.0])
    # t(2, 0.975) = 4.302653, standard error 1 / sqrt(3)
    assert (got.mean, got.low, got.high) == pytest.approx(
        (2.0, 2 - 4.302653 / 3 ** 0.5, 2 + 4.302653 / 3 ** 0.5), abs=1e-5)
    assert np.isnan(comparison.over_runs([1.0]).low)


def test_bootstrap_interval_holds_the_mean_and_widens_with_dependence():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    slow = np.repeat(rng.normal(size=25), 16)
    base = np.full(400, 100.0)
    quick, lasting = (comparison.over_steps(50 + values - values.mean(), base)[1]
                      for values in (noise, slow))
    assert quick.mean == pytest.approx(50.0) and quick.low < 50 < quick.high
    assert lasting.high - lasting.low > 2 * (quick.high - quick.low)
    # independent steps: 2 * 1.96 / sqrt(400) = 0.196 %, of which a bootstrap misses little
    assert quick.high - quick.low == pytest.approx(0.196, rel=0.25)


def test_steps_beyond_the_pool_leave_the_means_and_the_pairs():
    full, short = one([[1, 1, 0]] * 8), one([[1, 1, 0]] * 7 + [[0, 1, 0]])
    rows = comparison.rows({"a": [full], "b": [short]}, base="a", first=0)
    assert rows[1].beyond == 1 and rows[1].saving.mean == pytest.approx(0.0)
    assert short.asked[-1] == 3 and rows[1].prompts == 2.0
