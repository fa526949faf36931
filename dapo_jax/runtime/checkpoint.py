"""Checkpoints of a run, and the check that a work directory belongs to its configuration.

DIR/checkpoints/<step> is written by Orbax, asynchronously and atomically. It holds two items:
`arrays`, every leaf of the RunState that has elements, by its dotted name; `leaves`, dtype and
shape of every leaf, from which those without elements are rebuilt (Orbax refuses them). Its
metadata name the version of this format; a metric by which one is kept is a third item.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dapo_jax import config, types
from dapo_jax.runtime import checkpoint_files as files
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import processes

LOG = logging.getLogger(__name__)
Like = Callable[[int], types.RunState]
READING_SECONDS = 3600.0  # that the first process to have read a checkpoint waits for the last


def open_manager(workdir: str | os.PathLike, *, keep: int) -> ocp.CheckpointManager:
    """Checkpoints of DIR; warns of incomplete ones. The `keep` newest stay, and beside them the one
    that was saved with the highest score, if any was (of equal ones the newest).

    Raises ConfigError if the folder cannot be read.
    """
    if keep < 1:
        raise config.ConfigError(f"checkpoint.keep is {keep}, but at least 1 must be kept")
    # An old one is removed only after the new one is final: with keep=1 too one is complete.
    options = ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=files.barrier), best_fn=_score,
        preservation_policy=preservation_policy.AnyPreservationPolicy([
            preservation_policy.LatestN(n=keep), preservation_policy.BestN(
                get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)]))
    folder = pathlib.Path(workdir).absolute() / "checkpoints"
    try:
        files.set_unlistable_aside(folder)
        manager = ocp.CheckpointManager(folder, options=options)
        names = [path.name for path in manager.directory.iterdir()]
    except (OSError, ValueError) as error:  # ValueError: of what a checkpoint says of itself
        raise config.ConfigError(
            f"{folder} cannot be read: {getattr(error, 'strerror', None) or error}; is it a folder "
            "of yours, on a disk that is there, and of no other program?") from error
    broken = [name for name in names
              if name[0].isdigit() and not files.complete(manager.directory / name)]
    if broken:
        newest = latest(manager)
        rest = "none is complete" if newest is None else f"the newest complete is {newest}"
        LOG.warning("%s: incomplete: %s; %s", folder, ", ".join(sorted(broken)), rest)
    return manager


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]


def save(manager: ocp.CheckpointManager, state: types.RunState, *, score: float | None = None
         ) -> None:
    """Start to write `state` as checkpoint state.step; arrays may be donated when this returns.

    A complete checkpoint of that step is left as it is. Incomplete ones, and those of later steps,
    are renamed to incomplete_* out of the way: Orbax would count them as kept. Errors of writing,
    such as a full disk, are raised as ConfigError by the next save, wait or close.
    """
    wait(manager)
    step = int(state.step)
    files.set_aside(manager, [s for s in files.steps(manager)
                              if s > step or not files.complete(manager.directory / str(s))])
    if step in files.steps(manager):
        return
    leaves = {name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
              for name, leaf in _named(state).items()}
    shapes = {name: [leaf.dtype.name, list(leaf.shape)] for name, leaf in leaves.items()}
    arrays = {name: leaf for name, leaf in leaves.items() if leaf.size}
    # Orbax warns of a checkpoint without metrics, so one without a score has the lowest.
    measured = {"score": float(score) if score is not None and score == score else -math.inf}
    with jax.transfer_guard("allow"), files.explained(manager, step):  # Orbax transfers implicitly
        manager.save(step, force=True, metrics=measured, custom_metadata=files.metadata(),
                     args=ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays),
                                             leaves=ocp.args.JsonSave(shapes)))


def latest(manager: ocp.CheckpointManager) -> int | None:
    """Newest step with a complete checkpoint on disk; one that is being written is none yet."""
    return next(iter(files.whole(manager)), None)


def best(manager: ocp.CheckpointManager) -> int | None:
    """Step with the highest score on disk; None: no checkpoint was saved with one."""
    scored = [(_score(manager.metrics(step)), step) for step in files.whole(manager)]
    score, step = max(scored, default=(-math.inf, None))
    return step if score > -math.inf else None


def restore(manager: ocp.CheckpointManager, like: types.RunState | Like, *,
            step: int | None = None) -> types.RunState:
    """The state saved at `step`, or at the newest step that can be read: see state.step.

    `like` may be a function of the step: of another phase, the optimizer's state is another tree.
    Device leaves of `like` (arrays or jax.ShapeDtypeStruct with shardings) must have the stored
    shapes and are restored straight onto their shardings; numpy leaves get the stored number of
    rows. Raises ConfigError if the trees differ or there is nothing to restore.
    """
    steps = files.whole(manager)
    if step is not None:
        if step not in steps:
            raise config.ConfigError(f"{manager.directory}: no complete checkpoint of step {step}; "
                                     f"there are: {', '.join(map(str, steps)) or 'none'}")
        return _read(manager, like(step) if callable(like) else like, step)
    for candidate in steps:
        wanted = like(candidate) if callable(like) else like
        state, fault = _attempt(manager, wanted, candidate)
        # A process reads its own shards: what one cannot read, none may go on from.
        faults = processes.gather(fault, what=f"reading of checkpoint {candidate}",
                                  seconds=READING_SECONDS)
        if state is not None and not any(faults):
            return state
        LOG.warning("%s: checkpoint %d cannot be read, trying an older one: %s",
                    manager.directory, candidate, next(filter(None, faults)))
        files.set_aside(manager, [candidate])
    raise config.ConfigError(f"{manager.directory}: no checkpoint that can be read; start in "
                             "another work directory, or remove this one to begin again")


def wait(manager: ocp.CheckpointManager) -> None:
    """Until the last save is complete on disk; ConfigError if it failed."""
    with files.explained(manager, None):
        manager.wait_until_finished()


def close(manager: ocp.CheckpointManager) -> None:
    """Wait for the last save and end the manager's threads."""
    wait(manager)
    manager.close()


