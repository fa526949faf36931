"""Streaming dynamic sampling against a device of numbers (fake_engine.py)."""

import copy
import dataclasses
import math

import fake_engine
import numpy as np
import pytest
import reference
from fake_engine import Device, play
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import BROKEN, MIXED, RIGHT, WRONG, Coins, Engine, ids, requests, setup, start

from dapo_jax import config
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import accounts, budget, choice, controller, gather, stream
from dapo_jax.learner import advantages

MODES = ["finish", "drop"]
TAIL = (1, 5, 2, 30, 3, 1, 8)


def streaming(*, lag=1, in_flight="finish", **options):
    return dataclasses.replace(setup(**options), stream=gather.Streaming(lag, in_flight))


def run(engine, size, *, steps, table=200, device=Device(), work=None, look=lambda *_: None):
    """Steps one after another, as stand_in.run."""
    state, held = start(table, size)
    for step in range(steps):
        state, held, batch, report, _ = play(device, engine, state, held, step=step, size=size,
                                             work=work, look=look)
        yield batch, held, report, state


class Tied(Engine):
    """Whether a group is informative depends on its length: long ones mostly are."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.each = np.minimum(60, 1 + rng.lognormal(1.5, 1.0, 5000).astype(int))
        self.mixed = rng.random(5000) < 0.1 + 0.8 * (self.each > 5)
        super().__init__(lambda group: MIXED if self.mixed[group] else WRONG, lengths=self.each)


@pytest.mark.parametrize("in_flight, lag", [("finish", 2), ("drop", 0)])
def test_accepted_groups_are_those_of_a_run_that_waits_for_all(in_flight, lag):
    size = streaming(in_flight=in_flight, lag=lag, groups=24, multiplier=2.5, carry_steps=1)
    engine, begun, waiting, first_to_end = Tied(5), 0, [], []
    for batch, held, report, state in run(
            engine, size, steps=40, table=4000, device=Device((4, 8, 16), 2, 4)):
        admitted = range(begun, int(state.next_group))
        wanted = [g for g in [*waiting, *admitted] if engine.mixed[g]]
        assert ids(batch) == wanted[:24]
        assert ids(held) == wanted[24:24 + len(ids(held))]
        if in_flight == "finish":
            assert ids(held) == wanted[24:] and report.dropped == 0
        by_end = sorted(admitted, key=lambda g: engine.each[g])
        first_to_end += [g for g in by_end if engine.mixed[g]][:24 - len(waiting)]
        begun, waiting = int(state.next_group), ids(held)
    assert begun > 2000
    # The cases tell the two apart: groups that end first are much shorter.
    assert engine.each[first_to_end].mean() < 0.9 * engine.each[:begun][engine.mixed[:begun]].mean()


@settings(deadline=None, max_examples=20)
@given(in_flight=st.sampled_from(MODES), lag=st.integers(0, 3), chunk=st.integers(1, 9),
       kind=st.sampled_from(sorted(budget.KINDS)), chosen=st.sampled_from(sorted(choice.KINDS)),
       predicted=st.sampled_from(["fixed", "window", "cost_optimal"]), enabled=st.booleans(),
       groups=st.integers(1, 5), table=st.integers(3, 30), carry=st.integers(0, 2),
       share=st.sampled_from([0.0, 0.5]), prompts=st.sampled_from([0, 9]),
       policy=st.sampled_from(["partial", "skip"]), failing=st.sampled_from([0.0, 0.5]),
       epochs=st.integers(0, 2), seed=st.integers(0, 99))
def test_every_prompt_is_accounted_for_at_every_boundary_and_at_the_end(
        in_flight, lag, chunk, kind, chosen, predicted, enabled, groups, table, carry, share,
        prompts, policy, failing, epochs, seed):
    size = streaming(
        lag=lag, in_flight=in_flight, groups=groups, samples=6, enabled=enabled, kind=predicted,
        epochs=epochs, carry_steps=carry, carry_share=share, at_limit=policy, max_prompts=prompts,
        max_empty_steps=99, budget=config.Budget(kind=kind, first=2, stages=2, least=3),
        choice=config.Choice(kind=chosen, skip_growth=0.5))
    rates = np.random.default_rng(seed).choice([0.0, 0.1, 0.5, 1.0], table)
    engine, before = Coins(rates, failing=failing), 0
    engine.lengths = TAIL

    def balanced(flow, beat):
        entries = flow.progress.entries
        flying = int(np.sum(~entries.done))
        assert sum(accounts.group_counts(entries).values()) + flying == len(entries.group)
        assert len(entries.group) <= (prompts or 20 * groups)

    def requested():
        return [one for plan in engine.plans[begun:] for one in requests(plan)]

    begun = 0
    for batch, held, report, state in run(
            engine, size, steps=4, table=table, device=Device((2, 4), 3, chunk), look=balanced):
        drawn: dict[int, list[int]] = {}
        for group, first, count in requested():
            drawn.setdefault(group, []).extend(range(first, first + count))
        assert all(numbers == list(range(len(numbers))) for numbers in drawn.values())
        assert len(drawn) == report.asked
        ended = report.all_zero + report.all_one + report.invalid
        assert report.asked == ended + report.informative + report.dropped
        assert report.in_flight == 0 and (in_flight == "drop" or report.dropped == 0)
        assert report.asked + before == (
            (ended if enabled else report.invalid) + report.kept + report.carried
            + report.expired + report.dropped)
        assert report.kept == groups or report.exhausted or report.limit
        if share and not (policy == "skip" and report.limit):
            assert report.carried <= math.floor(share * groups)
        assert ids(batch) == sorted(ids(batch)) and ids(held) == sorted(ids(held))
        assert state.history.visits.sum() == int(state.next_group)  # dropped ones too
        assert report.carried == buffer.groups(held)
        before, begun = report.carried, len(engine.plans)


# ----------------------------------------------------------------------------------------- deciding


def test_rewards_count_after_a_fixed_number_of_chunks_or_when_nothing_is_left_to_run():
    size = streaming(lag=2)
    flow = stream.begin(*start(50, size), step=0, size=size)
    none = np.zeros(0, np.int32)
    flow, now = stream.due(flow, stream.Beat(1, np.array([4, 2]), False, 0), size=size)
    assert now.tolist() == []
    flow, now = stream.due(flow, stream.Beat(2, np.array([3]), False, 0), size=size)
    assert now.tolist() == []
    flow, now = stream.due(flow, stream.Beat(3, none, False, 0), size=size)
    assert now.tolist() == [4, 2]
    flow, now = stream.due(flow, stream.Beat(4, np.array([7]), True, 0), size=size)
    assert now.tolist() == [3, 7] and flow.finished == ()


def test_the_first_admission_is_the_predictors_first_request_as_far_as_there_is_room():
    for slots, first in ((4, 8), (8, 12)):  # as many wait as there are slots
        engine = Engine(lambda group: MIXED)
        *_, report, _ = next(run(engine, streaming(multiplier=3.0), steps=1,
                                 device=Device((slots,))))
        assert len(engine.plans[0].group) == first and report.predicted == 12


def test_what_is_in_flight_covers_what_is_missing():
    """By hand: two prompts a group are usual, and weigh as six beside those decided in order."""
    size = streaming(multiplier=2.0, groups=6, lag=0)
    engine, asked = Engine(lambda group: WRONG if group % 4 else MIXED, lengths=TAIL), [0]

    def look(flow, beat):
        done, kept, before = flow.progress.entries.done.tolist(), 0, 0
        while before < len(done) and done[before]:
            kept += before % 4 == 0
            before += 1
        missing = max(0, 6 - sum(done[::4]))
        undecided, now = done.count(False), (kept + 6 / 2) / (before + 6)
        wanted = max(2 * missing / 2, missing + math.sqrt(missing * (1 - now))) / now
        wanted = math.ceil(wanted if before else 2 * missing)
        assert undecided >= wanted or not missing
        if len(done) > asked[-1]:
            assert undecided == wanted
            asked.append(len(done))

    next(run(engine, size, steps=1, look=look, device=Device((32,), 2, 2)))
    assert len(asked) > 3


def test_a_batch_is_not_full_before_the_groups_admitted_before_it_are_decided():
    size = streaming(groups=2, lag=0, multiplier=2.0)
    flow = stream.begin(*start(50, size), step=0, size=size)
    flow, plan = stream.admit(flow, stream.Beat(0, np.zeros(0, np.int32), True, 9), size=size)
    samples = Engine([MIXED, WRONG, MIXED, MIXED])(plan)

    def after(*groups):
        back = np.array(groups, np.int32)
        return stream.observe(flow, samples.take(np.isin(samples.group, back)), groups=back,
                              size=size)

    assert not stream.full(after(2, 3), size) and not stream.full(after(1, 2, 3), size)
    assert not stream.full(after(0, 2), size) and stream.full(after(0, 1, 2), size)
    assert stream.wanted(after(2, 3), size) == 0  # nor is any further prompt asked for


def test_dropped_groups_are_counted_and_only_those_before_them_are_carried():
    lengths = (1, 1, 1, 1, 40, 1, 1, 40)
    size = streaming(groups=2, lag=0, multiplier=4.0, in_flight="drop")
    engine = Engine([MIXED, RIGHT, MIXED, MIXED, MIXED, MIXED, WRONG, MIXED], lengths=lengths)
    work = fake_engine.Work()
    batch, held, report, state = next(run(engine, size, steps=1, work=work))
    assert ids(batch) == [0, 2] and ids(held) == [3]
    # 4 and 7 were abandoned; 5 is complete but short, for 4 is older.
    assert (report.dropped, report.informative, report.all_one, report.all_zero) == (3, 3, 1, 1)
    assert (report.asked, report.in_flight) == (8, 0) and work.steps <= 8
    assert (int(state.predictor.asked[-1]), int(state.predictor.kept[-1])) == (4, 3)
    assert state.history.visits.sum() == 8 and state.history.trials.sum() == 12
    assert report.waste > 1 - 3 / 6  # what was drawn for the two counts as waste


def test_finished_groups_are_all_carried():
    lengths = (1, 1, 1, 1, 40, 1, 1, 40)
    size = streaming(groups=2, lag=0, multiplier=4.0)
    engine = Engine([MIXED, RIGHT, MIXED, MIXED, MIXED, MIXED, WRONG, MIXED], lengths=lengths)
    batch, held, report, _ = next(run(engine, size, steps=1))
    assert ids(batch) == [0, 2] and ids(held) == [3, 4, 5, 7] and report.dropped == 0


def test_in_streaming_a_round_is_a_stretch_in_which_the_device_is_never_empty():
    engine = Engine(lambda group: RIGHT, lengths=(3,))
    *_, report, _ = next(run(engine, streaming(at_limit="partial", max_prompts=60, max_rounds=1),
                             steps=1, device=Device((4,), 2, 1)))
    assert report.asked == 60 and report.rounds == 1 and "max_prompts: 60" in report.limit
    late = streaming(at_limit="partial", max_prompts=600, max_rounds=3, lag=9, groups=2)
    engine = Engine(lambda group: RIGHT, lengths=(3,))
    *_, report, _ = next(run(engine, late, steps=1, device=Device((16,), 2, 1)))
    assert report.rounds == 3 and "max_rounds = 3" in report.limit
    assert report.asked == 6 + 20 + 20  # later requests at the bound of ten times what is missing


def test_a_stage_is_admitted_for_the_same_group_while_others_run():
    engine = Engine([WRONG, MIXED, RIGHT, MIXED], lengths=(1, 1, 9, 1))
    size = streaming(groups=2, samples=6, multiplier=2.0, lag=0,
                     budget=config.Budget(kind="screening", first=2))
    batch, _, report, _ = next(run(engine, size, steps=1, device=Device((8,), 2, 2)))
    plans = [requests(plan) for plan in engine.plans if len(plan.group)]
    assert plans[0] == [(group, 0, 2) for group in range(4)]
    assert plans[1] == [(1, 2, 4), (3, 2, 4)]
    assert batch.group.tolist() == [1] * 6 + [3] * 6
    assert batch.sample.tolist() == list(range(6)) * 2
    assert (report.asked, report.rounds, report.samples) == (4, 1, 16)


def test_resume_in_the_middle_gives_the_same_plans():
    size = streaming(groups=4, samples=6, kind="window", at_limit="partial", in_flight="drop",
                     budget=config.Budget(kind="screening", first=2))
    whole = Coins(np.linspace(0, 1, 30))
    whole.lengths = TAIL
    steps = list(run(whole, size, steps=8, table=30))
    _, held, _, state = copy.deepcopy(steps[3])
    resumed = Coins(np.linspace(0, 1, 30))
    resumed.lengths = TAIL
    for step in range(4, 8):
        state, held, batch, *_ = play(Device(), resumed, state, held, step=step, size=size)
        for name in ("group", "prompt", "visit", "sample", "reward", "born"):
            assert getattr(batch, name).tolist() == getattr(steps[step][0], name).tolist()
    tail = whole.plans[len(whole.plans) - len(resumed.plans):]
    assert [requests(plan) for plan in resumed.plans] == [requests(plan) for plan in tail]
    assert str(state) == str(steps[-1][3])


@pytest.mark.parametrize("in_flight", MODES)
def test_where_rounds_refill_streaming_takes_fewer_passes_of_the_model(in_flight):
    """Heavy-tailed lengths; the share of informative groups jumps, and nothing is carried."""
    def passes(size, one):
        engine = fake_engine.HeavyTail(lambda step: (0.6, 0.2)[step % 2], limit=64)
        (state, held), work = start(5000, size), fake_engine.Work()
        for step in range(12):
            state, held, _, report, *_ = one(Device((8, 16), 4, 8), engine, state, held,
                                             step=step, size=size, work=work)
            assert report.kept == 8
        return work.steps

    size = streaming(groups=8, samples=4, kind="window", in_flight=in_flight, carry_steps=0,
                     max_prompts=400)
    rounds = dataclasses.replace(size, stream=None)
    assert passes(size, play) < 0.95 * passes(rounds, fake_engine.in_rounds)


# ---------------------------------------------------------- cases, as test_controller has in rounds


@pytest.mark.parametrize("in_flight", MODES)
def test_a_batch_is_refilled_to_its_exact_size(in_flight):  # B02
    engine = Engine([MIXED, RIGHT, MIXED, WRONG, RIGHT, MIXED, MIXED], lengths=TAIL)
    size = streaming(multiplier=1.75, in_flight=in_flight)
    batch, _, report, _ = next(run(engine, size, steps=1))
    assert ids(batch) == [0, 2, 5, 6] and len(batch) == 8 and report.asked == 7
    assert (report.all_one, report.all_zero, report.rounds, report.limit) == (2, 1, 1, "")


def test_the_prompt_limit_is_exact_and_its_error_says_why():  # B03
    engine = Engine(lambda group: RIGHT)
    size = streaming(max_prompts=37)
    with pytest.raises(controller.LimitReached) as error:
        next(run(engine, size, steps=1, table=500))
    assert sum(engine.asked) == 37
    for text in ("max_prompts: 37", "0 of 4 groups", "keep rate 0.0", "all one 100.0%",
                 "all zero 0.0%", "too easy"):
        assert text in str(error.value)


@pytest.mark.parametrize("policy", ["skip", "partial"])
def test_empty_batches_end_the_run_and_name_the_reason(policy):  # B04
    size = streaming(at_limit=policy, max_prompts=12, max_empty_steps=3, samples=4)
    seen = []
    with pytest.raises(controller.LimitReached, match="max_empty_steps = 3 steps in a row"):
        for batch, _, report, state in run(Engine(lambda group: RIGHT), size, steps=9):
            assert len(batch) == 0 and "max_prompts" in report.limit
            seen.append(int(state.empty_steps))
    assert seen == [1, 2]


@pytest.mark.parametrize("in_flight", MODES)
def test_accepted_groups_survive_the_end_of_the_epochs(in_flight):  # B05
    engine = Engine([MIXED, RIGHT, MIXED], lengths=(1, 1, 20))
    size = streaming(groups=3, epochs=1, in_flight=in_flight)
    batch, _, report, state = next(run(engine, size, steps=1, table=3))
    assert ids(batch) == [0, 2] and len(batch) == 4 and report.dropped == 0
    assert report.exhausted and report.all_one == 1 and report.limit == ""
    assert int(state.empty_steps) == 0
    engine = Engine(lambda group: RIGHT if group in (1, 4) else MIXED)
    steps = list(run(engine, streaming(groups=2, multiplier=1.0, epochs=2), steps=2, table=3))
    assert [ids(batch) for batch, *_ in steps] == [[0, 2], [3, 5]]


@pytest.mark.parametrize("in_flight", MODES)
def test_surplus_waits_and_the_next_step_asks_only_for_what_is_missing(in_flight):  # B07
    engine = Engine(lambda group: MIXED)
    steps = list(run(engine, streaming(multiplier=1.5, in_flight=in_flight), steps=2))
    assert ids(steps[0][0]) == [0, 1, 2, 3] and ids(steps[0][1]) == [4, 5]
    assert steps[1][2].needed == 2 and ids(steps[1][0]) == [4, 5, 6, 7]
    engine = Engine(lambda group: MIXED)
    size = streaming(multiplier=1.5, in_flight=in_flight, carry_steps=0)
    _, held, report, _ = next(run(engine, size, steps=1))
    assert len(held) == 0 and (report.carried, report.expired) == (0, 2)


@pytest.mark.parametrize("metric, kept", [("task", [1]), ("shaped", [0])])
def test_a_length_penalty_does_not_make_a_wrong_group_informative(metric, kept):  # B01
    class Shaped(Engine):
        def __call__(self, plan):
            samples = super().__call__(plan)
            wrong = np.isin(samples.group, [0])
            late = np.array([0, 0, -0.5, -1.0], np.float32)[samples.sample]
            return dataclasses.replace(
                samples, shaped=np.where(wrong, late, samples.reward).astype(np.float32))

    engine = Shaped([WRONG, MIXED])
    size = dataclasses.replace(streaming(groups=1, samples=4, multiplier=2.0, lag=0),
                               filter=config.Filter(metric=metric))
    batch, *_ = next(run(engine, size, steps=1))
    assert ids(batch) == kept


def test_kept_rows_stay_aligned_and_both_means_are_reported():  # B10
    class Given(Engine):
        def group(self, plan, i):
            for row in super().group(plan, i):
                yield row | {"reward": {1: [0, 1], 3: [1, 0]}.get(row["group"], [1, 1])[
                    row["sample"]]}

    engine = Given(lambda group: MIXED, lengths=(2, 9, 1, 1))
    size = streaming(groups=2, multiplier=2.0, lag=9)  # all four before any counts
    batch, _, report, _ = next(run(engine, size, steps=1))
    assert batch.group.tolist() == [1, 1, 3, 3] == batch.tokens[:, 0].tolist()
    assert {len(column) for column in vars(batch).values()} == {4}
    assert batch.reward.tolist() == [0, 1, 1, 0]
    assert (report.kept_mean, report.reward_mean) == (0.5, 0.75)


def test_prompts_are_counted_in_updates_not_rounds():  # B16
    engine = Engine(lambda group: MIXED if group % 2 else WRONG, lengths=TAIL)
    steps = list(run(engine, streaming(groups=10, multiplier=2.0), steps=8, table=100))
    asked = sum(report.asked for _, _, report, _ in steps)
    assert all(report.kept == 10 for _, _, report, _ in steps)
    assert abs(asked - 2 * (80 + steps[-1][2].carried)) <= 1
    engine = Engine(lambda group: MIXED if group % 2 else WRONG)
    size = streaming(groups=10, multiplier=2.0, epochs=1)
    steps = list(run(engine, size, steps=6, table=100))
    assert [report.kept for _, _, report, _ in steps] == [10] * 5 + [0]
    assert [report.exhausted for _, _, report, _ in steps] == [False] * 5 + [True]


def test_a_group_with_one_valid_sample_is_counted_and_not_trained():  # B20
    class OneLost(Engine):
        def group(self, plan, i):
            rows = list(super().group(plan, i))
            rows[0]["valid"] = plan.group[i] != 0
            return rows

    for enabled in (True, False):
        batch, _, report, _ = next(run(OneLost(lambda group: MIXED), streaming(
            multiplier=1.0, enabled=enabled), steps=1))
        assert report.invalid == 1 and 0 not in ids(batch) and report.kept == 4


def test_uneven_groups_get_the_advantages_of_plain_loops():  # B22
    engine = Coins(np.linspace(0.05, 0.95, 40))
    engine.lengths = TAIL
    size = streaming(groups=6, samples=8, multiplier=2.0,
                     budget=config.Budget(kind="successive", first=3, each=2, most=14))
    sizes = set()
    for batch, *_ in run(engine, size, steps=3, table=40):
        sizes |= set(np.unique(batch.group, return_counts=True)[1].tolist())
        got = advantages.ADVANTAGES["grpo"](
            batch.reward, batch.group, valid=batch.valid, lengths=batch.length,
            settings=advantages.Settings())
        assert got.tolist() == pytest.approx(reference.grpo_advantages(
            batch.reward.tolist(), batch.group.tolist(), batch.valid.tolist()), abs=1e-5)
    assert len(sizes) >= 3


def test_without_a_filter_as_many_are_asked_as_are_missing():
    engine = Engine(lambda group: BROKEN if group == 1 else RIGHT)
    batch, _, report, _ = next(run(engine, streaming(enabled=False), steps=1))
    assert ids(batch) == [0, 2, 3, 4] and report.asked == 5 and report.invalid == 1
