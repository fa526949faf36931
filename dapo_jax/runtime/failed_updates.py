"""What an update that was not finite was made of, kept for whoever looks for the cause."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax import types
from dapo_jax.runtime import mesh as mesh_lib


def write(
    workdir: str | os.PathLike, batches: Sequence[types.TrainBatch | types.Stack], *, step: int,
    number: int,
) -> pathlib.Path:
    """Write DIR/failed_updates/step_N_update_U.npz: an array "microbatch.field" for each field of
    each microbatch (types.TrainBatch), but for what other processes hold."""
    path = pathlib.Path(workdir) / "failed_updates" / f"step_{step:06d}_update_{number + 1}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    index = 0
    for batch in batches:
        stack = isinstance(batch, types.Stack)
        fields, count = (batch.batch, int(batch.count)) if isinstance(batch, types.Stack) else (
            batch, 1)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(fields):
            if getattr(leaf, "is_fully_addressable", True):
                leaf, name = mesh_lib.fetch(leaf), jax.tree_util.keystr(keys)
                arrays |= {f"{index + i}{name}": leaf[i] if stack else leaf for i in range(count)}
        index += count
    np.savez(path, **arrays)
    return path
