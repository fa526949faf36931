import dataclasses

import numpy as np
import pytest

from dapo_jax import types
from dapo_jax.dynamic_sampling import narrow

WIDTH = 4


def samples(count, seed):
    rng = np.random.default_rng(seed)
    return types.Samples(**{
        name: rng.integers(0, 9, (count, *column.shape[1:])).astype(column.dtype)
        for name, column in vars(types.no_samples(WIDTH)).items()})


def assert_equal(found, wanted):
    for field in dataclasses.fields(types.Samples):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert one.dtype == other.dtype and np.array_equal(one, other), field.name


@pytest.mark.parametrize("order", ["as they came", "shuffled", "some"])
def test_rows_of_several_sources_get_their_own_tokens_back_in_any_order(order):
    sources = [samples(3, 0), samples(0, 1), samples(5, 2)]
    first, rows = 0, types.no_samples(0)
    for source in sources:
        rows = types.concatenate(rows, narrow.without_tokens(source, first=first))
        first += len(source)
    chosen = {"as they came": np.arange(8), "shuffled": np.random.default_rng(3).permutation(8),
              "some": np.array([6, 1])}[order]
    found = narrow.with_tokens(rows.take(chosen), sources)
    assert_equal(found, types.concatenate(sources[0], sources[2]).take(chosen))


def test_rows_without_tokens_hold_none():
    rows = narrow.without_tokens(samples(3, 0), first=7)
    assert rows.tokens.tolist() == [[7], [8], [9]]
    assert rows.loss_mask.shape == rows.logprobs.shape == (3, 0)


def test_no_rows_keep_their_width():
    source = samples(2, 0)
    rows = narrow.without_tokens(source, first=0).take(np.zeros(0, np.int32))
    assert_equal(narrow.with_tokens(rows, [source]), types.no_samples(WIDTH))
