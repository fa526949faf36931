"""Strategies that choose samples, against brute force and plain loops."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import config, types
from dapo_jax.buffer import diverse, select
from dapo_jax.learner import advantages

KEY = select.Key(seed=3, step=10)


def made(group, *, reward=None, tokens=None, length=None, born=9, valid=None, shaped=None):
    """Samples with the given columns; tokens tell rows apart unless given."""
    n = len(group)
    group = np.array(group, np.int32)
    tokens = np.array(tokens if tokens is not None else
                      np.arange(n * 4).reshape(n, 4), np.int32).reshape(n, -1)
    width = tokens.shape[1]
    length = np.full(n, width, np.int32) if length is None else np.array(length, np.int32)
    reward = np.zeros(n, np.float32) if reward is None else np.array(reward, np.float32)
    sample = np.array([np.sum(group[:i] == group[i]) for i in range(n)], np.int32)
    return types.Samples(
        tokens=tokens, loss_mask=np.arange(width) < length[:, None],
        logprobs=np.zeros((n, width), np.float32), length=length, stopped=np.ones(n, bool),
        reward=reward, shaped=reward if shaped is None else np.array(shaped, np.float32),
        valid=np.ones(n, bool) if valid is None else np.array(valid), group=group,
        prompt=group, visit=np.zeros(n, np.int32), sample=sample,
        born=np.broadcast_to(np.array(born, np.int32), (n,)).copy())


def configured(*entries, **changes):
    """The strategies that a configuration names."""
    return select.strategies(config.Config(
        select=config.Select(strategies=entries, **{k: v for k, v in changes.items()
                                                    if k != "evict"}),
        buffer=config.Buffer(evict=changes.get("evict", "oldest"))))


ragged = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.25, 1.0]),
                            st.integers(1, 4)), min_size=1, max_size=24)
EACH = [("max_variance", 2), ("max_variance", 3), ("diverse", 2), ("diverse", 3),
        ("length_strata", 2), ("length_strata", 5)]


def from_rows(rows):
    group, reward, length = zip(*rows)
    return made(group, reward=reward, length=length,
                tokens=np.arange(len(rows))[:, None] % 3 + np.arange(4) % 2)


# ------------------------------------------------------------------------------- one by one


def test_wrong_samples_are_rejected_by_the_raw_reward():
    samples = made([0, 0, 1], reward=[1, 0.4, 0.5], shaped=[-1, 1, 0])
    assert select.reject_wrong(samples, KEY, least=0.5).tolist() == [0, 2]


@given(rewards=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=9),
       count=st.integers(2, 6))
def test_both_ends_have_the_largest_variance_of_all_subsets(rewards, count):
    """PODS: brute force over every subset."""
    samples = made([7] * len(rewards), reward=np.zeros(len(rewards)), shaped=rewards)
    kept = select.max_variance(samples, KEY, count=count)
    assert len(kept) == min(count, len(rewards))
    values = np.array(rewards, np.float64)
    best = max(np.var(values[list(rows)])
               for rows in itertools.combinations(range(len(rewards)), len(kept)))
    assert np.var(values[kept]) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_of_equal_rewards_the_key_draws_which_stay():
    samples = made([0] * 8, reward=[1] * 4 + [0] * 4)
    kept = [tuple(select.max_variance(samples, select.Key(seed, 1), count=4)) for seed in range(9)]
    assert all(sum(row < 4 for row in rows) == 2 for rows in kept) and len(set(kept)) > 3


def test_distances_count_runs_of_tokens_as_a_plain_loop_does():
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, 3, (7, 6)), rng.integers(1, 7, 7)
    texts = [list(row[:n]) for row, n in zip(tokens, length)]
    for longest in (1, 2, 4):
        wanted = [[reference.ngram_distance(a, b, longest) for b in texts] for a in texts]
        got = diverse.ngram_distances(tokens.astype(np.int32), np.arange(6) < length[:, None],
                                      longest=longest)
        np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_what_an_environment_told_is_in_no_run_and_runs_do_not_go_over_it():
    rng = np.random.default_rng(0)
    tokens, own = rng.integers(0, 3, (6, 9)), rng.random((6, 9)) < 0.7
    own[:, 0] = True
    turns = [[[int(token) for _, token in run] for mine, run in itertools.groupby(
        zip(mask, row), key=lambda pair: pair[0]) if mine] for mask, row in zip(own, tokens)]
    features = [collections.Counter(
        tuple(turn[at:at + order]) for turn in said for order in (1, 2, 3)
        for at in range(len(turn) - order + 1)) for said in turns]
    norms = [sum(count ** 2 for count in one.values()) ** 0.5 for one in features]
    wanted = [[sum((one[run] / n - other[run] / m) ** 2 for run in one | other)
               for other, m in zip(features, norms)] for one, n in zip(features, norms)]
    got = diverse.ngram_distances(tokens, own, longest=3)
    np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_runs_longer_than_the_completions_are_not_looked_for(monkeypatch):
    looked, runs = [], diverse._runs
    monkeypatch.setattr(diverse, "_runs", lambda *of: looked.append(of[2]) or runs(*of))
    tokens = np.random.default_rng(0).integers(0, 3, (5, 4))
    for longest in (4, 2000):
        got = diverse.ngram_distances(tokens, np.ones((5, 4), bool), longest=longest)
        wanted = [[reference.ngram_distance(a, b, 4) for b in tokens.tolist()]
                  for a in tokens.tolist()]
        np.testing.assert_allclose(got, wanted, atol=1e-9)
    assert looked == [1, 2, 3, 4] * 2


def test_far_apart_is_within_twice_the_best_radius():
    """k-centre: brute force over all choices of centres."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        points = rng.normal(size=(8, 2))
        distances = ((points[:, None] - points) ** 2).sum(-1)

        def radius(centres, distances=distances):
            return np.sqrt(distances[list(centres)].min(axis=0).max())

        chosen = diverse.farthest(distances, 3, first=[0])
        assert len(set(chosen)) == 3
        best = min(radius(rows) for rows in itertools.combinations(range(8), 3))
        assert radius(chosen) <= 2 * best + 1e-9


