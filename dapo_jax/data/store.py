"""A table of prompts in files of its own, mapped instead of read: it takes no memory to have.

Folders are named by the content they were made from and lie where `folder` says. Anything there
may be deleted while no run uses it.
"""

import collections.abc
import contextlib
import dataclasses
import json
import logging
import mmap
import os
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import numpy as np

from dapo_jax import config, types
from dapo_jax.data import encoding, prompts

LOG = logging.getLogger(__name__)
FORMAT = 1  # raise it when what is stored, or how it is made, changes
_FLAT = {"tokens": np.int32, "shown": np.int32, "masks": np.bool_}
_COUNTED = ("lengths", "sizes", "shown_lengths")


@dataclasses.dataclass(frozen=True)
class Arrays(collections.abc.Sequence):
    """Arrays of different lengths that lie in one."""

    values: np.ndarray
    starts: np.ndarray  # i64[n]
    lengths: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        start = self.starts[index]
        return self.values[start:start + self.lengths[index]]


@dataclasses.dataclass(frozen=True)
class Records(collections.abc.Sequence):
    """Records that are parsed when they are asked for."""

    text: mmap.mmap  # JSON of each, in any order
    starts: np.ndarray  # i64[n]
    sizes: np.ndarray  # i64[n]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        start = int(self.starts[index])
        return json.loads(self.text[start:start + int(self.sizes[index])])


def folder() -> pathlib.Path | None:
    """Where tables are kept: DAPO_JAX_CACHE, else XDG_CACHE_HOME/dapo_jax, else
    ~/.cache/dapo_jax; None if the first is set to nothing."""
    given = os.environ.get("DAPO_JAX_CACHE")
    if given == "":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return (pathlib.Path(given) if given else pathlib.Path(base) / "dapo_jax") / "prompts"


def load(name: str) -> tuple[types.PromptTable, dict[str, Any]] | None:
    """The table kept under a name and what was noted with it; None, with a message, if broken."""
    kept = folder()
    if kept is None or not (kept / name).is_dir():
        return None
    try:
        return _open(kept / name)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        LOG.warning("%s: the kept table is broken (%s); making it again", kept / name, error)
        shutil.rmtree(kept / name, ignore_errors=True)
        return None


def save(name: str, parts: Iterator[encoding.Encoded], *, order: np.ndarray, notes: dict[str, Any]
         ) -> tuple[types.PromptTable, dict[str, Any]]:
    """Write the parts one by one, and open the table that they make; see `load`.

    `order` i64[n]: which of all the rows that were asked for stands where in the table; those
    that did not fit are counted in the notes. Without a folder for it the table lies in a
    temporary one that vanishes with the process. ConfigError: nothing fits, or no space is left.
    """
    with contextlib.ExitStack() as stack:
        kept = _writable(folder())
        made = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(
            prefix=f".{name[:8]}-", dir=kept, ignore_cleanup_errors=True)))
        table = made / "table"
        try:
            table.mkdir()
            _write(table, parts, order, notes)
        except OSError as error:
            raise config.ConfigError(f"{made}: the prepared prompts cannot be written: "
                                     f"{error.strerror}; set DAPO_JAX_CACHE to a folder with space"
                                     ) from error
        if kept is None:
            return _open(table)  # what is mapped stays when the folder goes
        with contextlib.suppress(OSError):  # another process made the same
            table.rename(kept / name)
        return _open(kept / name)


def _writable(kept: pathlib.Path | None) -> pathlib.Path | None:
    if kept is not None:
        try:
            kept.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept).close()
        except OSError as error:
            LOG.warning("%s cannot be written (%s): prepared prompts are not kept", kept,
                        error.strerror)
            return None
    return kept


def _write(made: pathlib.Path, parts: Iterator[encoding.Encoded], order: np.ndarray,
           notes: dict[str, Any]) -> None:
    counted: dict[str, list[np.ndarray]] = {name: [] for name in ("kept", *_COUNTED)}
    lacking = ""
    with contextlib.ExitStack() as stack:
        flat: dict[str, BinaryIO] = {name: stack.enter_context(open(made / name, "wb"))
                                     for name in (*_FLAT, "records")}
        for part in parts:
            for name, file in flat.items():
                file.write(memoryview(getattr(part, name)).cast("B"))
            for name, arrays in counted.items():
                arrays.append(getattr(part, name))
            lacking = lacking or part.lacking
    columns = {name: np.concatenate(arrays) for name, arrays in counted.items()}
    count, shown = len(columns["lengths"]), int((columns["shown_lengths"] > 0).sum())
    notes = notes | {"too_long": len(order) - count}
    if not count:
        raise config.ConfigError(f"no prompt is left of {len(order)} records: {notes}")
    if 0 < shown < count:
        raise prompts.lacks_demonstration(lacking)
    np.savez(made / "index.npz", **cast(dict[str, Any], _index(columns, order)))
    (made / "notes.json").write_text(json.dumps(notes))


def _index(columns: Mapping[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """Starts and lengths of what was written, in the order of the table."""
    kept = columns["kept"]
    written = (np.cumsum(kept) - 1)[order[kept[order]]]  # where each row of the table was written
    index = {}
    for name in _COUNTED:
        lengths = columns[name]
        index[name] = lengths[written]
        index[f"{name}_starts"] = (np.cumsum(lengths, dtype=np.int64) - lengths)[written]
    return index


def _open(made: pathlib.Path) -> tuple[types.PromptTable, dict[str, Any]]:
    notes = json.loads((made / "notes.json").read_text())
    with np.load(made / "index.npz") as stored:
        index = {name: stored[name] for name in stored.files}
    flat = {name: _mapped(made / name, dtype) for name, dtype in _FLAT.items()}
    place, shown = (tuple(index[column] for column in (f"{name}_starts", name))
                    for name in ("lengths", "shown_lengths"))
    with open(made / "records", "rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    has = len(flat["shown"]) > 0
    _check(index, flat, text)
    return types.PromptTable(
        tokens=Arrays(flat["tokens"], *place),
        records=Records(text, index["sizes_starts"], index["sizes"]),
        demonstrations=Arrays(flat["shown"], *shown) if has else (),
        demonstration_masks=Arrays(flat["masks"], *shown) if has else ()), notes


def _mapped(path: pathlib.Path, dtype: type) -> np.ndarray:
    """The file's numbers; a plain array, whose slices are cheap, on mapped pages."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _check(index: Mapping[str, np.ndarray], flat: Mapping[str, np.ndarray], text: mmap.mmap
           ) -> None:
    """ValueError where a file is shorter than its index says."""
    for name, held in (("lengths", flat["tokens"]), ("sizes", text),
                       ("shown_lengths", flat["shown"]), ("shown_lengths", flat["masks"])):
        if int((index[f"{name}_starts"] + index[name]).max()) > len(held):
            raise ValueError("a file of it is too short")
