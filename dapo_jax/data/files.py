"""Rows of JSON Lines, Parquet and TFDS data sets, in chunks that any process can read alone."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence, Set
from typing import Any

from dapo_jax import config

KINDS = ("jsonl", "parquet", "tfds")
CHUNK_BYTES = 4 * 2 ** 20  # of JSON Lines
CHUNK_ROWS = 8192  # of the others
BOM = b"\xef\xbb\xbf"
Placed = tuple[int, int, dict[str, Any] | str]  # place in chunk, number in file, row or fault
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A stretch of a file that one process reads at once."""

    path: str
    kind: str  # of KINDS
    start: int  # jsonl: byte; parquet: row of its group; tfds: row
    stop: int  # the first beyond
    number: int  # of its first line or row, counted from 1
    part: int | str = 0  # parquet: row group; tfds: split

    def place(self, number: int) -> str:
        """What errors call the row of that number."""
        return f"{self.path}, {'line' if self.kind == 'jsonl' else 'row'} {number}"


def kind(path: str) -> str:
    """The kind of a file, or of a folder that TFDS built, by its name; ConfigError if none."""
    if os.path.isdir(path):
        if (pathlib.Path(path) / "dataset_info.json").is_file():
            return "tfds"
        raise config.ConfigError(f"{path!r} is a directory without dataset_info.json: name a file "
                                 "in it, or NAME/VERSION of a data set that TFDS built")
    found = SUFFIXES.get(pathlib.Path(path).suffix.lower())
    if found is None:
        raise config.ConfigError(f"{path}: its name ends in none of {', '.join(SUFFIXES)}; "
                                 "unpack it, or rename it")
    return found


def size(path: str) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in _members(path))


def add_content(digest: Any, path: str) -> None:
    """Feed all bytes of a file or folder to a hashlib object."""
    for member in _members(path):
        digest.update(member.name.encode())
        with open(member, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())


def _members(path: str) -> list[pathlib.Path]:
    try:
        whole = pathlib.Path(path)
        if whole.is_dir():
            return sorted(member for member in whole.iterdir() if member.is_file())
        whole.stat()
        return [whole]
    except OSError as error:
        raise _unreadable(path, error) from error


def chunks(path: str, kind: str, *, split: str) -> tuple[Chunk, ...]:
    """All of a file or folder, cut. ConfigError: it cannot be read; `split` is TFDS's."""
    try:
        return tuple(CUTS[kind](path, split))
    except OSError as error:
        raise _unreadable(path, error) from error


def rows(chunk: Chunk, wanted: Set[int] | None = None) -> Iterator[Placed]:
    """Place in the chunk, number and content of each row, or what is wrong with it.

    Blank lines have no place. `wanted`: only the rows at these places.
    """
    try:
        yield from READERS[chunk.kind](chunk, wanted)
    except OSError as error:
        raise _unreadable(chunk.path, error) from error


def _unreadable(path: str, error: OSError) -> config.ConfigError:
    return config.ConfigError(f"cannot read {path!r}: {error.strerror or error}")


# -------------------------------------------------------------------------------------- JSON Lines


def _cut_jsonl(path: str, split: str) -> Iterator[Chunk]:
    start, number = 0, 1
    # Bytes: text mode would also end lines at a lone \r, and fail on a whole block at once.
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            block += file.readline()
            yield Chunk(path, "jsonl", start, start + len(block), number)
            start += len(block)
            number += block.count(b"\n")


def _jsonl_rows(chunk: Chunk, wanted: Set[int] | None) -> Iterator[Placed]:
    with open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        block = file.read(chunk.stop - chunk.start)
    if len(block) < chunk.stop - chunk.start:
        raise config.ConfigError(f"{chunk.path} became shorter while it was read; start again")
    lines = enumerate(block.removeprefix(BOM).split(b"\n") if chunk.number == 1
                      else block.split(b"\n"), start=chunk.number)
    filled = ((number, line.strip()) for number, line in lines if not line.isspace() and line)
    for place, (number, line) in enumerate(filled):
        if wanted is None or place in wanted:
            try:
                yield place, number, _object(line)
            except ValueError as error:
                yield place, number, str(error)