def test_repeats_are_left_out_and_the_odd_one_is_found():
    texts = [[1, 2, 3, 4]] * 5 + [[9, 8, 7, 6], [1, 2, 3, 5]]
    samples = made([0] * 7, tokens=texts)
    kept = [texts[row] for row in select.diverse(samples, KEY, count=2, ngram=2)]
    assert [9, 8, 7, 6] in kept and len(kept) == 2
    assert len(select.diverse(samples, KEY, count=5, ngram=2)) == 3  # distinct ones
    told = dataclasses.replace(made([0] * 3, tokens=[[1, 9, 2], [1, 8, 2], [1, 7, 2]]),
                               loss_mask=np.array([[True, False, True]] * 3))
    assert len(select.diverse(told, KEY, count=3, ngram=2)) == 1  # the policy said the same


# A state by tokens, of a policy that sees the order of the first two only.
def states_of(samples):
    first, second = samples.tokens[:, 0], samples.tokens[:, 1]
    return np.stack([first + 1, 2.0 * second + 1, np.ones(len(samples))], axis=1).astype("f4")


def test_distances_of_states_are_those_of_their_directions():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(6, 5)).astype("f4") * np.array([1, 9, 1, 1, 1, 0])[:, None]
    tokens = np.array([[1, 2, 0], [1, 3, 0], [1, 2, 9], [4, 4, 4], [1, 3, 7], [5, 5, 5]])
    length = np.array([2, 2, 2, 3, 3, 3])
    found = diverse.state_distances(states, tokens, length)
    for i, j in itertools.product(range(6), repeat=2):
        same = tokens[i, :length[i]].tolist() == tokens[j, :length[j]].tolist()
        one, other = (states[k].astype("f8") / (np.linalg.norm(states[k].astype("f8")) or 1)
                      for k in (i, j))
        assert found[i, j] == pytest.approx(0 if same else ((one - other) ** 2).sum(), abs=1e-12)
    assert found[0, 2] == 0 < found[0, 1]  # equal but for what is behind the end


def test_by_states_a_subset_lies_as_far_apart_as_a_plain_loop_finds():
    rng = np.random.default_rng(2)
    for trial in range(10):
        samples = made([0] * 7, tokens=rng.integers(0, 9, (7, 4)))
        states = rng.normal(size=(7, 3)).astype("f4")
        kept = select.diverse_states(samples, select.Key(trial, 1), states=states, count=3)
        unit = states / np.linalg.norm(states, axis=1, keepdims=True)
        gap = lambda a, b, unit=unit: float(((unit[a] - unit[b]) ** 2).sum())  # noqa: E731
        nexts = []
        for start in range(7):
            chosen = [start]
            while len(chosen) < 3:
                chosen.append(max((row for row in range(7) if row not in chosen),
                                  key=lambda row: min(gap(row, one) for one in chosen)))
            nexts.append(sorted(chosen))
        assert kept.tolist() in nexts


