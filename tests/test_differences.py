"""Paired differences against scipy and plain loops, and what is said of them."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from dapo_jax.runtime import differences

OWN = {0: 0.52, 1: 0.61, 2: 0.55, 3: 0.70, 9: 0.1}
OTHER = {0: 0.50, 1: 0.57, 2: 0.56, 3: 0.62, 7: 0.9}


def test_students_interval_and_chance_are_scipys():
    one, = differences.against({"b": OTHER, "a": OWN}, "b")
    assert (one.name, one.other, one.seeds) == ("a", "b", (0, 1, 2, 3))
    own, other = (np.array([of[seed] for seed in one.seeds]) for of in (OWN, OTHER))
    test = scipy.stats.ttest_rel(own, other)
    bounds = test.confidence_interval(0.95)
    assert one.mean == pytest.approx(np.mean(own - other))
    assert (one.student.low, one.student.high) == pytest.approx((bounds.low, bounds.high))
    assert one.chance == pytest.approx(test.pvalue)


def test_the_bootstrap_of_few_values_is_that_of_all_resamples():
    values = [0.3, -0.1, 0.8, 0.25]
    means = [sum(row) / 4 for row in itertools.product(values, repeat=4)]
    got = differences.bootstrap(values)
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert got.mean == pytest.approx(np.mean(values))


def test_the_bootstrap_of_many_values_is_near_scipys():
    values = np.random.default_rng(3).normal(0.2, 1.0, 40)
    got = differences.bootstrap(values)
    want = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000,
                                 rng=np.random.default_rng(1)).confidence_interval
    # Both are drawn: their bounds differ by a few hundredths of the interval's 0.6.
    assert (got.low, got.high) == pytest.approx((want.low, want.high), abs=0.02)


def test_holms_correction_is_that_of_a_plain_loop():
    chances = [0.01, math.nan, 0.04, 0.03, 0.005]
    known = sorted(one for one in chances if not math.isnan(one))
    want = {}
    for rank, one in enumerate(known):
        stepped = [min(1.0, (len(known) - k) * known[k]) for k in range(rank + 1)]
        want[one] = max(stepped)
    got = differences.holm(chances)
    assert math.isnan(got[1])
    assert [got[place] for place in (0, 2, 3, 4)] == pytest.approx(
        [want[chances[place]] for place in (0, 2, 3, 4)])


@pytest.mark.parametrize("own, words", [
    ({}, "no seed in common"), ({0: 1.0}, "one seed in common: that says nothing"),
    ({0: 0.5, 1: 0.6, 2: 0.7}, "the same in all 3 seeds"),
    ({0: 0.8, 1: 0.91, 2: 1.0}, "a real difference: higher by 0.303"),
    ({0: 0.2, 1: 0.31, 2: 0.4}, "a real difference: lower by 0.297"),
    ({0: 0.55, 1: 0.9, 2: 0.75}, "no difference shown, although all seeds agree: 3 seeds"),
    ({0: 0.3, 1: 0.9, 2: 0.75},
     "no difference shown: 3 seeds like these can show one of about 0.62 or more"),
    ({0: 0.6, 1: 0.7}, "no difference shown, although the seeds agree to the digit: 2 do so by"),
    ({0: math.nan, 1: 0.6}, "one seed in common")])
def test_what_is_said_follows_from_the_pairs(own, words):
    one, = differences.against({"base": {0: 0.5, 1: 0.6, 2: 0.7}, "own": own}, "base")
    assert one.words.startswith(words), one.words


@pytest.mark.parametrize("count", [2, 3, 6])
def test_equal_differences_are_judged_by_their_signs(count):
    agree = sum(len(set(signs)) == 1 for signs in itertools.product((1, -1), repeat=count))
    assert differences.chance([0.5] * count) == agree / 2 ** count
    assert differences.chance([0.0] * count) == 1.0


def test_several_comparisons_are_corrected_together():
    """Alone the difference is real (p = 0.02), among five it is not."""
    base = {0: 0.5, 1: 0.6, 2: 0.7}
    own = {0: 0.54, 1: 0.65, 2: 0.75 + 0.01}
    others = {f"other {k}": {0: 0.5 + k / 9, 1: 0.6 - k / 7, 2: 0.75} for k in range(4)}
    alone, = differences.against({"base": base, "own": own}, "base")
    among = differences.against({"own": own, "base": base, **others}, "base")[0]
    assert alone.words.startswith("a real") and among.words.startswith("no difference shown")
    assert among.chance > alone.chance and "corrected for 5 comparisons" in among.words


def test_settings_are_comparable_where_two_share_two_seeds():
    assert differences.comparable({"a": OWN, "b": OTHER, "c": {}})
    assert not differences.comparable({"a": OWN})
    assert not differences.comparable({"a": {0: 1.0, 1: 2.0}, "b": {1: 1.0, 2: 1.0}})
