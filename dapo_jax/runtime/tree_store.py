"""Trees of device arrays on disk: a phase's reference model, and the parameters of another run."""

import os
import pathlib

import jax
import orbax.checkpoint as ocp

from dapo_jax import config, types
from dapo_jax.runtime import checkpoint


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
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def params_of_run(workdir: str | os.PathLike, like: types.Tree) -> types.Tree:
    """The parameters in the newest checkpoint of another run, in the types and onto the shardings
    of `like`. ConfigError if there is none, or of another shape."""
    manager = checkpoint.open_manager(workdir, keep=1)
    try:
        step = checkpoint.latest(manager)
        if step is None:
            raise config.ConfigError(f"{workdir} holds no complete checkpoint")
        leaves, structure = jax.tree.flatten_with_path(like)
        names = ["train.params." + jax.tree_util.keystr(path, simple=True, separator=".")
                 for path, _ in leaves]
        item = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
        how = {name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, strict=True)
               for name, leaf in item.items()}
        found = _restored(manager, step, item, how)
    finally:
        checkpoint.close(manager)
    return jax.tree.unflatten(structure, [found[name] for name in names])


def _restored(
    manager: ocp.CheckpointManager, step: int, item: types.Tree, how: types.Tree
) -> types.Tree:
    stored = manager.item_metadata(step)["arrays"]
    for name, leaf in item.items():
        shape = tuple(stored[name].shape) if name in stored else None
        if shape != leaf.shape:
            raise config.ConfigError(
                f"{manager.directory}: {name} is {shape or 'missing'}, but this model needs "
                f"{leaf.shape}: it is of another model")
    return manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(
        item, restore_args=how, partial_restore=True))).arrays
