import copy
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import BROKEN, MIXED, RIGHT, WRONG, Engine, ids, run, setup, start

from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import controller


def test_a_batch_is_refilled_to_its_exact_size():  # B02
    engine = Engine([MIXED, RIGHT, MIXED, WRONG, RIGHT, MIXED, MIXED])
    batch, _, report, _ = next(run(engine, setup(multiplier=1.75), steps=1))
    assert ids(batch) == [0, 2, 5, 6] and len(batch) == 8 and engine.asked == [7]
    assert (report.asked, report.informative / report.asked) == (7, 4 / 7)
    assert (report.all_one, report.all_zero, report.rounds, report.limit) == (2, 1, 1, "")
    assert report.oracle_ratio == 1.0 and report.waste == pytest.approx(3 / 7)
    assert report.reward_mean == pytest.approx(8 / 14) and report.kept_mean == 0.5
    assert report.reward_std == pytest.approx(math.sqrt(8 / 14 * 6 / 14))
    assert report.shaped_mean == 0.0


def test_a_refill_asks_for_the_deficit_only():
    engine = Engine(lambda group: MIXED if group != 1 else RIGHT)
    batch, held, report, _ = next(run(engine, setup(multiplier=1.0), steps=1))
    assert engine.asked == [4, 2]  # 1.25 * 1 * (4 + 1) / (3 + 0.5) = 1.8
    assert ids(batch) == [0, 2, 3, 4] and ids(held) == [5]
    assert report.oracle_ratio == 6 / 5 and report.predicted == 4


