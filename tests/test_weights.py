import numpy as np
import pytest
import reference
from hypothesis import given, settings, strategies
from hypothesis.extra import numpy as arrays

from dapo_jax.learner import weights


def loss(scheme, per_token, mask, *, group=None, max_length=10):
    mask = np.array(mask, bool)
    group = np.zeros(len(mask), np.int32) if group is None else np.array(group)
    table = weights.WEIGHTS[scheme](mask, group, max_length=max_length)
    return float((table * np.array(per_token)).sum())


@pytest.mark.parametrize("scheme", weights.WEIGHTS)
@settings(max_examples=40, deadline=None)
@given(mask=arrays.arrays(bool, strategies.tuples(strategies.integers(1, 6),
                                                  strategies.integers(1, 5))),
       seed=strategies.integers(0, 99))
def test_weighted_sum_is_the_nested_mean_of_the_scheme(scheme, mask, seed):
    rng = np.random.default_rng(seed)
    per_token, group = rng.normal(size=mask.shape), rng.integers(0, 3, len(mask))
    table = weights.WEIGHTS[scheme](mask, group, max_length=7)
    want = reference.aggregate(per_token, mask, group, scheme=scheme, max_length=7)
    np.testing.assert_allclose((table * per_token).sum(), want, rtol=1e-6, atol=1e-6)
    assert table.dtype == np.float32 and ((table > 0) == mask).all()
    if scheme != "constant" and mask.any():
        np.testing.assert_allclose(table.sum(dtype=np.float64), 1, rtol=1e-6)


# Sequence A: 4 tokens of loss 1; sequence B: 1 token of loss 5.
TABLE = [[1.0, 1, 1, 1], [5, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_token_weights_are_no_mean_of_means():  # B25, B35
    assert loss("token", *TABLE) == pytest.approx(1.8)
    assert loss("sequence", *TABLE) == pytest.approx(3.0)


def test_group_weights_count_every_prompt_once():
    per_token, mask = [[2.0, 2], [4, 0], [8, 8]], [[1, 1], [1, 0], [1, 1]]
    assert loss("group", per_token, mask, group=[5, 5, 2]) == pytest.approx((8 / 3 + 8) / 2)


def test_constant_weights_know_the_limit_and_not_the_padding():  # B30
    for width in (4, 16):
        mask = np.arange(width) < np.array([[2], [4]])
        assert loss("constant", mask.astype(float), mask) == pytest.approx(0.3)


@pytest.mark.parametrize("scheme", sorted(set(weights.WEIGHTS) - {"constant"}))
def test_masked_samples_leave_the_denominator_too(scheme):  # B28
    mask = np.zeros((2, 6), bool)
    mask[0, :2] = True
    assert loss(scheme, np.ones((2, 6)), mask, group=[0, 1]) == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", weights.WEIGHTS)
def test_masking_everything_gives_zeros(scheme):  # B29
    table = weights.WEIGHTS[scheme](np.zeros((4, 3), bool), np.arange(4), max_length=3)
    assert (table == 0).all()


@pytest.mark.parametrize("scheme", weights.WEIGHTS)
def test_masked_rows_weigh_as_if_absent_and_rows_may_be_permuted(scheme):
    rng = np.random.default_rng(1)
    mask, group = rng.random((9, 5)) < 0.6, rng.integers(0, 3, 9)
    mask[::3] = False
    whole = weights.WEIGHTS[scheme](mask, group, max_length=5)
    kept = mask.any(axis=1)
    order = rng.permutation(np.flatnonzero(kept))
    part = weights.WEIGHTS[scheme](mask[order], group[order], max_length=5)
    np.testing.assert_array_equal(part, whole[order])


def test_weights_of_a_million_tokens_still_sum_to_one():
    table = weights.token(np.ones((1000, 1000), bool), np.zeros(1000, np.int32), max_length=1000)
    assert table.sum(dtype=np.float64) == pytest.approx(1.0, rel=1e-6)


def by_microbatch(mask, microbatch):
    tokens = mask.sum(axis=1)
    return weights.spread(mask, weights.shares(tokens, weights.microbatch_count(
        tokens, np.array(microbatch))))


def test_the_mean_of_microbatch_means_is_wrong_as_the_token_mean_is_not():
    """Losses of 2.0 on 100 tokens and 1.0 on 1000, a microbatch each."""
    mask = np.arange(1000) < np.array([[100], [1000]])
    per_token = mask * np.array([[2.0], [1.0]])
    right = weights.token(mask, np.arange(2), max_length=1000)
    assert (right * per_token).sum() == pytest.approx(1200 / 1100, rel=1e-5)
    wrong = by_microbatch(mask, [0, 1])
    assert (wrong * per_token).sum() == pytest.approx(1.5, rel=1e-5)
    np.testing.assert_array_equal(by_microbatch(mask, [0, 0]), right)


def test_a_microbatch_without_loss_tokens_is_in_no_mean():
    mask = np.array([[True] * 4, [False] * 4])
    np.testing.assert_array_equal(by_microbatch(mask, [0, 1]), [[0.25] * 4, [0] * 4])