def _object(line: bytes) -> dict[str, Any]:
    """The object of one line; ValueError says what is wrong with it."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    try:
        row = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        if "\\u" in text:
            # It may spell half of a surrogate pair, which no text that is written can hold.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"it holds a {type(row).__name__}, not an object: a line is one record")
    return row


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands in it twice")
    return found


# ----------------------------------------------------------------------------------------- Parquet


def _cut_parquet(path: str, split: str) -> Iterator[Chunk]:
    number = 1
    about = _parquet(path).metadata
    for group in range(about.num_row_groups):
        count = about.row_group(group).num_rows
        for start in range(0, count, CHUNK_ROWS):
            yield Chunk(path, "parquet", start, min(start + CHUNK_ROWS, count), number + start,
                        group)
        number += count


def columns(path: str) -> list[str]:
    """Names of a Parquet file's columns."""
    return list(_parquet(path).schema_arrow.names)


def _parquet(path: str) -> Any:
    # Here and not above: most runs need no Parquet, and it is slow to import.
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise config.ConfigError(f"{path} is no whole Parquet file: {error}") from error


@functools.lru_cache(maxsize=1)
def _group(path: str, group: int) -> Any:
    """The table of a row group, which the chunks of it share."""
    import pyarrow

    try:
        return _parquet(path).read_row_group(group)
    except (pyarrow.ArrowException, OSError) as error:
        raise config.ConfigError(f"{path}: row group {group} cannot be read: {error}") from error


def _parquet_rows(chunk: Chunk, wanted: Set[int] | None) -> Iterator[Placed]:
    part = _group(chunk.path, chunk.part).slice(chunk.start, chunk.stop - chunk.start)
    whole = part.to_pylist()
    places = range(len(whole)) if wanted is None else sorted(wanted)
    yield from _plain_rows([whole[place] for place in places], places, chunk.number)


# -------------------------------------------------------------------------------------------- TFDS


@functools.lru_cache(maxsize=1)
def _data_source(path: str, split: str) -> Sequence[Any]:
    """Random access to a data set that TFDS built of ArrayRecord files, without TensorFlow."""
    import tensorflow_datasets as tfds

    with _named(path, split):
        return tfds.builder_from_directory(path).as_data_source(split)


@contextlib.contextmanager
def _named(path: str, split: str) -> Iterator[None]:
    """ConfigError for whatever the libraries raise, of which there are many kinds."""
    try:
        yield
    except Exception as error:
        raise config.ConfigError(f"{path}, split {split!r}: {error}") from error


def _cut_tfds(path: str, split: str) -> Iterator[Chunk]:
    source = _data_source(path, split)
    with _named(path, split):
        count = len(source)
    for start in range(0, count, CHUNK_ROWS):
        yield Chunk(path, "tfds", start, min(start + CHUNK_ROWS, count), start + 1, split)


def _tfds_rows(chunk: Chunk, wanted: Set[int] | None) -> Iterator[Placed]:
    source: Any = _data_source(chunk.path, chunk.part)
    places = range(chunk.stop - chunk.start) if wanted is None else sorted(wanted)
    with _named(chunk.path, str(chunk.part)):
        found = source.__getitems__([chunk.start + place for place in places])
    yield from _plain_rows(found, places, chunk.number)


def _plain_rows(found: Sequence[Any], places: Sequence[int], first: int) -> Iterator[Placed]:
    for place, row in zip(places, found, strict=True):
        try:
            yield place, first + place, {name: _plain(value) for name, value in row.items()}
        except UnicodeDecodeError as error:
            yield place, first + place, f"it is not UTF-8 (byte {error.start})"


def _plain(value: Any) -> Any:
    """The value as JSON would hold it; what JSON has no word for becomes a text."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


CUTS = {"jsonl": _cut_jsonl, "parquet": _cut_parquet, "tfds": _cut_tfds}
READERS = {"jsonl": _jsonl_rows, "parquet": _parquet_rows, "tfds": _tfds_rows}
