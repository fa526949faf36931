"""Budgets in stages, history and choice, as the controller joins them in rounds."""

import copy
import dataclasses

import numpy as np
import pytest
import reference
from stand_in import BROKEN, MIXED, RIGHT, WRONG, Coins, Engine, ids, requests, run, setup, start

from dapo_jax import config
from dapo_jax.dynamic_sampling import budget, controller, gather, history, predictor
from dapo_jax.learner import advantages

SCREENING = config.Budget(kind="screening", first=2)


def test_a_stage_continues_the_same_groups_under_further_sample_numbers():
    engine = Engine([WRONG, MIXED, RIGHT, MIXED])
    size = setup(groups=2, samples=6, multiplier=2.0, budget=SCREENING)
    batch, _, report, state = next(run(engine, size, steps=1))
    first, second = engine.plans
    assert requests(first) == [(group, 0, 2) for group in range(4)]
    assert requests(second) == [(1, 2, 4), (3, 2, 4)]
    assert second.visit.tolist() == [0, 0]
    assert second.prompt.tolist() == first.prompt[[1, 3]].tolist()
    assert batch.group.tolist() == [1] * 6 + [3] * 6
    assert batch.sample.tolist() == list(range(6)) * 2
    assert (report.asked, report.all_zero, report.all_one, report.kept) == (4, 1, 1, 2)
    assert (report.rounds, report.samples, report.tokens) == (2, 16, 32)
    assert (int(state.predictor.asked[-1]), int(state.predictor.kept[-1])) == (4, 2)


def test_stages_and_new_prompts_share_a_round():
    engine = Engine(lambda group: MIXED if group in (1, 8, 9, 10) else WRONG)
    size = setup(groups=4, samples=6, multiplier=2.0, budget=SCREENING, max_rounds=9)
    batch, *_ = next(run(engine, size, steps=1))
    assert requests(engine.plans[1])[0] == (1, 2, 4)
    assert requests(engine.plans[1])[1] == (8, 0, 2)
    assert ids(batch) == [1, 8, 9, 10]


def test_groups_that_finish_late_keep_their_place():
    class LateFirst(Engine):  # group 0 differs only from its third sample on
        def group(self, plan, i):
            for row in super().group(plan, i):
                late = plan.group[i] == 0 and row["sample"] in (0, 2)
                yield row | ({"reward": float(row["sample"] == 2)} if late else {})

    size = setup(groups=2, samples=4, multiplier=1.5,
                 budget=config.Budget(kind="screening", first=2, stages=2))
    batch, held, *_ = next(run(LateFirst(lambda group: MIXED), size, steps=1))
    assert ids(batch) == [0, 1] and ids(held) == [2]


def test_a_group_in_the_middle_of_its_stages_counts_for_what_it_may_become():
    # Three groups of two unequal rewards are sure; the fourth, all wrong so far, is hoped for.
    engine = Engine(lambda group: WRONG if group == 3 else MIXED)
    size = setup(groups=4, samples=8, multiplier=1.0,
                 budget=config.Budget(kind="screening", first=2, stages=3))
    next(run(engine, size, steps=1))
    # After two wrong ones of rate 1/2: (0 + 1) / (2 + 2); two more are all wrong with (3/4)^2, so
    # 1 - 9/16 of the deficit of one is hoped for; ceil(1.25 * 9/16 * 5 / (3.4375 + 0.5)) = 1.
    assert [len(plan.group) for plan in engine.plans[:2]] == [4, 5]
    assert requests(engine.plans[1]) == [(0, 2, 6), (1, 2, 6), (2, 2, 6), (3, 2, 2), (4, 0, 2)]


def test_at_the_round_limit_stages_end_with_the_samples_there_are():
    engine = Engine([MIXED, WRONG, MIXED])
    size = setup(groups=2, samples=6, multiplier=1.5, budget=SCREENING, max_rounds=1)
    batch, _, report, _ = next(run(engine, size, steps=1))
    assert batch.sample.tolist() == [0, 1, 0, 1] and report.limit == "" and report.in_flight == 0
    assert (report.kept, report.all_zero) == (2, 1)


def test_prompts_whose_pass_rate_is_extreme_get_more_at_their_next_visit():
    engine = Coins(np.array([0.5, 0.02, 0.98, 0.5]))
    size = setup(groups=4, samples=8, enabled=False, multiplier=1.0,
                 budget=config.Budget(kind="hard_more", least=4, most=24))
    reports = list(run(engine, size, steps=6, table=4))
    sizes = {int(p): int(n) for p, n in zip(engine.plans[-1].prompt, engine.plans[-1].size)}
    known = history.mean(reports[-2][3].history, size.dynamic.history)
    assert engine.plans[0].size.tolist() == [5] * 4  # nothing is known: rate 1/2
    assert sizes == {p: int(budget.least_mixed(known[p], tau=0.9, least=4, most=24))
                     for p in range(4)}
    assert sizes[1] > sizes[0] < sizes[2]


