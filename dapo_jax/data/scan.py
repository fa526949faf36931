"""Records of chunks: which rows are good, what their content is, and what is wrong with others."""

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dapo_jax.data import files, formats, identity

NAMED = 20  # bad rows that a message names; the rest are counted


@dataclasses.dataclass(frozen=True)
class Rules:
    """How rows become records, and which are wanted."""

    form: formats.Format
    dataset: str  # what records call the data set
    where: tuple[tuple[str, tuple], ...] = ()  # field, values that it may have
    convert: str = ""  # "module:function" from record to record; its ValueError is a bad row


@dataclasses.dataclass(frozen=True)
class Scanned:
    """The good rows of a chunk that are wanted."""

    place: np.ndarray  # i32[k] among the chunk's rows, from 0; blank lines do not count
    number: np.ndarray  # i32[k] of its line or row, relative to the chunk's first
    identity: np.ndarray  # u64[k, 2] of prompt and answer
    prompt: np.ndarray  # u64[k, 2] of the prompt alone
    filtered: int  # rows that `where` leaves out
    bad: int
    named: tuple[str, ...]  # sentences on the first bad ones


def scan(rules: Rules, chunk: files.Chunk) -> Scanned:
    """Look at every row of a chunk."""
    places, numbers, identities, prompts, filtered = [], [], [], [], 0
    bad: list[str] = []
    for place, number, made in _records(chunk, rules):
        if isinstance(made, str):
            bad.append(f"{chunk.place(number)}: {made}")
        elif not _wanted(made, rules):
            filtered += 1
        else:
            places.append(place)
            numbers.append(number - chunk.number)
            prompts.append(bytes.fromhex(made[identity.KEY]))
            identities.append(identity.digest(f"{made[identity.KEY]} {made['answer']}"))
    return Scanned(np.array(places, np.int32), np.array(numbers, np.int32),
                   identity.numbers(identities), identity.numbers(prompts), filtered, len(bad),
                   tuple(bad[:NAMED]))


def nothing(given: None) -> None:
    """What a process prepares for `scan_job`."""


def scan_job(ready: None, job: tuple[Rules, files.Chunk]) -> Scanned:
    """`scan` as data.workers calls it."""
    return scan(*job)


def chosen(chunk: files.Chunk, rules: Rules, places: np.ndarray) -> Iterator[tuple[str, Any]]:
    """What errors call it, and the record, of the rows at ascending `places` of a chunk."""
    wanted = set(places.tolist())
    for _, number, made in _records(chunk, rules, wanted):
        if isinstance(made, str):  # the scan found it good
            raise ValueError(f"{chunk.place(number)} changed while it was read: {made}")
        yield chunk.place(number), made


def _records(chunk: files.Chunk, rules: Rules, wanted: set[int] | None = None
             ) -> Iterator[tuple[int, int, formats.Record | str]]:
    """Place, number, and the record or what is wrong, of all rows or of those at `wanted`."""
    convert = _function(rules.convert)
    for place, number, row in files.rows(chunk, wanted):
        if not isinstance(row, str):
            try:
                row = formats.labelled(convert(formats.record(row, rules.form)), rules.dataset)
            except ValueError as error:
                row = str(error)
        yield place, number, row


def _function(dotted: str) -> Any:
    if not dotted:
        return lambda record: record
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def _wanted(record: formats.Record, rules: Rules) -> bool:
    return all(formats.find(record, field) in values for field, values in rules.where)
