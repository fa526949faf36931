"""Filling: microbatches from their samples' places (rows.Place).

Only what a place names is written: of an array that is large, pages that nothing is written to
take no memory, and a process's devices are given none of them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax import types
from dapo_jax.learner import rows

Columns = tuple[np.ndarray, ...]  # a value a token [n, T], in the order of TrainBatch


def slots(place: rows.Place, columns: Columns, prompts: Sequence[np.ndarray]) -> types.TrainBatch:
    """Each sample in a row of its slot, 0 where there is no row or the columns are narrower;
    `prompts` i32[*] of each sample. An idle slot's prompt has one token of id 0."""
    layout = place.layout
    tokens = np.zeros((place.slots, place.prompt), np.int32)
    length = np.ones(place.slots, np.int32)
    first = layout.row == 0
    for slot, sample in zip(layout.slot[first], layout.sample[first]):
        length[slot] = len(prompts[sample])
        tokens[slot, :length[slot]] = prompts[sample]
    targets = _targets(place, columns)
    for target, column in zip(targets, columns):
        width = min(place.completion, column.shape[1])
        target[layout.slot, layout.row, :width] = column[layout.sample, :width]
    return types.TrainBatch(tokens, length, *targets)


def packed(place: rows.Place, columns: Columns, prompts: Sequence[np.ndarray]) -> types.TrainBatch:
    """The same where slots have several prompts and rows several samples (types.Packed)."""
    tokens = np.zeros((place.slots, place.prompt), np.int32)
    segment = np.zeros(tokens.shape, np.int32)
    after = np.zeros((place.slots, place.rows, place.completion), np.int32)
    own = slice(None) if place.own is None else place.own
    segment[own], after[own] = -1, -1
    used, layout = np.zeros(place.slots, np.int32), place.layout
    targets = _targets(place, columns)
    ends: dict[tuple[int, int], int] = {}  # (slot, segment) -> place of the prompt's last token
    for sample, slot, row, start, number, count in zip(
            layout.sample, layout.slot, layout.row, layout.start, layout.segment, layout.tokens):
        if (slot, number) not in ends:
            prompt = prompts[sample]
            here = slice(used[slot], used[slot] + len(prompt))
            tokens[slot, here], segment[slot, here] = prompt, number
            used[slot] += len(prompt)
            ends[slot, number] = used[slot] - 1
        there = slice(start, start + count)
        after[slot, row, there] = ends[slot, number]
        for target, column in zip(targets, columns):
            target[slot, row, there] = column[sample, :count]
    batch = types.TrainBatch(tokens, np.maximum(used, 1), *targets)
    return dataclasses.replace(batch, packed=types.Packed(segment, after))


def _targets(place: rows.Place, columns: Columns) -> list[types.Leaf]:
    return [np.zeros((place.slots, place.rows, place.completion), column.dtype)
            for column in columns]


def padded(rows: Sequence[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """Rows i32[*] as i32[size], 0 behind them."""
    result = np.zeros(size, np.int32)
    for target, row in zip(result, rows):
        target[:len(row)] = row
    return result
