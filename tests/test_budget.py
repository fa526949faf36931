import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.dynamic_sampling import budget

rates = st.floats(0, 1).map(lambda p: round(p, 3))


def more(cfg, *groups, size=8):
    """`groups`: (successes, trials, drawn, rate) each; mixed where both outcomes occurred."""
    columns = [np.array(column) for column in zip(*groups)]
    successes, trials, drawn, rate = columns
    return budget.more(cfg, successes, trials, drawn=drawn, rate=rate, size=size,
                       mixed=(successes > 0) & (successes < trials)).tolist()


@pytest.mark.parametrize("p,n", [(0.5, 5), (0.25, 9), (0.1, 22), (0.05, 45)])
def test_the_published_sizes_make_both_outcomes_nine_tenths_sure(p, n):
    for rate in (p, 1 - p):
        assert budget.least_mixed(np.array(rate), tau=0.9, least=2, most=99) == n
    assert budget.mixed(p, n) >= 0.9 > budget.mixed(p, n - 1)


@settings(deadline=None)
@given(p=rates, n=st.integers(0, 9))
def test_the_chance_of_a_mixed_group_is_that_of_all_outcomes_counted(p, n):
    chance = 0.0
    for outcome in itertools.product((0, 1), repeat=n):
        if 0 < sum(outcome) < n:
            chance += p ** sum(outcome) * (1 - p) ** (n - sum(outcome))
    assert budget.mixed(p, n) == pytest.approx(chance, abs=1e-12)


def test_a_size_out_of_reach_is_the_bound():
    sizes = budget.least_mixed(np.array([0.0, 0.05, 0.5, 1.0]), tau=0.9, least=4, most=16)
    assert sizes.tolist() == [16, 16, 5, 16] and sizes.dtype == np.int32
    assert budget.least_mixed(np.array([0.5]), tau=0.9, least=7, most=7).tolist() == [7]


def best(p, total, least, most):
    """The largest expected number of mixed groups, by trying every split."""
    def worth(rate, n):
        return 1 - rate ** n - (1 - rate) ** n if n > 1 else 0.0

    @functools.cache
    def search(i, left):
        if i == len(p):
            return 0.0
        return max((worth(p[i], n) + search(i + 1, left - n)
                    for n in range(least, min(most, left) + 1)
                    if least * (len(p) - i - 1) <= left - n), default=-9.0)
    return search(0, total)


@settings(deadline=None, max_examples=300)
@given(p=st.lists(st.one_of(rates, st.sampled_from([0.5, 0.25, 0.75, 0.0])), min_size=1,
                  max_size=5),
       least=st.sampled_from([0, 0, 2, 3]), spread=st.integers(0, 6), extra=st.integers(0, 20))
def test_taking_the_largest_gain_next_is_as_good_as_any_split(p, least, spread, extra):
    most, total = max(least, 2) + spread, least * len(p) + extra
    sizes = budget.allocate(np.array(p), total=total, least=least, most=most)
    assert sum(sizes) <= total and sizes.min() >= least and sizes.max() <= most
    assert not np.any(sizes == 1)
    got = float(np.sum(budget.mixed(np.array(p), sizes)))
    assert got == pytest.approx(best(tuple(p), total, least, most), abs=1e-9)


def test_two_pairs_are_worth_more_than_one_group_of_four():
    assert budget.allocate(np.array([0.5, 0.48]), total=4, least=0, most=8).tolist() == [2, 2]
    assert budget.allocate(np.array([0.5, 0.01]), total=4, least=0, most=8).tolist() == [4, 0]
    assert budget.allocate(np.array([0.1, 0.9, 0.1, 0.1]), total=3, least=0, most=7).max() == 3
    assert budget.allocate(np.zeros(0), total=0, least=2, most=8).tolist() == []


def test_a_total_that_cannot_be_split_is_refused():
    for total, least in ((5, 2), (9, 1)):
        with pytest.raises(ValueError, match="budget.allocate"):
            budget.allocate(np.array([0.5, 0.5, 0.5]), total=total, least=least, most=8)


def test_fixed_is_one_stage():
    assert more(config.Budget(), (0, 0, 0, 0.5), (0, 8, 8, 0.5), (0, 3, 8, 0.9)) == [8, 0, 0]


def test_hard_prompts_get_more_within_bounds_and_in_one_stage():
    cfg = config.Budget(kind="hard_more", least=4, most=16)
    new = [(0, 0, 0, p) for p in (0.5, 0.25, 0.75, 0.05, 0.0)]
    assert more(cfg, *new, (0, 5, 5, 0.5)) == [5, 9, 9, 16, 16, 0]
    assert more(config.Budget(kind="hard_more"), (0, 0, 0, 0.0)) == [16]  # twice the size


def test_screening_drops_what_stays_unmixed_and_completes_the_rest():
    cfg = config.Budget(kind="screening", first=2, stages=2)
    assert more(cfg, (0, 0, 0, 0.5), (0, 2, 2, 0.5), (1, 2, 2, 0.5), (0, 4, 4, 0.5),
                (4, 4, 4, 0.5), (1, 4, 4, 0.5), (1, 8, 8, 0.5)) == [2, 2, 6, 0, 0, 4, 0]


def test_successive_goes_on_until_enough_of_each_outcome_or_the_bound():
    cfg = config.Budget(kind="successive", first=4, each=2, most=10)
    assert more(cfg, (0, 0, 0, 0.5), (1, 4, 4, 0.5), (2, 4, 4, 0.5), (0, 8, 8, 0.5),
                (0, 10, 10, 0.5), (7, 8, 8, 0.5)) == [4, 4, 0, 2, 0, 2]


def test_an_allocation_spends_the_mean_budget_where_it_makes_groups_mixed():
    cfg = config.Budget(kind="allocate", least=4, most=16)
    sizes = more(cfg, (0, 0, 0, 0.5), (0, 0, 0, 0.1), (0, 0, 0, 0.02), (3, 8, 8, 0.5))
    assert sum(sizes) == 3 * 8 and sizes[3] == 0 and sizes[0] < sizes[1] and sizes[2] >= 4
    expected = budget.allocate(np.array([0.5, 0.1, 0.02]), total=24, least=4, most=16)
    assert sizes[:3] == expected.tolist()


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(budget.KINDS)), p=rates, known=rates, failing=st.floats(0, 1),
       first=st.integers(2, 5), stages=st.integers(1, 3), each=st.integers(1, 4),
       least=st.integers(2, 6), size=st.integers(6, 12), seed=st.integers(0, 99))
def test_every_budget_ends_within_its_bound(kind, p, known, failing, first, stages, each, least,
                                            size, seed):
    cfg = config.Budget(kind=kind, first=first, stages=stages, each=each, least=least)
    rng, drawn, outcomes = np.random.default_rng(seed), 0, []
    for _ in range(2 * size + 2):
        now = more(cfg, (sum(outcomes), len(outcomes), drawn, known), size=size)[0]
        drawn += now
        outcomes += [bool(rng.random() < p) for _ in range(now) if rng.random() >= failing]
        if not now:
            break
    assert now == 0 and 2 <= drawn <= budget.most(cfg, size) <= 2 * size
    if kind == "successive":
        assert min(sum(outcomes), len(outcomes) - sum(outcomes)) >= each or drawn == 2 * size


def test_an_unknown_rate_of_reward_still_counts_as_mixed_where_rewards_differ():
    cfg = config.Budget(kind="screening", first=2)
    assert budget.more(cfg, np.array([0]), np.array([2]), drawn=np.array([2]),
                       mixed=np.array([True]), rate=np.array([0.5]), size=8).tolist() == [6]
