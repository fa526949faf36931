import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import types
from dapo_jax.buffer import buffer


def rows(group: list[int], born: list[int] | int = 0) -> types.Samples:
    """Rows whose every column holds the row's number, so that a misaligned column shows."""
    n = len(group)
    number = np.arange(n)
    wide = np.repeat(number[:, None], 3, axis=1)
    return types.Samples(
        tokens=wide.astype(np.int32), loss_mask=np.ones((n, 3), bool),
        logprobs=wide.astype(np.float32), length=np.full(n, 3, np.int32),
        stopped=np.ones(n, bool), reward=number.astype(np.float32),
        shaped=number.astype(np.float32), valid=np.ones(n, bool),
        group=np.array(group, np.int32), prompt=number.astype(np.int32),
        visit=np.zeros(n, np.int32), sample=number.astype(np.int32),
        born=np.broadcast_to(np.array(born, np.int32), (n,)).copy())


def aligned(samples: types.Samples) -> list[int]:
    """Row numbers, after checking that every column has the same ones."""
    for column in (samples.reward, samples.shaped, samples.prompt, samples.sample,
                   samples.tokens[:, 1], samples.logprobs[:, 2]):
        assert column.tolist() == samples.prompt.tolist()
    return samples.prompt.tolist()


def test_draw_takes_whole_groups_in_order_of_appearance():
    drawn, rest = buffer.draw(rows([7, 7, 2, 7, 9, 2, 9]), 2)
    assert aligned(drawn) == [0, 1, 2, 3, 5] and aligned(rest) == [4, 6]


@pytest.mark.parametrize("count,drawn", [(-1, 0), (0, 0), (1, 1), (3, 3), (9, 3)])
def test_draw_gives_what_there_is(count, drawn):
    first, rest = buffer.draw(rows([4, 4, 3, 1, 1]), count)
    assert buffer.groups(first) == drawn and buffer.groups(rest) == 3 - drawn


@given(group=st.lists(st.integers(0, 6), max_size=20), count=st.integers(0, 8))
def test_draw_loses_nothing_and_splits_no_group(group, count):
    drawn, rest = buffer.draw(rows(group), count)
    order = list(dict.fromkeys(group))
    assert set(drawn.group.tolist()) == set(order[:count])
    assert set(rest.group.tolist()) == set(order[count:])
    assert sorted(aligned(drawn) + aligned(rest)) == list(range(len(group)))


def test_add_appends_and_refuses_a_group_twice():
    both = buffer.add(rows([5, 5]), rows([3]))
    assert both.group.tolist() == [5, 5, 3] and len(both.logprobs) == 3
    with pytest.raises(ValueError, match="group 5 is in the buffer"):
        buffer.add(both, rows([8, 5]))


def test_add_to_an_empty_buffer_keeps_dtypes():
    both = buffer.add(types.no_samples(3), rows([5, 5]))
    assert both.group.dtype == np.int32 and both.valid.dtype == bool
    assert both.logprobs.dtype == np.float32 and aligned(both) == [0, 1]


@pytest.mark.parametrize("carry,left,expired", [(0, [], 3), (1, [6, 6], 2), (2, [5, 6, 6], 1),
                                                (3, [4, 4, 5, 6, 6], 0)])
def test_groups_over_the_age_are_dropped_whole_and_counted(carry, left, expired):
    kept, gone = buffer.evict(rows([4, 4, 5, 6, 6], born=[7, 7, 8, 9, 9]), step=10,
                              carry_steps=carry)
    assert kept.group.tolist() == left and gone == expired
    aligned(kept)


def test_groups_of_the_current_step_never_expire():
    assert buffer.evict(rows([1, 2], born=10), step=10, carry_steps=0)[1] == 0


def test_age_is_a_mean_over_groups_not_rows():
    assert buffer.mean_age(rows([4, 4, 4, 5], born=[7, 7, 7, 9]), step=10) == 2.0
    assert np.isnan(buffer.mean_age(types.no_samples(3), step=10))


def test_nothing_is_changed_in_place():
    held = rows([1, 2, 2])
    for column in vars(held).values():
        column.setflags(write=False)
    buffer.add(held, rows([9]))
    buffer.draw(held, 1)
    buffer.evict(held, step=5, carry_steps=0)
    assert aligned(held) == [0, 1, 2]


def test_a_limit_drops_whole_groups_from_the_end_and_counts_them():
    kept, dropped = buffer.limit(rows([4, 4, 3, 1, 1]), 2)
    assert kept.group.tolist() == [4, 4, 3] and dropped == 1 and aligned(kept) == [0, 1, 2]
    assert buffer.limit(rows([4, 3]), 5)[1] == 0 and buffer.limit(rows([4, 3]), 0)[1] == 2
