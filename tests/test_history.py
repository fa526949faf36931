import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.dynamic_sampling import history

CFG = config.History(decay=0.5, prior_right=1.0, prior_wrong=2.0)


def observe(state, *visits, cfg=CFG):
    """`visits`: (prompt, successes, trials, differed) each."""
    columns = [np.array(column) for column in zip(*visits)]
    prompts, successes, trials, differed = columns
    return history.observe(state, prompts, successes=successes, trials=trials, differed=differed,
                           cfg=cfg)


def frozen(state):
    for array in vars(state).values():
        array.setflags(write=False)
    return state


def test_visits_are_counted_per_prompt_with_the_step_of_the_last_and_purely():
    state = frozen(history.init(4))
    later = history.visit(history.visit(state, np.array([1, 3]), step=5), np.array([3]), step=9)
    assert later.visits.tolist() == [0, 1, 0, 2] and later.last.tolist() == [-1, 5, -1, 9]
    assert state.visits.tolist() == [0] * 4 and state.last.tolist() == [-1] * 4
    assert later.visits.dtype == later.last.dtype == np.int32


def test_a_visit_halves_what_was_known_and_adds_its_samples():
    state = observe(frozen(history.init(3)), (2, 3, 4, True), (0, 0, 8, False))
    state = observe(frozen(state), (2, 1, 6, True))
    assert state.successes.tolist() == [0, 0, 2.5] and state.trials.tolist() == [8, 0, 8]
    assert history.mean(state, CFG).tolist() == pytest.approx([1 / 11, 1 / 3, 3.5 / 11])


def test_the_streak_counts_uninformative_visits_and_ends_with_an_informative_one():
    state, seen = history.init(1), []
    for visit in ((0, 0, 4, False), (0, 4, 4, False), (0, 0, 0, False), (0, 1, 1, False),
                  (0, 0, 2, True), (0, 2, 2, False)):
        state = observe(state, visit)
        seen.append(int(state.streak[0]))
    assert seen == [1, 2, 2, 2, 0, 1]


def test_a_visit_without_a_valid_sample_forgets_nothing():
    state = observe(history.init(1), (0, 1, 4, True))
    again = observe(state, (0, 0, 0, False))
    assert again.trials.tolist() == [4] and again.successes.tolist() == [1]


@pytest.mark.parametrize("visits,match", [([(0, 1, 2, True), (0, 0, 2, False)], "named twice"),
                                          ([(0, 3, 2, True)], "between 0 and trials"),
                                          ([(0, -1, 2, True)], "between 0 and trials")])
def test_impossible_observations_are_refused(visits, match):
    with pytest.raises(ValueError, match=match):
        observe(history.init(2), *visits)


@settings(deadline=None)
@given(visits=st.lists(st.integers(0, 9).flatmap(
    lambda trials: st.tuples(st.integers(0, trials), st.just(trials))), max_size=12),
    decay=st.floats(0, 1))
def test_the_estimate_is_the_plain_decayed_sum_and_stays_inside(visits, decay):
    cfg = config.History(decay=decay)
    state, right, total = history.init(2), 0.0, 0.0
    for successes, trials in visits:
        state = observe(state, (1, successes, trials, 0 < successes < trials), cfg=cfg)
        if trials:
            right, total = decay * right + successes, decay * total + trials
    a, b = history.posterior(state, cfg)
    assert a[1] == pytest.approx(1 + right, rel=1e-5)
    assert b[1] == pytest.approx(1 + total - right, rel=1e-5, abs=1e-4)  # sums are float32
    assert a.min() >= 1 and b.min() >= 1 and 0 < history.mean(state, cfg)[1] < 1


def test_the_table_lists_the_prompts_that_were_sampled():
    state = history.visit(history.init(5), np.array([3, 1]), step=7)
    columns = history.table(observe(state, (3, 2, 4, True)), CFG)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "prompt": [1, 3], "visits": [1, 1], "mean": [1 / 3, 3 / 7], "trials": [0, 4],
        "streak": [0, 0], "last": [7, 7]}


def test_the_shares_say_how_many_prompts_lie_at_each_pass_rate():
    state = observe(history.init(8), (0, 0, 20, False), (3, 0, 10, False), (5, 20, 20, False),
                    (6, 4, 7, True))
    # 1/23, 1/13, 21/23 and 5/10, which opens its tenth; the other four were never scored.
    found = history.shares(state, CFG)
    expected = {"history/unseen": 4, "history/rate_0": 2, "history/rate_5": 1, "history/rate_9": 1}
    assert {name: 8 * value for name, value in found.items() if value} == expected
    assert len(found) == 1 + history.BINS and sum(found.values()) == pytest.approx(1)
    assert history.shares(history.init(3), CFG)["history/unseen"] == 1