def test_states_are_made_of_what_is_left_when_a_strategy_reads_them():
    samples = made([0] * 4 + [1] * 3, reward=[1, 0, 1, 1, 0, 1, 1], tokens=[
        [0, 5], [0, 5], [0, 5], [7, 1], [3, 3], [2, 2], [2, 2]], valid=[True] * 6 + [False])
    asked = []
    strategies = configured(("reject_wrong", 0.5), ("diverse", 2), features="hidden")
    left = select.apply(strategies, samples, KEY,
                        states=lambda some: asked.append(some) or states_of(some))
    assert [one.tokens.tolist() for one in asked] == [[[0, 5], [0, 5], [7, 1], [2, 2]]]
    kept = np.flatnonzero(left.chosen)
    assert [samples.tokens[row].tolist() for row in kept if row > 0][-2:] == [[7, 1], [2, 2]]
    assert len(kept) == 3 and len(left.samples) == 7
    other = configured(("reject_wrong", 0.5), ("diverse", 2))
    select.apply(other, samples, KEY)  # asks for none
    with pytest.raises(ValueError, match="hidden states.*learner/features"):
        select.apply(strategies, samples, KEY)


@given(rows=ragged, seed=st.integers(0, 99), count=st.integers(1, 4))
def test_by_states_the_order_of_rows_and_other_groups_change_nothing(rows, seed, count):
    samples = from_rows(rows)
    kept = select.diverse_states(samples, KEY, states=states_of(samples), count=count)
    order = np.random.default_rng(seed).permutation(len(rows))
    moved = samples.take(order)
    again = order[select.diverse_states(moved, KEY, states=states_of(moved), count=count)]
    assert sorted(again.tolist()) == kept.tolist()
    mine = np.flatnonzero(samples.group == samples.group[0])
    alone = samples.take(mine)
    assert mine[select.diverse_states(alone, KEY, states=states_of(alone), count=count)
                ].tolist() == [row for row in kept if samples.group[row] == samples.group[0]]
    for group in np.unique(samples.group):
        right = samples.reward[samples.group == group] >= 0.5
        if count > 1 and 0 < right.sum() < len(right):
            left = samples.reward[kept[samples.group[kept] == group]] >= 0.5
            assert left.any() and not left.all()


def test_equal_shares_come_from_each_quarter_of_the_lengths():
    length = np.array([1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 7, 8, 9, 9])
    samples = made([0] * 16, length=length, tokens=np.zeros((16, 9)))
    for seed in range(9):
        kept = select.length_strata(samples, select.Key(seed, 1), count=8, strata=4)
        assert [int(np.sum((length[kept] >= low) & (length[kept] <= high)))
                for low, high in ((1, 2), (3, 4), (7, 9))] == [4, 2, 2]
    more = select.length_strata(samples, KEY, count=10, strata=4)
    assert len(more) == 10 and np.sum(length[more] >= 7) in (2, 3)


@pytest.mark.parametrize("steps, left", [(0, [3]), (1, [2, 3]), (5, [1, 1, 2, 3])])
def test_groups_over_the_age_leave_whole(steps, left):
    samples = made([1, 1, 2, 3], born=[5, 9, 9, 10])
    assert samples.group[select.max_age(samples, KEY, steps=steps)].tolist() == left


@pytest.mark.parametrize("evict, left", [("oldest", {4, 6}), ("least_spread", {2, 6})])
def test_too_many_groups_leave_in_order(evict, left):
    samples = made([2, 2, 4, 4, 6, 6], reward=[0, 1, 0, 0.5, 1, 0.2], born=[1, 1, 2, 2, 3, 3])
    rows = select.capacity(samples, KEY, groups=2, evict=evict)
    assert set(samples.group[rows].tolist()) == left and len(rows) == 4
    assert len(select.capacity(samples, KEY, groups=9, evict=evict)) == 6


def test_any_group_may_leave_at_random():
    samples = made([1, 2, 3, 4])
    left = {tuple(select.capacity(samples, select.Key(0, step), groups=2, evict="random"))
            for step in range(30)}
    assert len(left) == 6


# ------------------------------------------------------------------------------- of all of them


@given(rows=ragged, which=st.sampled_from(EACH))
def test_both_classes_are_kept_where_a_group_had_both(rows, which):
    samples = from_rows(rows)
    strategy, = configured(which)
    kept = strategy.choose(samples, KEY)
    right = samples.reward >= 0.5
    for group in np.unique(samples.group):
        mine = samples.group == group
        assert len(set(right[mine])) == len(set(right[kept][samples.group[kept] == group]))


@given(rows=ragged, which=st.sampled_from([*EACH, ("reject_wrong", 0.5), ("max_age", 1),
                                           ("capacity", 2)]), seed=st.integers(0, 99))
