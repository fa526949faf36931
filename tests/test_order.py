import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import types
from dapo_jax.dynamic_sampling import order


def stream(size: int, seed: int, counts: list[int], epochs: int = 0) -> list[list[int]]:
    """Ids of steps that take `counts`, one call a step."""
    state, steps = order.init(size, seed), []
    for count in counts:
        state, ids = order.take(state, count, seed=seed, avoid=(), epochs=epochs)
        steps.append(ids.tolist())
    return steps


def test_each_epoch_is_another_permutation_and_a_second_run_gives_the_same():  # B58
    epochs = stream(10, 3, [10, 10, 10])
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs == stream(10, 3, [10, 10, 10])
    assert epochs != stream(10, 4, [10, 10, 10])


def test_the_split_into_steps_does_not_change_the_order_within_an_epoch():
    assert sum(stream(12, 5, [3, 1, 8]), []) == stream(12, 5, [12])[0]


def test_resume_inside_an_epoch_continues_it():  # B58, B64
    state = order.init(10, 3)
    state, _ = order.take(state, 24, seed=3, avoid=(), epochs=0)
    saved = types.EpochOrder(state.order.copy(), state.epoch.copy(), state.cursor.copy())
    _, going_on = order.take(state, 9, seed=3, avoid=(), epochs=0)
    _, resumed = order.take(saved, 9, seed=3, avoid=(), epochs=0)
    assert going_on.tolist() == resumed.tolist()


def test_prompts_of_this_step_move_behind_the_others_of_the_next_epoch():
    state, head = order.take(order.init(10, 1), 7, seed=1, avoid=(), epochs=0)
    state, tail = order.take(state, 8, seed=1, avoid=(), epochs=0)
    assert len(set(tail.tolist())) == 8
    assert set(tail[:3].tolist()) == set(range(10)) - set(head.tolist())
    state, last = order.take(state, 5, seed=1, avoid=(), epochs=0)
    shuffled = np.random.default_rng([1, order.STREAM, 1]).permutation(10).tolist()
    late = [prompt for prompt in shuffled if prompt in tail[:3].tolist()]
    early = [prompt for prompt in shuffled if prompt not in late]
    assert tail[3:].tolist() + last.tolist() == early + late


def test_a_table_smaller_than_the_step_is_given_once():
    state, ids = order.take(order.init(4, 0), 9, seed=0, avoid=(), epochs=0)
    assert sorted(ids.tolist()) == [0, 1, 2, 3]
    _, more = order.take(state, 2, seed=0, avoid=set(ids.tolist()), epochs=0)
    assert more.tolist() == [] and more.dtype == np.int32


def test_an_empty_table_gives_nothing():
    _, ids = order.take(order.init(0, 0), 3, seed=0, avoid=(), epochs=0)
    assert ids.tolist() == []


def test_the_last_epoch_ends_the_stream_and_says_so():
    state, ids = order.take(order.init(5, 0), 5, seed=0, avoid=(), epochs=2)
    assert not order.exhausted(state, 2) and order.exhausted(state, 1)
    state, more = order.take(state, 5, seed=0, avoid=(), epochs=2)
    assert len(ids) == len(more) == 5 and order.exhausted(state, 2)
    state, none = order.take(state, 5, seed=0, avoid=(), epochs=2)
    assert none.tolist() == [] and not order.exhausted(state, 0)


@given(size=st.integers(1, 12), seed=st.integers(0, 5), epochs=st.integers(0, 3),
       steps=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8))
def test_once_per_step_once_per_epoch_whatever_is_asked(size, seed, epochs, steps):
    state, everything = order.init(size, seed), []
    for rounds in steps:
        given_now: list[int] = []
        for count in rounds:
            state, ids = order.take(state, count, seed=seed, avoid=given_now, epochs=epochs)
            assert len(ids) <= count
            given_now += ids.tolist()
            everything += ids.tolist()
            if len(ids) < count:
                assert len(given_now) == size or order.exhausted(state, epochs)
        assert len(set(given_now)) == len(given_now)
    passes = [everything[i:i + size] for i in range(0, len(everything), size)]
    assert all(len(set(one)) == len(one) for one in passes)
    assert not epochs or len(passes) <= epochs


def test_take_leaves_its_arguments_as_they_were():
    state = order.init(6, 0)
    before = state.order.tolist()
    for array in (state.order, state.epoch, state.cursor):
        array.setflags(write=False)
    order.take(state, 4, seed=0, avoid=before[:2], epochs=0)
    assert state.order.tolist() == before and int(state.cursor) == 0