def test_surplus_waits_and_the_next_step_asks_only_for_what_is_missing():  # B07
    engine = Engine(lambda group: MIXED)
    steps = list(run(engine, setup(multiplier=1.5), steps=3))
    assert [ids(batch) for batch, *_ in steps[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(steps[0][1]) == [4, 5] and steps[0][2].carried == 2
    assert steps[1][2].needed == 2 and engine.asked[:2] == [6, 3]
    assert steps[1][0].born.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_surplus_that_may_not_wait_is_dropped_and_counted():
    engine = Engine(lambda group: MIXED)
    (_, held, first, _), (batch, _, second, _) = run(
        engine, setup(multiplier=1.5, carry_steps=0), steps=2)
    assert len(held) == 0 and (first.carried, first.expired) == (0, 2)
    assert first.waste == pytest.approx(2 / 6)
    assert ids(batch) == [6, 7, 8, 9] and second.needed == 4


def test_groups_that_became_too_old_leave_before_the_batch_is_filled():
    state, held = start(50, setup())
    state, held, _, _ = controller.collect(state, held, step=0, size=setup(multiplier=1.5),
                                           sample=Engine(lambda group: MIXED))
    assert ids(held) == [4, 5]
    _, _, batch, report = controller.collect(state, held, step=1, size=setup(carry_steps=0),
                                             sample=Engine(lambda group: MIXED, step=1))
    assert ids(batch) == [6, 7, 8, 9] and report.needed == 4
    assert report.expired == 2 + report.informative - report.kept


def test_enough_carried_groups_train_without_sampling():
    engine = Engine(lambda group: MIXED)
    steps = list(run(engine, setup(multiplier=2.0), steps=2))
    batch, held, report, state = steps[1]
    assert engine.asked == [8] and ids(batch) == [4, 5, 6, 7] and len(held) == 0
    assert (report.asked, report.rounds, report.needed) == (0, 0, 0)
    assert math.isnan(report.oracle_ratio) and math.isnan(report.waste)
    assert int(state.predictor.count) == 1


def test_more_carried_than_needed_is_no_reason_to_train_on_more():
    engine = Engine(lambda group: MIXED)
    state, held = start(50, setup(groups=6))
    state, held, _, _ = controller.collect(state, held, step=0, sample=engine,
                                           size=setup(groups=6, multiplier=2.0))
    _, held, batch, report = controller.collect(state, held, step=1, sample=engine,
                                                size=setup(groups=2, carry_steps=3))
    assert ids(batch) == [6, 7] and ids(held) == [8, 9, 10, 11] and report.needed == 0


def test_the_round_limit_is_exact_and_its_error_says_why():  # B03
    engine = Engine(lambda group: RIGHT)
    size = setup(max_rounds=3, max_prompts=10_000)
    state, held = start(500, size)
    with pytest.raises(controller.LimitReached) as error:
        controller.collect(state, held, step=0, sample=engine, size=size)
    assert len(engine.plans) == 3
    for text in ("dynamic_sampling.max_rounds = 3", "0 of 4 groups", "keep rate 0.0",
                 "all one 100.0%", "all zero 0.0%", "invalid 0.0%", "too easy",
                 f"{sum(engine.asked)} prompts"):
        assert text in str(error.value)


@pytest.mark.parametrize("outcome,advice", [(WRONG, "too hard"), (BROKEN, "reward function"),
                                            (MIXED, "most groups were informative")])
def test_the_limit_error_gives_fitting_advice(outcome, advice):
    engine = Engine(lambda group: outcome)
    size = setup(multiplier=1.0, max_prompts=3)
    state, held = start(100, size)
    with pytest.raises(controller.LimitReached, match=advice):
        controller.collect(state, held, step=0, sample=engine, size=size)


def test_prompts_per_step_are_bounded_and_the_last_request_is_cut():
    engine = Engine(lambda group: WRONG)
    *_, report, _ = next(run(engine, setup(at_limit="partial", max_prompts=50), steps=1))
    assert sum(engine.asked) == report.asked == 50 and "max_prompts: 50" in report.limit
    engine = Engine(lambda group: WRONG)
    next(run(engine, setup(at_limit="partial"), steps=1))
    assert sum(engine.asked) == 80


def test_no_request_names_more_than_the_maximum_multiple_of_what_is_missing():
    engine = Engine(lambda group: WRONG)
    next(run(engine, setup(at_limit="partial", max_prompts=500), steps=1, table=500))
    assert engine.asked[:3] == [12, 40, 40]


def test_at_a_limit_partial_trains_on_what_there_is():
    engine = Engine(lambda group: MIXED if group == 1 else WRONG)
    batch, held, report, state = next(run(engine, setup(at_limit="partial", max_rounds=2), steps=1))
    assert ids(batch) == [1] and len(held) == 0 and "max_rounds" in report.limit
    assert math.isnan(report.oracle_ratio) and int(state.empty_steps) == 0


def test_at_a_limit_skip_trains_on_nothing_and_loses_nothing():
    engine = Engine(lambda group: MIXED if group in (1, 12, 13, 14) else WRONG)
    size = setup(at_limit="skip", max_rounds=1)
    (none, held, first, state), (batch, _, second, _) = run(engine, size, steps=2)
    assert len(none) == 0 and ids(held) == [1] and (first.kept, first.carried) == (0, 1)
    assert int(state.empty_steps) == 1
    assert ids(batch) == [1, 12, 13, 14] and second.needed == 3


@pytest.mark.parametrize("policy", ["skip", "partial"])
def test_empty_batches_end_the_run_and_name_the_reason(policy):  # B04
    engine = Engine(lambda group: RIGHT)
    steps = run(engine, setup(at_limit=policy, max_rounds=1, max_empty_steps=3, samples=4), steps=9)
    seen = []
    with pytest.raises(controller.LimitReached, match="max_empty_steps = 3 steps in a row"
                       ".*; raise the limit$"):  # at_limit is set already
        for batch, _, report, state in steps:
            assert len(batch) == 0 and "max_rounds" in report.limit
            seen.append(int(state.empty_steps))
    assert seen == [1, 2]


def test_a_batch_ends_the_count_of_empty_steps():
    engine = Engine(lambda group: MIXED if 24 <= group < 36 else RIGHT)
    size = setup(at_limit="partial", max_rounds=1, max_empty_steps=3, carry_steps=0)
    assert [int(state.empty_steps) for *_, state in run(engine, size, steps=5)] == [1, 2, 0, 1, 2]


def test_accepted_groups_survive_the_end_of_the_epochs():  # B05
    outcomes = [MIXED, RIGHT, MIXED]
    batch, _, report, state = next(run(Engine(outcomes), setup(groups=3, epochs=1), steps=1,
                                       table=3))
    assert ids(batch) == [0, 2] and len(batch) == 4
    assert report.exhausted and report.all_one == 1 and report.limit == ""
    assert int(state.empty_steps) == 0


def test_refilling_goes_on_in_the_next_epoch():
    engine = Engine(lambda group: RIGHT if group in (4, 7, 8) else MIXED)
    steps = list(run(engine, setup(groups=3, multiplier=1.0), steps=3, table=8))
    assert [len(ids(batch)) for batch, *_ in steps] == [3, 3, 3]
    assert not any(report.exhausted for _, _, report, _ in steps)
    prompts = np.concatenate([plan.prompt for plan in engine.plans])
    visits = np.concatenate([plan.visit for plan in engine.plans])
    assert sorted(prompts[:8]) == list(range(8)) and len(prompts) > 8
    assert visits.tolist() == [0] * 8 + [1] * (len(prompts) - 8)


def test_a_table_smaller_than_the_need_is_a_limit():
    size = setup(at_limit="partial")
    batch, _, report, _ = next(run(Engine(lambda group: MIXED), size, steps=1, table=3))
    assert len(ids(batch)) == 3 and "every prompt of the table" in report.limit
    assert not report.exhausted
    size = setup()
    state, held = start(3, size)
    with pytest.raises(controller.LimitReached, match="every prompt of the table.*3 in the table"):
        controller.collect(state, held, step=0, sample=Engine(lambda group: MIXED), size=size)


def test_an_exhausted_run_goes_on_ending_without_an_error():
    steps = list(run(Engine(lambda group: MIXED), setup(epochs=1, at_limit="error"), steps=6,
                     table=8))
    assert [len(ids(batch)) for batch, *_ in steps] == [4, 4, 0, 0, 0, 0]
    assert [report.exhausted for _, _, report, _ in steps] == [False, False] + [True] * 4
    assert int(steps[-1][3].empty_steps) == 0


def test_prompts_are_counted_in_updates_not_rounds():  # B16
    engine = Engine(lambda group: MIXED if group % 2 else WRONG)
    steps = list(run(engine, setup(groups=10, multiplier=2.0), steps=8, table=100))
    assert all(report.kept == 10 for _, _, report, _ in steps) and sum(engine.asked) == 160
    engine = Engine(lambda group: MIXED if group % 2 else WRONG)
    steps = list(run(engine, setup(groups=10, multiplier=2.0, epochs=1), steps=6, table=100))
    assert [report.kept for _, _, report, _ in steps] == [10] * 5 + [0]
    assert [report.exhausted for _, _, report, _ in steps] == [False] * 5 + [True]


def test_without_a_filter_every_prompt_is_trained_on_once_per_epoch():  # B55
    engine = Engine(lambda group: RIGHT)
    size = setup(groups=3, enabled=False, epochs=1)
    steps = list(run(engine, size, steps=4, table=9))
    trained = [prompt for batch, *_ in steps for prompt in batch.prompt.tolist()]
    assert [len(batch) for batch, *_ in steps] == [6, 6, 6, 0]
    assert sorted(trained) == sorted(list(range(9)) * 2) and engine.asked == [3, 3, 3]
    assert int(steps[-1][3].predictor.count) == 0


def test_without_a_filter_broken_groups_are_replaced():
    engine = Engine(lambda group: BROKEN if group == 1 else RIGHT)
    batch, _, report, _ = next(run(engine, setup(enabled=False), steps=1))
    assert ids(batch) == [0, 2, 3, 4] and engine.asked == [4, 1] and report.invalid == 1


def test_one_sample_per_prompt_is_enough_without_a_filter():
    engine = Engine(lambda group: BROKEN if group == 1 else WRONG)
    batch, _, report, _ = next(run(engine, setup(enabled=False, samples=1), steps=1))
    assert ids(batch) == [0, 2, 3, 4] and (report.invalid, report.all_zero) == (1, 4)


def test_with_a_filter_a_group_of_one_is_invalid():
    engine = Engine(lambda group: RIGHT)
    *_, report, _ = next(run(engine, setup(samples=1, max_rounds=1, at_limit="partial"), steps=1))
    assert (report.asked, report.invalid, report.all_one, report.kept) == (12, 12, 0, 0)


def test_a_group_with_one_valid_sample_is_counted_and_not_trained():  # B20
    class OneLost(Engine):
        def group(self, plan, i):
            rows = list(super().group(plan, i))
            rows[0]["valid"] = plan.group[i] != 0
            return rows

    for enabled in (True, False):
        engine = OneLost(lambda group: MIXED)
        batch, _, report, _ = next(run(engine, setup(multiplier=1.0, enabled=enabled), steps=1))
        assert report.invalid == 1 and 0 not in ids(batch) and report.kept == 4


def test_rows_of_invalid_samples_leave_a_kept_group():
    class LastLost(Engine):
        def group(self, plan, i):
            rows = list(super().group(plan, i))
            rows[-1]["valid"] = False
            return rows

    engine = LastLost(lambda group: MIXED)
    batch, _, report, _ = next(run(engine, setup(samples=4, multiplier=1.0), steps=1))
    assert batch.sample.tolist() == [0, 1, 2] * 4 and batch.valid.all()
    assert report.samples == 16 and report.reward_mean == pytest.approx(2 / 3)


def test_a_group_that_comes_back_without_rows_is_invalid():
    class Lossy(Engine):
        def group(self, plan, i):
            return super().group(plan, i) if plan.group[i] % 2 else ()

    _, _, report, _ = next(run(Lossy(lambda group: MIXED), setup(multiplier=2.0), steps=1))
    assert (report.asked, report.invalid, report.informative, report.kept) == (8, 4, 4, 4)


def test_the_order_of_returned_rows_changes_nothing():
    def play(shuffle):
        engine = Engine(lambda group: (MIXED, WRONG, MIXED, RIGHT, BROKEN)[group % 5],
                        shuffle=shuffle, lengths=(1, 2, 3))
        return [(batch.group.tolist(), batch.sample.tolist(), batch.prompt.tolist(),
                 held.group.tolist(), dataclasses.astuple(report))
                for batch, held, report, _ in run(engine, setup(samples=4), steps=6)]

    assert str(play(None)) == str(play(np.random.default_rng(0)))


def test_resume_in_the_middle_gives_the_same_plans_and_batches():
    def outcome(group):
        return (MIXED, WRONG, MIXED, RIGHT)[group * 7 % 11 % 4]

    size = setup(kind="window")
    whole = Engine(outcome)
    steps = list(run(whole, size, steps=9, table=30))
    _, held, _, state = copy.deepcopy(steps[4])
    resumed = Engine(outcome)
    for step in range(5, 9):
        resumed.step = step
        state, held, batch, _ = controller.collect(state, held, step=step, sample=resumed,
                                                   size=size)
        for name in ("group", "prompt", "visit", "sample", "reward", "born"):
            assert getattr(batch, name).tolist() == getattr(steps[step][0], name).tolist()
    tail = whole.plans[len(whole.plans) - len(resumed.plans):]
    assert [p.prompt.tolist() for p in resumed.plans] == [p.prompt.tolist() for p in tail]


def test_the_predictor_sees_each_step_once_with_all_that_was_asked_and_kept():
    engine = Engine(lambda group: MIXED if group != 1 else RIGHT)
    *_, state = next(run(engine, setup(multiplier=1.0), steps=1))
    assert (int(state.predictor.asked[-1]), int(state.predictor.kept[-1])) == (6, 5)
    assert int(state.predictor.count) == 1 and int(state.next_group) == 6
    assert int(np.sum(state.history.visits)) == 6


def test_the_predictor_learns_the_keep_rate_and_stays_at_it():
    engine = Engine(lambda group: MIXED if group % 2 else WRONG)
    reports = [report for *_, report, _ in run(engine, setup(groups=16, kind="window"), steps=40,
                                               table=500)]
    assert reports[0].predicted == 48
    assert all(r.predicted <= math.ceil(2 * 1.2 * r.needed) for r in reports[20:])
    assert all(r.kept == 16 for r in reports)


def frozen(tree):
    for value in vars(tree).values():
        value.setflags(write=False) if isinstance(value, np.ndarray) else frozen(value)
    return tree


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_failure_leaves_state_and_buffer_as_they_were(fails_at):
    size = setup(multiplier=1.0)
    _, held, _, state = next(run(Engine(lambda group: MIXED), setup(multiplier=1.5), steps=1))
    before = copy.deepcopy((state, held))

    class Dies(Engine):
        def __call__(self, plan):
            if len(self.plans) == fails_at:
                raise OSError("the engine died")
            return super().__call__(plan)

    with pytest.raises(OSError, match="died"):
        controller.collect(frozen(state), frozen(held), step=1, sample=Dies(lambda g: WRONG),
                           size=size)
    assert str(before) == str((state, held))


def test_rows_of_a_group_that_was_not_planned_are_refused():
    def wrong(plan):
        return dataclasses.replace(Engine(lambda group: MIXED)(plan),
                                   group=np.full(2 * len(plan.group), 99, np.int32))

    size = setup()
    state, held = start(50, size)
    with pytest.raises(ValueError, match="group 99, which is not in its plan"):
        controller.collect(state, held, step=0, sample=wrong, size=size)


def test_metrics_have_their_public_names_and_finite_numbers_where_there_are_any():
    engine = Engine(lambda group: (MIXED, RIGHT)[group % 2])
    *_, report, _ = next(run(engine, setup(), steps=1))
    named = controller.metrics(report)
    assert set(named) == {
        "groups/all_zero", "groups/all_one", "groups/informative", "groups/invalid", "groups/kept",
        "groups/carried", "groups/dropped", "groups/expired", "groups/in_flight", "sampling/asked",
        "sampling/skipped", "sampling/needed",
        "sampling/predicted", "sampling/rounds", "sampling/prompts", "sampling/samples",
        "sampling/tokens", "sampling/waste", "sampling/oracle_ratio", "reward/mean", "reward/std",
        "reward/kept_mean", "reward/shaped_mean"}
    assert all(type(value) is float and math.isfinite(value) for value in named.values())
    assert named["sampling/tokens"] == 48 and named["sampling/samples"] == 24
    assert named["sampling/prompts"] == named["sampling/asked"] == 12
    assert named["groups/carried"] == 2 and named["sampling/waste"] == 0.5


@settings(deadline=None, max_examples=60)
@given(data=st.data(), groups=st.integers(1, 5), samples=st.integers(1, 3),
       table=st.integers(1, 25), enabled=st.booleans(), epochs=st.integers(0, 2),
       kind=st.sampled_from(["fixed", "window"]), carry=st.integers(0, 2),
       policy=st.sampled_from(["partial", "skip"]), rounds=st.integers(1, 3),
       prompts=st.sampled_from([0, 9]))
def test_every_group_is_accounted_for(data, groups, samples, table, enabled, epochs, kind, carry,
                                      policy, rounds, prompts):
    outcomes: dict[int, str] = {}

    def outcome(group):
        return outcomes.setdefault(group, data.draw(
            st.sampled_from([MIXED, RIGHT, WRONG, BROKEN])))

    size = setup(groups=groups, samples=samples, enabled=enabled, epochs=epochs,
                 kind=kind, carry_steps=carry, at_limit=policy, max_rounds=rounds,
                 max_prompts=prompts, max_empty_steps=99)
    engine, carried_before, trained = Engine(outcome), 0, []
    for step, (batch, held, report, state) in enumerate(run(engine, size, steps=5, table=table)):
        plans = engine.plans[-report.rounds:] if report.rounds else []
        asked = [prompt for plan in plans for prompt in plan.prompt.tolist()]
        assert len(asked) == len(set(asked)) == report.asked
        assert report.rounds <= rounds and report.asked <= (prompts or 20 * groups)
        assert report.asked == (report.all_zero + report.all_one + report.invalid
                                + report.informative)
        accepted = report.informative if enabled else report.asked - report.invalid
        assert accepted + carried_before == report.kept + report.carried + report.expired
        assert report.kept == len(ids(batch)) and report.carried == buffer.groups(held)
        assert report.kept == groups or report.exhausted or report.limit
        assert not report.limit or not report.exhausted
        assert len(held) == 0 or step + 1 - held.born.min() <= carry
        assert ids(batch) == sorted(ids(batch)) and ids(held) == sorted(ids(held))
        assert int(state.next_group) == sum(engine.asked) == int(np.sum(state.history.visits))
        trained += ids(batch)
        carried_before = report.carried
    assert len(trained) == len(set(trained))
    assert all(outcomes[group] == MIXED if enabled else outcomes[group] != BROKEN
               for group in trained)
