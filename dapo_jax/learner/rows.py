"""Where samples stand in slots and rows; and packing of uneven ones: slots of several prompts, rows
of several samples (types.Packed).

A packed row holds at most one sample of each of its slot's prompts, so that one number, the
prompt's in its slot, says which tokens see each other. Where a row is to hold another sample of a
prompt, the prompt stands in the slot once more.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where samples stand. Arrays are alike in length: an entry a placed sample."""

    sample: np.ndarray  # index into the samples
    slot: np.ndarray
    row: np.ndarray
    start: np.ndarray  # its first token's place in the row
    segment: np.ndarray  # number, in its slot, of the prompt that it follows
    tokens: np.ndarray  # that it takes

    def take(self, which: np.ndarray) -> "Layout":
        """Entries by index or boolean mask."""
        return Layout(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Place:
    """One microbatch before it is filled: its samples' places, and its shape."""

    layout: Layout
    slots: int
    rows: int
    prompt: int  # tokens of a slot's prompt, or prompts
    completion: int  # tokens of a row
    held: int  # tokens of prompts and samples in it, whoever fills them
    own: np.ndarray | None = None  # bool[slots] those that are filled; None: all


@dataclasses.dataclass
class _Room:
    """What is left of slots, while they are being filled."""

    rows: np.ndarray  # [slots, R] tokens
    prompts: np.ndarray  # [slots] tokens
    held: list[int]  # prompts in each slot


def in_slots(slots: Sequence[np.ndarray], content: np.ndarray) -> Layout:
    """Each slot's samples i[*], of `content` i[n] tokens, in rows of their own."""
    sizes = np.array([len(slot) for slot in slots], np.int64)
    sample, zeros = np.concatenate(slots), np.zeros(sizes.sum(), np.int64)
    row = np.arange(len(sample)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Layout(sample, np.repeat(np.arange(len(slots)), sizes), row, zeros, zeros,
                  content[sample])


def place(
    group: np.ndarray, content: np.ndarray, prompt_length: np.ndarray, *, rows: int, width: int,
    prompt_width: int,
) -> Layout:
    """A place for each sample that has content: tokens i[n], its prompt's tokens i[n].

    Groups come by their longest sample, their samples by length, each into the first row with room
    that can share a copy of its prompt or, failing those, whose slot has room for another copy.
    Every sample must fit an empty slot.
    """
    room = _Room(np.zeros((0, rows), np.int64), np.zeros(0, np.int64), [])
    placed = []
    for members in _groups(group, content):
        in_row = np.zeros(room.rows.shape, np.int64)  # samples of the group
        copies = np.zeros(len(room.prompts), np.int64)  # of the group's prompt
        numbers: dict[tuple[int, int], int] = {}  # of the copies, by slot
        length = prompt_length[members[0]]
        for sample in members:
            holds = room.rows >= content[sample]
            shared = holds & (copies[:, None] > in_row)
            fits = shared if shared.any() else holds & (room.prompts[:, None] >= length)
            if not fits.any():
                room.rows = np.concatenate([room.rows, np.full((1, rows), width)])
                room.prompts = np.append(room.prompts, prompt_width)
                in_row = np.concatenate([in_row, np.zeros((1, rows), np.int64)])
                copies = np.append(copies, 0)
                room.held.append(0)
                slot, row = len(copies) - 1, 0
            else:
                slot, row = map(int, np.unravel_index(np.argmax(fits), fits.shape))
            copy = in_row[slot, row]
            if copies[slot] == copy:
                copies[slot] += 1
                room.prompts[slot] -= length
                numbers[slot, copy] = room.held[slot]
                room.held[slot] += 1
            placed.append((sample, slot, row, width - room.rows[slot, row], numbers[slot, copy],
                           content[sample]))
            room.rows[slot, row] -= content[sample]
            in_row[slot, row] += 1
    return Layout(*np.array(placed, np.int64).reshape(-1, 6).T)


def _groups(group: np.ndarray, content: np.ndarray) -> list[np.ndarray]:
    """Samples with content of each group, longest first, groups by their longest."""
    order = np.lexsort((np.arange(len(group)), -content))
    members: dict[int, list[int]] = {}
    for sample in order[content[order] > 0]:
        members.setdefault(int(group[sample]), []).append(sample)
    return [np.array(of_group) for of_group in members.values()]
