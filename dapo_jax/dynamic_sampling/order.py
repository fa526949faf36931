"""Which prompt comes next: an endless, reshuffled pass over the table."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from dapo_jax import types

STREAM = 1  # keeps these random numbers apart from others drawn from the run's seed


def init(size: int, seed: int) -> types.EpochOrder:
    """The start of epoch 0 over `size` prompts."""
    return types.EpochOrder(order=_permutation(size, seed, 0), epoch=np.asarray(0, np.int32),
                            cursor=np.asarray(0, np.int32))


def exhausted(state: types.EpochOrder, epochs: int) -> bool:
    """True if all of `epochs` passes were given; 0 passes means endless."""
    return bool(epochs and state.epoch + 1 >= epochs and state.cursor >= len(state.order))


def take(state: types.EpochOrder, count: int, *, seed: int, avoid: Iterable[int],
         epochs: int) -> tuple[types.EpochOrder, np.ndarray]:
    """The next `count` prompt ids, i32[m], in admission order, none of them in `avoid`.

    `avoid` holds the ids already given in this step. They move behind the others of their epoch,
    so each id still occurs once per epoch. m < count only if `epochs` passes were given, or every
    prompt was given in this step. The seed is not part of the state: give the same one each time.
    """
    given = np.asarray(list(avoid), np.int32)
    first, goal = len(given), len(given) + count
    while len(given) < goal:
        if state.cursor >= len(state.order):
            if exhausted(state, epochs):
                break
            state = _next_epoch(state, seed)
        state, ids = _advance(state, goal - len(given), given)
        if not len(ids):
            break
        given = np.concatenate([given, ids])
    return state, given[first:]


def _advance(state: types.EpochOrder, count: int,
             given: np.ndarray) -> tuple[types.EpochOrder, np.ndarray]:
    done, rest = np.split(state.order, [int(state.cursor)])
    late = np.isin(rest, given)
    order = np.concatenate([done, rest[~late], rest[late]])
    cursor = len(done) + min(count, int(np.sum(~late)))
    state = dataclasses.replace(state, order=order, cursor=np.asarray(cursor, np.int32))
    return state, order[len(done):cursor]


def _next_epoch(state: types.EpochOrder, seed: int) -> types.EpochOrder:
    epoch = int(state.epoch) + 1
    return types.EpochOrder(order=_permutation(len(state.order), seed, epoch),
                            epoch=np.asarray(epoch, np.int32), cursor=np.asarray(0, np.int32))


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, STREAM, epoch]).permutation(size).astype(np.int32)
