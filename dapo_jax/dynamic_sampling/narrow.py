"""Samples without their tokens, for decisions that need none.

A step's tokens may be gigabytes, and its groups are sorted, joined and split many times until it is
known which are trained on: that is done with the narrow rows, and the tokens are copied once.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax import types

WIDE = ("tokens", "loss_mask", "logprobs")


def without_tokens(samples: types.Samples, *, first: int) -> types.Samples:
    """The same rows; in place of their tokens stand their numbers, from `first` on: i32[n, 1]."""
    none = {name: getattr(samples, name)[:, :0] for name in WIDE}
    number = np.arange(first, first + len(samples), dtype=np.int32)
    return dataclasses.replace(samples, **none | {"tokens": number[:, None]})


def with_tokens(rows: types.Samples, sources: Sequence[types.Samples]) -> types.Samples:
    """What `without_tokens` left out of `rows`: they are numbered through all `sources`."""
    number, starts = rows.tokens[:, 0], np.cumsum([0, *map(len, sources)])
    which = np.searchsorted(starts, number, side="right") - 1
    full = {name: np.empty((len(rows), column.shape[1]), column.dtype)
            for name, column in ((name, getattr(sources[0], name)) for name in WIDE)}
    for source in np.unique(which):
        here = np.flatnonzero(which == source)
        for name, column in full.items():
            _copy(column, here, getattr(sources[source], name), number[here] - starts[source])
    return dataclasses.replace(rows, **full)


def _copy(target: np.ndarray, to: np.ndarray, column: np.ndarray, rows: np.ndarray) -> None:
    """target[to] = column[rows]; rows that stay together are copied without an array between."""
    if to[-1] - to[0] + 1 == len(to):
        np.take(column, rows, axis=0, out=target[to[0]:to[-1] + 1], mode="clip")
    else:
        target[to] = column[rows]
