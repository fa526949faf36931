"""Checkpoints as files: which are whole, of which format, and what a failed write means."""

import contextlib
import itertools
import json
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import replica_slices

from dapo_jax import config

LOG = logging.getLogger(__name__)

# Raised whenever an older reader would misread what is written.
FORMAT = 1
_KEY = "dapo_jax_format"
WAIT_MS = 600_000  # that processes wait for the first, which renames
ASIDE = "incomplete_"  # how names begin of checkpoints that could not be read


def metadata() -> dict[str, int]:
    """What a checkpoint's metadata say of its format."""
    return {_KEY: FORMAT}


def check_format(path: Any) -> None:
    """Refuse a complete checkpoint of a newer format, or one that dapo_jax did not write."""
    found = json.loads((path / "_CHECKPOINT_METADATA").read_text()).get("custom_metadata") or {}
    version = found.get(_KEY)
    if not isinstance(version, int):
        raise config.ConfigError(f"{path} names no format of dapo_jax: it is of another program, "
                                 "or older than formats are; choose another work directory")
    if version != FORMAT:
        raise config.ConfigError(
            f"{path} has format {version}, and this dapo_jax reads {FORMAT}; take the version that "
            "wrote it, or choose another work directory")


def shapes(path: Any) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Type and shape of each leaf that a checkpoint holds; ValueError if its table is none."""
    file = path / "leaves" / "metadata"
    try:
        return {name: (np.dtype(dtype), tuple(map(int, shape)))
                for name, (dtype, shape) in json.loads(file.read_text()).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no table of types and shapes: {error}") from None


def steps(manager: ocp.CheckpointManager) -> list[int]:
    """Steps that have a directory, newest first. The manager's own list also has unwritten ones."""
    names = (path.name for path in manager.directory.iterdir())
    return sorted((int(name) for name in names if _step(name)), reverse=True)


def whole(manager: ocp.CheckpointManager) -> list[int]:
    """Steps of the complete checkpoints on disk, newest first."""
    return [step for step in steps(manager) if complete(manager.directory / str(step))]


def _step(name: str) -> bool:
    """Whether it is a step's number as Orbax writes it: 0012 is another's folder."""
    return name.isascii() and name.isdigit() and str(int(name)) == name


def complete(path: Any) -> bool:
    """Whether all that Orbax writes last is there and can be read."""
    try:
        root = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        committed = root["commit_timestamp_nsecs"]
        json.loads((path / "leaves" / "metadata").read_text())
        json.loads((path / "arrays" / "_METADATA").read_text())
        tree = (path / "arrays" / "manifest.ocdbt").stat().length
    except (OSError, ValueError, KeyError):
        return False
    return _step(path.name) and bool(committed) and tree > 0


def fault(error: Exception) -> str:
    """Why a checkpoint's files cannot be read; an error that is no fault of theirs is raised.

    Of a shard, Orbax raises a plain Exception with pages about the store; its cause says why.
    """
    if type(error) is Exception or isinstance(error, ValueError | KeyError | FileNotFoundError):
        return str(error.__cause__ or error)
    raise error


def check_none_was_there(manager: ocp.CheckpointManager) -> None:
    """Refuse to begin anew where a checkpoint was whole once and is not any more: its metrics and
    samples would be cut off. One that was never written to its end has another name."""
    names = sorted(path.name for path in manager.directory.iterdir()
                   if _step(path.name) or path.name.startswith(ASIDE))
    if names:
        raise config.ConfigError(
            f"{manager.directory} holds no complete checkpoint, but what is left of some: "
            f"{', '.join(names)}; put back what is missing, start in another work directory, or "
            "remove them to begin again, which cuts this run's metrics and samples")


def set_aside(manager: ocp.CheckpointManager, found: list[int]) -> None:
    """Rename the checkpoints of these steps to incomplete_*."""
    if not found:
        return
    if jax.process_index() == 0:
        _rename(manager.directory, found)
    _all_wait("checkpoints set aside")
    manager.reload()


def set_unlistable_aside(folder: pathlib.Path) -> None:
    """Rename checkpoints whose score is no JSON object: Orbax reads all scores when it lists a
    folder, and could not even open it. To be called by all processes, before that."""
    if jax.process_index() == 0 and folder.is_dir():
        _rename(folder, [int(path.name) for path in folder.iterdir()
                         if _step(path.name) and not _scored(path / "metrics" / "metrics")])
    _all_wait("checkpoints that cannot be listed set aside")


def _scored(path: pathlib.Path) -> bool:
    """Whether it is a score as Orbax writes it, or not there at all."""
    try:
        return not path.exists() or isinstance(json.loads(path.read_text()), dict)
    except ValueError:
        return False


def _rename(folder: Any, found: list[int]) -> None:
    for step in found:
        names = (folder / f"{ASIDE}{step}_{n}" for n in itertools.count())
        target = next(path for path in names if not path.exists())
        (folder / str(step)).rename(target)
        LOG.warning("%s: checkpoint %d is renamed to %s", folder, step, target.name)


def _all_wait(what: str) -> None:
    if jax.process_count() > 1:
        ocp.multihost.get_barrier_sync_fn()(key=what, timeout_ms=WAIT_MS)


def compile_slices(tree: Any) -> None:
    """Compile what a save of these device arrays runs: of an array that several devices hold whole,
    Orbax lets each write a slice, which a program cuts; else the step after a first save would
    compile them. Runs the programs, each on a part of one array."""
    with jax.transfer_guard("allow"):
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array) and leaf.size:
                found = replica_slices.get_replica_slices(leaf, 0, use_replica_parallel=True)
                jax.block_until_ready([one.data() for one in found.replica_slices])


def barrier(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier between the processes that save; one whose save has failed passes it. Orbax
    calls it once more on its way out, where the others, which wait elsewhere for what this one did
    not write, never come: it would hold the error back for twenty minutes."""
    if jax.process_count() > 1 and sys.exc_info()[0] is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


@contextlib.contextmanager
def explained(manager: ocp.CheckpointManager, step: int | None) -> Iterator[None]:
    """Turn an error of a disk into a ConfigError that says what is left; None: of the last save."""
    try:
        yield
    except Exception as error:  # a full disk comes as OSError, ValueError or an error of threads
        if not _of_the_disk(error):
            raise
        which = "the last checkpoint" if step is None else f"checkpoint {step}"
        left = ", ".join(map(str, whole(manager)))
        raise config.ConfigError(
            f"{manager.directory}: {which} could not be written: {error}. Complete there: "
            f"{left or 'none'}; make room or mend the disk, and start again"
            ) from error


def _of_the_disk(error: BaseException | None) -> bool:
    """Whether an OSError, or words of one, are in the error or in what it came from."""
    words = ("no space left", "disk quota", "permission denied", "read-only file system",
             "input/output error")
    while error is not None:
        if isinstance(error, OSError) or any(word in str(error).lower() for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False
