import numpy as np
import pytest

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import controller, gather, persistent, simulation

WORLD = persistent.World(groups=6, samples=4, prompts=80, epochs=4, b=3.0)
COSTS = simulation.Costs()


def rows_of(plan, right):
    """Samples with the answers `right`, bool[groups, samples]."""
    size = right.shape[1]
    count = right.size
    reward = right.astype(np.float32).ravel()
    every = np.ones(count, np.int32)
    return types.Samples(
        tokens=every[:, None], loss_mask=every[:, None] > 0, logprobs=np.zeros((count, 1)),
        length=every, stopped=every > 0, reward=reward, shaped=reward, valid=every > 0,
        group=np.repeat(plan.group, size), prompt=np.repeat(plan.prompt, size),
        visit=np.repeat(plan.visit, size), sample=np.tile(np.arange(size, dtype=np.int32),
                                                          len(plan.group)), born=0 * every)


@pytest.mark.parametrize("kind", ["epochs", "skip", "difficulty"])
def test_choice_history_and_carry_are_the_controllers(kind):
    steps, cfg = 12, config.DynamicSampling(
        predictor=config.Predictor(kind="window", window=3, multiplier=2.0), max_rounds=100,
        choice=config.Choice(kind=kind, longest_gap=6), carry_steps=1, carry_share=0.5)
    right = persistent.answers(WORLD, seed=[1])
    trace, table = simulation.run(
        simulation.Policy("it", cfg), persistent.draw(right, cfg, seed=9), groups=6, steps=steps,
        costs=COSTS, state=persistent.start(WORLD, seed=9))
    state, carried = controller.init(80, seed=9, cfg=cfg), types.no_samples(1)
    size = gather.CollectSettings(
        groups=6, samples_per_prompt=4, filter_enabled=True, filter=config.Filter(), dynamic=cfg,
        seed=9, epochs=0)
    for step in range(steps):
        def sample(plan, step=step):
            found = rows_of(plan, right[step, plan.prompt])
            return types.Samples(**{**vars(found), "born": found.born + step})

        state, carried, _, report = controller.collect(state, carried, step=step, sample=sample,
                                                       size=size)
        for name in ("needed", "predicted", "asked", "informative", "rounds", "kept", "carried",
                     "expired", "samples"):
            assert getattr(trace, name)[step] == getattr(report, name), (step, name)
    for name in ("visits", "successes", "trials", "streak"):
        np.testing.assert_array_equal(getattr(table.history, name), getattr(state.history, name))


def test_answers_follow_the_pass_rates_of_their_prompts():
    world = persistent.World(groups=50, samples=64, prompts=300, epochs=3, spread=0.0, wander=0.0,
                             a=2.0, b=2.0, rise=0.0)
    right = persistent.answers(world, seed=[2])
    assert right.shape == (18, 300, 64)
    per_prompt = right.mean(axis=(0, 2))
    # Beta(2, 2) has mean 1/2 and variance 1/20; 1152 answers add at most 0.25 / 1152
    assert per_prompt.mean() == pytest.approx(0.5, abs=0.04)
    assert per_prompt.var() == pytest.approx(0.05, abs=0.01)
    # the same prompt keeps its rate: halves of the run agree but for the noise of 576 answers
    halves = right[:9].mean(axis=(0, 2)) - right[9:].mean(axis=(0, 2))
    assert np.std(halves) < 0.035


def test_rates_rise_as_the_reference_does():
    world = persistent.World(groups=10, samples=16, prompts=500, epochs=8)
    right = persistent.answers(world, seed=[3])  # 400 steps
    start = np.random.default_rng(0).beta(1.0, 10.2, 200_000)
    end = start * np.exp(0.81) / (start * np.exp(0.81) + 1 - start)
    assert right[:20].mean() == pytest.approx(start.mean(), abs=0.012)  # 500 prompts: +-0.004
    assert right[380:].mean() == pytest.approx(end.mean(), abs=0.03)  # and their own rises


def test_screening_drops_groups_without_a_difference_after_its_stage():
    cfg = config.DynamicSampling(budget=config.Budget(kind="screening", first=2))
    right = np.array([[[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]], bool)
    world = persistent.World(prompts=3, samples=4)
    table, outcome = persistent.draw(right, cfg, seed=0)(persistent.start(world, seed=0), 0, 0, 3)
    assert outcome.samples == 2 + 4 + 2 and outcome.rounds == 2
    assert np.sum(outcome.informative) == 1 and table.informative.tolist() == [0, 1, 0]
    assert table.history.trials.tolist() == [2, 4, 2]


def test_updates_are_those_within_the_epochs():
    table = persistent.World(prompts=10, epochs=2)
    trace = simulation.Trace(*[np.array([8, 8, 4, 1])] * len(simulation.Trace.__dataclass_fields__))
    assert persistent.updates(trace, table) == 3


def test_coverage_counts_how_evenly_prompts_are_used():
    table = persistent.start(persistent.World(prompts=4), seed=0)
    visits = np.array([1, 2, 3, 6])
    table = persistent.Table(table.order, table.history.__class__(
        visits, *(getattr(table.history, name) for name in ("successes", "trials", "streak",
                                                            "last"))),
        table.used, informative=np.array([0, 0, 5, 5]))
    got = persistent.coverage(table)
    assert got == {"epochs": 3.0, "<= 2 visits, %": 50.0, "most visits": 6.0,
                   "effective prompts, %": 50.0}
