import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.dynamic_sampling import choice, history, order


def setup(kind, **changes):
    return config.DynamicSampling(choice=config.Choice(kind=kind, **changes))


def request(count, past, *, avoid=(), step=0, seed=3, epochs=0):
    return choice.Request(count=count, avoid=np.array(avoid, np.int32), history=past, step=step,
                          seed=seed, epochs=epochs)


def known(size, **columns):
    return dataclasses.replace(history.init(size), **{
        name: np.asarray(values) for name, values in columns.items()})


def test_epochs_is_the_plain_order():
    got = choice.take(order.init(9, 3), request(5, history.init(9)), setup("epochs"))
    _, expected = order.take(order.init(9, 3), 5, seed=3, avoid=(), epochs=0)
    assert got.prompt.tolist() == expected.tolist() and got.skipped == 0


def test_the_chance_to_be_skipped_grows_with_the_streak_up_to_its_bound():
    cfg = config.Choice(skip_growth=0.25, skip_most=0.6)
    assert choice.skip_chance(np.arange(5), cfg).tolist() == [0, 0.25, 0.5, 0.6, 0.6]


def test_turns_are_skipped_as_often_as_the_chance_says_and_each_prompt_comes_back():
    size, epochs = 40, 200
    past = known(size, streak=np.where(np.arange(size) < 20, 9, 0))
    cfg, state, came, skipped = setup("skip", skip_most=0.75), order.init(size, 3), [], 0
    for step in range(epochs):
        while not order.exhausted(state, step + 1):
            got = choice.take(state, request(4, past, epochs=step + 1), cfg)
            state, skipped = got.order, skipped + got.skipped
            came += got.prompt.tolist()
    counts = np.bincount(came, minlength=size)
    assert counts[20:].tolist() == [epochs] * 20
    assert skipped + len(came) == size * epochs
    # 4000 turns at 1/4: mean 50 of 200 each, standard deviation 6.1; of the mean over 20: 1.4.
    assert abs(counts[:20].mean() - 50) < 6 and counts[:20].min() > 50 - 5 * 6.1


def test_a_short_table_gives_skipped_prompts_after_all():
    past = known(6, streak=np.full(6, 99))
    got = choice.take(order.init(6, 3), request(6, past), setup("skip", skip_most=0.99))
    assert sorted(got.prompt.tolist()) == list(range(6)) and got.skipped == 0
    got = choice.take(order.init(6, 3), request(2, past), setup("skip", skip_most=0.99))
    assert len(set(got.prompt.tolist())) == 2 and got.skipped == 4


def test_at_the_end_of_the_epochs_skipped_prompts_do_not_come_after_all():
    past = known(6, streak=np.full(6, 99))
    got = choice.take(order.init(6, 3), request(6, past, epochs=1), setup("skip", skip_most=0.99))
    assert got.skipped == 6 and len(got.prompt) == 0 and order.exhausted(got.order, 1)


def test_without_a_streak_skip_is_the_plain_order():
    got = choice.take(order.init(9, 3), request(7, history.init(9)), setup("skip"))
    _, expected = order.take(order.init(9, 3), 7, seed=3, avoid=(), epochs=0)
    assert got.prompt.tolist() == expected.tolist() and got.skipped == 0


def test_difficulty_prefers_prompts_whose_pass_rate_is_near_the_target():
    past = known(60, successes=np.repeat([0.0, 50, 100], 20), trials=np.full(60, 100.0))
    counts = np.zeros(60)
    for step in range(20):
        got = choice.take(order.init(60, 3), request(15, past, step=step), setup("difficulty"))
        counts[got.prompt] += 1
    assert counts[:20].sum() == counts[40:].sum() == 0 and counts[20:40].min() > 0
    easy = setup("difficulty", target=0.9)
    assert choice.take(order.init(60, 3), request(20, past), easy).prompt.min() >= 40


def test_an_unknown_prompt_is_tried_among_known_ones():
    past = known(100, successes=np.r_[np.zeros(50), np.full(50, 45.0)],
                 trials=np.r_[np.zeros(50), np.full(50, 100.0)])
    got = [choice.take(order.init(100, 3), request(30, past, step=step), setup("difficulty"))
           for step in range(10)]
    unknown = np.mean([np.mean(one.prompt < 50) for one in got])
    assert 0.05 < unknown < 0.6


def test_no_visited_prompt_waits_longer_than_the_gap():
    size, gap, per_step = 30, 12, 4
    cfg = setup("difficulty", longest_gap=gap)
    past = known(size, successes=np.r_[np.full(4, 50.0), np.zeros(26)], trials=np.full(size, 100.0),
                 visits=np.ones(size, np.int32), last=np.zeros(size, np.int32))
    waited = []
    for step in range(1, 80):
        got = choice.take(order.init(size, 3), request(per_step, past, step=step), cfg)
        waited += (step - past.last[got.prompt]).tolist()
        past = history.visit(past, got.prompt, step=step)
    # All fall due together at first and are served 4 a step: 30 / 4 steps more than the gap.
    assert max(waited) <= gap + 8 and (step - past.last).max() <= gap + 8


@settings(deadline=None, max_examples=80)
@given(kind=st.sampled_from(sorted(choice.KINDS)), size=st.integers(1, 12), seed=st.integers(0, 5),
       epochs=st.integers(0, 3), steps=st.lists(st.lists(st.integers(0, 9), max_size=3),
                                                max_size=6))
def test_no_prompt_twice_in_a_step_and_fewer_only_at_an_end(kind, size, seed, epochs, steps):
    cfg, state = setup(kind), order.init(size, seed)
    rng = np.random.default_rng(seed)
    past = known(size, streak=rng.integers(0, 5, size).astype(np.int32))
    for step, rounds in enumerate(steps):
        sampled: list[int] = []
        for count in rounds:
            now = request(count, past, avoid=sampled, step=step, seed=seed, epochs=epochs)
            got, again = (choice.take(copy.deepcopy(state), now, cfg) for _ in range(2))
            assert got.prompt.tolist() == again.prompt.tolist() and got.skipped == again.skipped
            assert got.prompt.dtype == np.int32 and len(got.prompt) <= count and got.skipped >= 0
            state = got.order
            sampled += got.prompt.tolist()
            if len(got.prompt) < count:
                assert len(sampled) == size or choice.exhausted(state, epochs, cfg.choice)
        assert len(set(sampled)) == len(sampled)
        past = history.visit(past, np.array(sampled, np.int32), step=step)


@pytest.mark.parametrize("kind", ["skip", "difficulty"])
def test_choices_differ_between_seeds_and_between_steps_or_epochs(kind):
    past = known(50, streak=np.full(50, 2))
    cfg, first = setup(kind), order.init(50, 3)
    second = dataclasses.replace(first, epoch=np.asarray(1, np.int32))
    got = [choice.take(start, request(10, past, seed=seed, step=step), cfg).prompt.tolist()
           for start, seed, step in ((first, 3, 0), (first, 4, 0), (second, 3, 1))]
    assert got[0] != got[1] and got[0] != got[2]


def test_difficulty_has_no_epochs():
    spent = dataclasses.replace(order.init(3, 0), cursor=np.asarray(3, np.int32))
    assert choice.exhausted(spent, 1, config.Choice())
    assert not choice.exhausted(spent, 1, config.Choice(kind="difficulty"))