def test_the_history_learns_from_every_group_kept_or_not():
    engine = Engine([MIXED, RIGHT, WRONG, BROKEN, MIXED])
    *_, state = next(run(engine, setup(groups=2, samples=4, multiplier=2.5), steps=1))
    prompts = engine.plans[0].prompt
    assert state.history.successes[prompts].tolist() == [2, 4, 0, 0, 2]
    assert state.history.trials[prompts].tolist() == [4, 4, 4, 0, 4]
    assert state.history.streak[prompts].tolist() == [0, 1, 1, 0, 0]
    assert state.history.last[prompts].tolist() == [0] * 5 and state.history.trials.sum() == 16


def test_skipped_turns_are_counted_in_the_report():
    size = setup(groups=4, multiplier=2.0, at_limit="partial", max_rounds=1, max_empty_steps=9,
                 choice=config.Choice(kind="skip", skip_growth=1.0, skip_most=0.9))
    engine = Engine(lambda group: MIXED if group < 8 else WRONG)
    reports = [report for *_, report, _ in run(engine, size, steps=6, table=30)]
    assert [report.skipped for report in reports[:3]] == [0, 0, 0]
    assert sum(report.skipped for report in reports) > 10
    assert controller.metrics(reports[-1])["sampling/skipped"] == reports[-1].skipped


def test_surplus_beyond_its_share_is_dropped_newest_first_and_counted():
    engine = Engine(lambda group: MIXED)
    size = setup(groups=4, multiplier=2.0, carry_share=0.5)
    (batch, held, first, _), (_, _, second, _) = run(engine, size, steps=2)
    assert ids(batch) == [0, 1, 2, 3] and ids(held) == [4, 5]
    assert (first.carried, first.expired, second.needed) == (2, 2, 2)


def test_a_skipped_step_carries_all_it_has_whatever_the_share():
    engine = Engine(lambda group: MIXED if group < 3 else WRONG)
    size = setup(groups=4, at_limit="skip", max_rounds=1, carry_share=0.25)
    batch, held, report, _ = next(run(engine, size, steps=1))
    assert len(batch) == 0 and ids(held) == [0, 1, 2] and report.expired == 0


def test_the_predictor_is_told_how_much_surplus_the_next_steps_absorb():
    costs = config.Predictor(kind="cost_optimal", round_cost=100.0, prompt_cost=1.0)
    state, held = start(200, setup())
    state = dataclasses.replace(state, predictor=predictor.update(
        predictor.init(costs), 100, 50, cfg=costs))
    for steps, share, absorbed in ((0, 0.0, 0), (1, 0.0, 4), (2, 0.0, 8), (2, 0.5, 2)):
        size = setup(carry_steps=steps, carry_share=share)
        size = dataclasses.replace(size, dynamic=dataclasses.replace(
            size.dynamic, predictor=costs))
        _, opening = controller.begin(state, held, step=0, size=size)
        assert opening.first == predictor.predict(state.predictor, 4, costs, absorbed=absorbed)


@pytest.mark.parametrize("kind", sorted(budget.KINDS))
def test_under_every_budget_a_prompt_with_one_valid_sample_is_counted_and_not_trained(kind):  # B20
    class OneLeft(Engine):
        def group(self, plan, i):
            for row in super().group(plan, i):
                yield row | {"valid": plan.group[i] != 0 or row["sample"] == 1}

    size = setup(groups=3, samples=8, multiplier=1.0, budget=config.Budget(kind=kind))
    batch, _, report, state = next(run(OneLeft(lambda group: MIXED), size, steps=1))
    assert report.invalid == 1 and 0 not in ids(batch) and report.kept == 3
    assert report.asked == report.kept + report.carried + report.invalid


def test_groups_of_unequal_size_give_each_its_own_statistics():  # B22
    rewards = {0: [1, 0, 0], 1: [1, 0]}

    class Given(Engine):
        def group(self, plan, i):
            for row in list(super().group(plan, i)):
                mine = rewards[row["group"]]
                lost = row["sample"] >= len(mine)
                yield row | {"valid": not lost,
                             "reward": 0.0 if lost else float(mine[row["sample"]])}

    size = setup(groups=2, samples=3, multiplier=1.0)
    batch, *_ = next(run(Given([MIXED, MIXED]), size, steps=1))
    assert batch.group.tolist() == [0, 0, 0, 1, 1]
    for name, expected in (("dr_grpo", [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5]),
                           ("grpo", [1.1547, -0.5774, -0.5774, 0.7071, -0.7071])):
        got = advantages.ADVANTAGES[name](
            batch.reward, batch.group, valid=batch.valid, lengths=batch.length,
            settings=advantages.Settings(ddof=1, eps=0.0))
        assert got.tolist() == pytest.approx(expected, abs=1e-4)