# --------------------------------------------------------------------------------- one checkpoint


def _attempt(manager: ocp.CheckpointManager, like: types.RunState, step: int
             ) -> tuple[types.RunState | None, str]:
    """The state, or why this process cannot read it."""
    try:
        return _read(manager, like, step), ""
    except config.ConfigError:
        raise
    except Exception as error:
        return None, f"process {jax.process_index()}: {files.fault(error)}"


def _read(manager: ocp.CheckpointManager, like: types.RunState, step: int) -> types.RunState:
    """Not by the manager's own restore: at its barriers, processes that can read their shards would
    wait for one that cannot."""
    targets, path = _named(like), manager.directory / str(step)
    files.check_format(path)
    shapes = files.shapes(path)
    _check(path, targets, shapes)
    full = [name for name, (_, shape) in shapes.items() if 0 not in shape]
    item = {name: np.empty(0) if _on_host(targets[name]) else targets[name] for name in full}
    how = {name: _restore_args(targets[name]) for name in full}
    with jax.transfer_guard("allow"):
        arrays = dict(ocp.PyTreeCheckpointHandler().restore(
            path / "arrays", args=ocp.args.PyTreeRestore(item, restore_args=how)))
    for name in shapes.keys() - arrays.keys():
        empty = np.zeros(shapes[name][1], shapes[name][0])
        target = targets[name]
        arrays[name] = empty if _on_host(target) else mesh_lib.put(empty, _sharding(target))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in targets])


def _check(path: os.PathLike, targets: Mapping[str, Any],
           shapes: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Refuse another tree, another dtype, or another shape; rows of host leaves are free."""
    for name, target in targets.items():
        if name not in shapes:
            raise config.ConfigError(f"{path} holds no {name}: it is of another configuration")
        dtype, shape = np.dtype(target.dtype), tuple(target.shape)
        free = 1 if _on_host(target) else 0
        same = len(shape) == len(shapes[name][1]) and shape[free:] == shapes[name][1][free:]
        if not same or dtype != shapes[name][0]:
            raise config.ConfigError(
                f"{path}: {name} is {_text(*shapes[name])}, but this configuration needs "
                f"{_text(dtype, shape)}")
    extra = next((name for name in shapes if name not in targets), None)
    if extra:
        raise config.ConfigError(f"{path} also holds {extra}: it is of another configuration")


def _restore_args(target: Any) -> ocp.RestoreArgs:
    if _on_host(target):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=_sharding(target), global_shape=tuple(target.shape),
                                dtype=target.dtype)


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _named(state: types.RunState) -> dict[str, Any]:
    """Leaves by dotted name, in the order of the tree."""
    leaves = jax.tree.leaves_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have one name: is there a dot in a name?")
    return named


def _text(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


# -------------------------------------------------------------------------------------- config.json


def write_config(workdir: str | os.PathLike, config_json: Mapping[str, Any]) -> None:
    """Write DIR/config.json, whole or not at all."""
    path = pathlib.Path(workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
    os.replace(fresh, path)


@contextlib.contextmanager
def sole_use(workdir: str | os.PathLike) -> Iterator[None]:
    """Hold DIR for this process; ConfigError if another one of this machine trains in it."""
    with open(pathlib.Path(workdir) / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise config.ConfigError(f"another process is training in {workdir}; wait for it, or "
                                     "choose another work directory") from error
        yield  # the lock goes with the file, also when the process is killed


def check_config(workdir: str | os.PathLike, config_json: Mapping[str, Any], *,
                 free: tuple[str, ...]) -> list[str]:
    """Raise ConfigError if DIR/config.json differs in a field that is not below a `free` prefix;
    return the free fields in which it differs.

    A directory without config.json is accepted, unless it holds a run's checkpoints.
    """
    path = pathlib.Path(workdir) / "config.json"
    _check_kinds(path.parent)
    if not path.exists():
        if any(path.parent.glob("checkpoints/[0-9]*")):
            raise config.ConfigError(f"{workdir} holds checkpoints but no config.json to say of "
                                     "what; put it back, or choose another work directory")
        return []
    try:
        old = _fields(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise config.ConfigError(f"{path} is no JSON object ({error}); remove it, or choose "
                                 "another work directory") from error
    new = _fields(json.loads(json.dumps(config_json)))
    differ = [name for name in dict.fromkeys([*new, *old])
              if old.get(name, "absent") != new.get(name, "absent")]
    lines = [f"  {name}: {old.get(name, 'absent')!r} there, {new.get(name, 'absent')!r} now"
             for name in differ if not f"{name}.".startswith(tuple(f"{one}." for one in free))]
    if lines:
        raise config.ConfigError(f"{workdir} belongs to another configuration; choose another work "
                                 "directory or set back:\n" + "\n".join(lines))
    return differ


def _check_kinds(workdir: pathlib.Path) -> None:
    """Refuse a folder where a run keeps a file, and the reverse."""
    own, folders = ("config.json", "metrics.jsonl"), ("checkpoints", "samples", "tb")
    wrong = [(name, "folder", "file") for name in own if (workdir / name).is_dir()]
    wrong += [(name, "file", "folder") for name in folders if (workdir / name).is_file()]
    for name, found, kept in wrong:
        raise config.ConfigError(f"{workdir / name} is a {found}, where a run keeps a {kept}; "
                                 "choose another work directory")


def _fields(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        fields |= _fields(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return fields
