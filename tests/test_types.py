import dataclasses

import numpy as np
import pytest

from dapo_jax import types


def samples(*groups):
    """A row for each group number."""
    rows = np.array(groups, np.int32)
    columns = {field.name: np.zeros((len(rows), *column.shape[1:]), column.dtype)
               for field in dataclasses.fields(types.Samples)
               for column in [getattr(types.no_samples(3), field.name)]}
    return types.Samples(**columns | {"group": rows, "tokens": np.stack([rows] * 3, axis=1)})


@pytest.mark.parametrize("rows", [np.arange(3), np.ones(3, bool)])
def test_all_rows_in_their_order_are_no_copy(rows):
    some = samples(4, 5, 6)
    assert some.take(rows) is some


@pytest.mark.parametrize("rows", [
    np.array([0, 2, 1]), np.array([0, 1]), np.array([0, 1, 1]), np.array([True, False, True]),
    np.array([], np.intp), np.zeros(3, bool)])
def test_other_rows_are_taken_from_every_column(rows):
    found = samples(4, 5, 6).take(rows)
    wanted = np.array([4, 5, 6])[rows].tolist()
    assert found.group.tolist() == wanted and found.tokens[:, 2].tolist() == wanted
    assert len(found.logprobs) == len(wanted) == len(found)


def test_samples_are_joined_in_order_and_nothing_adds_nothing():
    some, none = samples(4, 5), types.no_samples(3)
    assert types.concatenate(some, samples(9)).group.tolist() == [4, 5, 9]
    assert types.concatenate(some, none) is some and types.concatenate(none, some) is some
    assert len(types.concatenate(none, none)) == 0