def test_advantages_of_uneven_budgets_are_those_of_plain_loops():  # B22
    engine = Coins(np.linspace(0.05, 0.95, 40))
    size = setup(groups=6, samples=8, multiplier=2.0,
                 budget=config.Budget(kind="successive", first=3, each=2, most=14))
    sizes = set()
    for batch, *_ in run(engine, size, steps=4, table=40):
        sizes |= set(np.unique(batch.group, return_counts=True)[1].tolist())
        got = advantages.ADVANTAGES["grpo"](
            batch.reward, batch.group, valid=batch.valid, lengths=batch.length,
            settings=advantages.Settings())
        assert got.tolist() == pytest.approx(reference.grpo_advantages(
            batch.reward.tolist(), batch.group.tolist(), batch.valid.tolist()), abs=1e-5)
    assert len(sizes) >= 3


def test_what_is_asked_for_and_not_back_is_in_flight():
    size = setup(groups=2, samples=4, multiplier=2.0)
    state, held = start(50, size)
    progress, opening = controller.begin(state, held, step=0, size=size)
    progress, plan = gather.plan(progress, 4, size=size)
    samples = Engine([MIXED, WRONG, MIXED, MIXED])(plan)
    back = np.array([0, 1], np.int32)
    progress = gather.observe(progress, samples.take(np.isin(samples.group, back)), groups=back,
                              size=size)
    state, _, batch, report = controller.finish(gather.close(progress, size=size), opening,
                                                stop="", size=size)
    assert ids(batch) == [0] and report.in_flight == 2
    assert report.asked == (report.kept + report.all_zero + report.all_one + report.invalid
                            + report.carried + report.expired + report.in_flight)
    assert state.history.trials.sum() == 8  # only of those that are back


def test_resume_in_the_middle_gives_the_same_plans_under_budgets_and_choice():
    size = setup(groups=4, samples=6, kind="cost_optimal", budget=SCREENING, at_limit="partial",
                 choice=config.Choice(kind="difficulty", longest_gap=3))
    whole = Coins(np.linspace(0, 1, 30))
    steps = list(run(whole, size, steps=8, table=30))
    _, held, _, state = copy.deepcopy(steps[3])
    resumed = Coins(np.linspace(0, 1, 30))
    for step in range(4, 8):
        resumed.step = step
        state, held, batch, _ = controller.collect(state, held, step=step, sample=resumed,
                                                   size=size)
        for name in ("group", "prompt", "visit", "sample", "reward", "born"):
            assert getattr(batch, name).tolist() == getattr(steps[step][0], name).tolist()
    tail = whole.plans[len(whole.plans) - len(resumed.plans):]
    assert [requests(plan) for plan in resumed.plans] == [requests(plan) for plan in tail]
    assert str(state) == str(steps[-1][3])


def outcomes(rewards: list[list[float]], shaped: list[list[float]] | None = None) -> type[Engine]:
    """Groups with these rewards, by the number of the group in the run and of the sample."""
    class Given(Engine):
        def group(self, plan, i):
            for row in super().group(plan, i):
                yield row | {"reward": rewards[row["group"]][row["sample"]]}

        def __call__(self, plan):
            samples = super().__call__(plan)
            values = [(shaped or rewards)[g][j] for g, j in zip(samples.group, samples.sample)]
            return dataclasses.replace(samples, shaped=np.array(values, np.float32))
    return Given(lambda group: MIXED)


def test_a_length_penalty_does_not_make_a_wrong_group_informative():  # B01
    given_ = ([[0, 0, 0, 0], [1, 0, 1, 1]], [[0, 0, -0.5, -1.0], [1, 0, 1, 1]])
    size = setup(groups=1, samples=4, multiplier=2.0)
    batch, held, report, _ = next(run(outcomes(*given_), size, steps=1))
    assert ids(batch) == [1] and len(held) == 0 and report.all_zero == 1
    size = dataclasses.replace(size, groups=2, filter=config.Filter(metric="shaped"),
                               dynamic=setup(multiplier=1.0).dynamic)
    batch, *_ = next(run(outcomes(*given_), size, steps=1))
    assert ids(batch) == [0, 1] and batch.shaped.tolist() == [0, 0, -0.5, -1.0, 1, 0, 1, 1]


def test_kept_rows_stay_aligned_and_both_means_are_reported():  # B10
    engine = outcomes([[1, 1], [0, 1], [1, 1], [1, 0]])
    batch, _, report, _ = next(run(engine, setup(groups=2, multiplier=2.0), steps=1))
    assert batch.group.tolist() == [1, 1, 3, 3] == batch.tokens[:, 0].tolist()
    assert {len(column) for column in vars(batch).values()} == {4}
    assert batch.reward.tolist() == [0, 1, 1, 0] == batch.shaped.tolist()
    assert (report.kept_mean, report.reward_mean) == (0.5, 0.75)
