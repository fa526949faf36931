"""Checkpoints as files: which are whole, of which format, and what a failed write means."""

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint._src.serialization import replica_slices

from dapo_jax import config

LOG = logging.getLogger(__name__)

# Raised whenever an older reader would misread what is written.
FORMAT = 1
_KEY = "dapo_jax_format"


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


def steps(manager: ocp.CheckpointManager) -> list[int]:
    """Steps that have a directory, newest first. The manager's own list also has unwritten ones."""
    names = (path.name for path in manager.directory.iterdir())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


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
    return path.name.isdigit() and bool(committed) and tree > 0


def fault(error: Exception) -> str:
    """Why a checkpoint's files cannot be read; an error that is no fault of theirs is raised.

    Of a shard, Orbax raises a plain Exception with pages about the store; its cause says why.
    """
    if type(error) is Exception or isinstance(error, ValueError | KeyError | FileNotFoundError):
        return str(error.__cause__ or error)
    raise error


def set_aside(manager: ocp.CheckpointManager, found: list[int]) -> None:
    """Rename the checkpoints of these steps to incomplete_*."""
    if not found:
        return
    if jax.process_index() == 0:
        for step in found:
            names = (manager.directory / f"incomplete_{step}_{n}" for n in itertools.count())
            target = next(path for path in names if not path.exists())
            (manager.directory / str(step)).rename(target)
            LOG.warning("%s: checkpoint %d is renamed to %s", manager.directory, step, target.name)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")
    manager.reload()


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
        whole = [str(s) for s in steps(manager) if complete(manager.directory / str(s))]
        raise config.ConfigError(
            f"{manager.directory}: {which} could not be written: {error}. Complete there: "
            f"{', '.join(whole) or 'none'}; make room or mend the disk, and start again"
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
