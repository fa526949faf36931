"""Trees of device arrays on disk: a phase's reference model, and the parameters of another run."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp

from dapo_jax import config, types
from dapo_jax.runtime import checkpoint, checkpoint_files


def save(path: str | os.PathLike, tree: types.Tree) -> None:
    """Write `tree` as the folder `path`, whole or not at all; one that is there is replaced."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(path).absolute(), tree, force=True)


def restore(path: str | os.PathLike, like: types.Tree) -> types.Tree:
    """The tree that `save` wrote, onto the shardings of `like`; ConfigError if it is not there."""
    path = pathlib.Path(path).absolute()
    if not path.is_dir():
        raise config.ConfigError(f"{path} is missing, without which the run cannot go on; put it "
                                 "back, or choose another work directory")
    remedy = "put a copy of it back, or choose another work directory"
    with (_read(f"{path} cannot be read", remedy), ocp.StandardCheckpointer() as checkpointer):
        return checkpointer.restore(path, like)


def check_run(workdir: str | os.PathLike, like: types.Tree, *, wanted: int = -1,
              where: str = "--workdir") -> None:
    """Refuse a run without a checkpoint, or whose parameters are not of the shapes of `like`.

    `wanted` is the checkpoint's step; -1: the newest. `where` is the setting that names the run.
    """
    with _opened(workdir, wanted, where) as (manager, step):
        stored = checkpoint_files.shapes(manager.directory / str(step))
    for name, leaf in _named(like).items():
        shape = stored[name][1] if name in stored else None
        if shape != leaf.shape:
            raise config.ConfigError(
                f"{workdir}: {name} is {shape or 'missing'} in the checkpoint of step {step}, but "
                f"this model needs {leaf.shape}: it is of another model")


def params_of_run(workdir: str | os.PathLike, like: types.Tree, *, wanted: int = -1
                  ) -> tuple[int, types.Tree]:
    """Step and parameters of a checkpoint of a run, in the types and onto the shardings of `like`;
    nothing else of it is read. See `check_run`."""
    item = _named(like)
    how = {name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
           for name, leaf in item.items()}
    with _opened(workdir, wanted) as (manager, step), jax.transfer_guard("allow"):
        found = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(
            item, restore_args=how, partial_restore=True))).arrays
    return step, jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in item])


def mark_of_run(workdir: str | os.PathLike, *, step: int) -> np.ndarray:
    """The mark u32[leaves] of the base model that a run's adapter was trained on."""
    with _opened(workdir, step) as (manager, _):
        return manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(
            {"base": np.empty(0)}, restore_args={"base": ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True))).arrays["base"]


@contextlib.contextmanager
def _opened(workdir: str | os.PathLike, wanted: int, where: str = "--workdir"
            ) -> Iterator[tuple[ocp.CheckpointManager, int]]:
    if not (pathlib.Path(workdir) / "checkpoints").is_dir():  # opening it would make it
        raise _nothing(f"{where}={workdir}", wanted, [])
    manager = checkpoint.open_manager(workdir, keep=1)
    try:
        there = checkpoint_files.whole(manager)
        step = wanted if wanted >= 0 or not there else there[0]
        if step not in there:
            raise _nothing(f"{where}={workdir}", wanted, there)
        checkpoint_files.check_format(manager.directory / str(step))
        with _read(f"{manager.directory}: checkpoint {step} cannot be read",
                   "choose another (--checkpoint=STEP), or remove it"):
            yield manager, step
    finally:
        checkpoint.close(manager)


def _nothing(named: str, wanted: int, there: list[int]) -> config.ConfigError:
    """That a run has no checkpoint of the step `wanted` (-1: none at all), and what to do."""
    remedy = (f"there are: {', '.join(map(str, there))}" if there else "name the folder of a run "
              "that has saved one: the first comes after config.checkpoint.every steps, when a "
              "phase ends and on SIGTERM")
    step = f" of step {wanted}" if wanted >= 0 else ""
    return config.ConfigError(f"{named} holds no complete checkpoint{step}; {remedy}")


@contextlib.contextmanager
def _read(fault: str, remedy: str) -> Iterator[None]:
    """Say which files cannot be read, why, and what to do."""
    try:
        yield
    except config.ConfigError:
        raise
    except Exception as error:
        raise config.ConfigError(f"{fault}: {checkpoint_files.fault(error)}; {remedy}") from error


def _named(like: types.Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaves by the names that checkpoints give them, in the order of the tree."""
    return {"train.params." + jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree.leaves_with_path(like)}
