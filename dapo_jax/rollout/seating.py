"""Which waiting groups get which free slots, and how many slots there are: plain numbers."""

import dataclasses
from collections.abc import Sequence

import numpy as np

NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Piece:
    """Samples of one group that stream through one slot."""

    group: int  # its place in the ledger
    first: int  # number of the first sample
    count: int


def pieces(group: int, *, first: int, size: int, share: int) -> list[Piece]:
    """A group in pieces of at most `share` samples."""
    return [Piece(group, first + begun, min(share, size - begun))
            for begun in range(0, size, share)]


def seat(seats: np.ndarray, waiting: Sequence[Piece], *, parts: int) -> list[tuple[int, Piece]]:
    """(slot, piece) for as many waiting pieces, from the first, as slots are free.

    `seats` i32[S] is the group in each slot, or NOBODY. Each piece goes to the part of the slots
    with the most free ones, so that no device is left with the last samples.
    """
    chosen, left = [], free(seats, parts=parts)
    for piece in waiting:
        widest = max(range(parts), key=lambda part: len(left[part]))
        if not left[widest]:
            break
        chosen.append((left[widest].pop(0), piece))
    return chosen


def free(seats: np.ndarray, *, parts: int) -> list[list[int]]:
    """The free slots of each part, ascending."""
    return [(np.flatnonzero(part == NOBODY) + number * len(part)).tolist()
            for number, part in enumerate(seats.reshape(parts, -1))]


def size_for(seats: np.ndarray, waiting: int, *, ladder: Sequence[int], parts: int) -> int:
    """The smallest size of the ladder whose parts hold all that is seated, and what waits if any
    size does."""
    used = (seats.reshape(parts, -1) != NOBODY).sum(axis=1)
    need = max(int(used.max()) * parts, -(-(int(used.sum()) + waiting) // parts) * parts)
    return next((size for size in ladder if size >= need), ladder[-1])


def moves(seats: np.ndarray, size: int, *, parts: int) -> np.ndarray:
    """i32[size]: the old slot, counted within its part, of each new slot; -1 for idle ones."""
    source = np.full((parts, size // parts), -1, np.int32)
    for part, old in enumerate(seats.reshape(parts, -1)):
        used = np.flatnonzero(old != NOBODY)
        source[part, :len(used)] = used
    return source.reshape(-1)


def moved(seats: np.ndarray, source: np.ndarray, *, parts: int) -> np.ndarray:
    """Who sits where after the move."""
    old = seats.reshape(parts, -1)
    new = [np.where(part >= 0, old[number][np.maximum(part, 0)], NOBODY)
           for number, part in enumerate(source.reshape(parts, -1))]
    return np.concatenate(new).astype(np.int32)