def test_the_rows_chosen_do_not_depend_on_their_order(rows, which, seed):
    samples = from_rows(rows)
    strategy, = configured(which)
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    kept = strategy.choose(samples, KEY)
    assert kept.tolist() == sorted(set(kept.tolist()))
    again = shuffled[strategy.choose(samples.take(shuffled), KEY)]
    assert sorted(again.tolist()) == kept.tolist()
    if strategy.most:
        assert max(np.bincount(samples.group[kept])) <= strategy.most


@given(rows=ragged, which=st.sampled_from(EACH))
def test_a_group_s_rows_do_not_depend_on_other_groups(rows, which):
    samples = from_rows(rows)
    strategy, = configured(which)
    kept = strategy.choose(samples, KEY)
    group = samples.group[0]
    mine = np.flatnonzero(samples.group == group)
    alone = mine[strategy.choose(samples.take(mine), KEY)]
    assert alone.tolist() == [row for row in kept if samples.group[row] == group]


def test_nothing_is_chosen_of_nothing():
    for entry in [*EACH, ("reject_wrong", 0.5), ("max_age", 1), ("capacity", 2)]:
        left = select.apply(configured(entry), types.no_samples(4), KEY)
        assert len(left.samples) == len(left.chosen) == 0


# ------------------------------------------------------------------------- one after another


def test_strategies_follow_each_other():
    samples = made([0] * 4 + [1] * 4, reward=[1, 1, 1, 0, 0, 0, 0, 0],
                   valid=[True, False, True, True] + [True] * 4)
    left = select.apply(configured(("reject_wrong", 0.5), ("diverse", 1)), samples, KEY)
    assert np.sum(left.chosen) == 1 and np.flatnonzero(left.chosen)[0] in (0, 2)
    left = select.apply((), samples, KEY)
    assert left.chosen.tolist() == samples.valid.tolist()


def advantage(left):
    """Of the rows of group 0 that are learned from: (reward, advantage) pairs."""
    one = left.samples
    values = advantages.dr_grpo(one.shaped, one.group, valid=one.valid, lengths=one.length,
                                settings=advantages.Settings())
    rows = left.chosen & (one.group == 0)
    return list(zip(one.shaped[rows].tolist(), values[rows].tolist()))


def test_advantages_count_the_group_as_the_strategy_says():
    samples = made([0] * 4 + [1] * 4, reward=[1, 0, 0, 0] + [0] * 4, tokens=np.zeros((8, 4)))
    # Before the selection: 1 - 1/4. After it, of one right and one wrong: 1 - 1/2.
    before = select.apply(configured(("reject_wrong", 0.5)), samples, KEY)
    assert len(before.samples) == 8 and advantage(before) == [(1, 0.75)]
    after = select.apply(configured(("max_variance", 2)), samples, KEY)
    assert len(after.samples) == 4 and advantage(after) == [(1, 0.5), (0, -0.5)]
    both = select.apply(configured(("max_variance", 2), ("reject_wrong", 0.5)), samples, KEY)
    assert advantage(both) == [(1, 0.5)]
    # A group that leaves whole leaves the statistics, and of the others all stay.
    whole = select.apply(configured(("reject_wrong", 0.5), ("capacity", 1)), samples, KEY)
    assert whole.samples.group.tolist() == [0] * 4 and advantage(whole) == [(1, 0.75)]


def test_the_most_rows_of_a_group_are_known_beforehand():
    assert select.most(configured(("reject_wrong", 0.5)), 8) == 8
    assert select.most(configured(("max_variance", 6), ("diverse", 2)), 8) == 2
    assert select.most(configured(("max_variance", 12)), 8) == 8


@pytest.mark.parametrize("entry, words", [
    ("diverse", "name and a number"), (("diverse", 2, 3), "name and a number"),
    (("reject", 0.5), "not known; did you mean reject_wrong"), (("max_variance", 1), "at least 2"),
    (("diverse", 1.5), "whole one"), (("capacity", True), "whole one"),
    (("reject_wrong", float("nan")), "finite reward"), (("reject_wrong", "x"), "finite reward")])
def test_what_is_no_strategy_is_refused_by_name(entry, words):
    with pytest.raises(config.ConfigError, match=f"config.select.strategies.*{words}"):
        configured(entry)


def test_hidden_features_that_nothing_reads_are_refused():
    with pytest.raises(config.ConfigError, match="features = 'hidden' has no effect.*'diverse', 2"):
        configured(("reject_wrong", 0.5), features="hidden")
    assert not any(one.reads_states for one in configured(("diverse", 2)))
