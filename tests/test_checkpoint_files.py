import dataclasses

import jax
import numpy as np
import pytest
from test_checkpoint import run_state

from dapo_jax import config
from dapo_jax.runtime import checkpoint, checkpoint_files, metrics
from dapo_jax.runtime import mesh as mesh_lib


def spread(width, step):
    """A state of which each of four devices holds all of one array, and two pairs halves of
    another."""
    mesh = mesh_lib.make(config.Mesh(data=2, fsdp=2), jax.devices()[:4])
    halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    values = np.random.default_rng(step).normal(size=(width, 4)).astype(np.float32)
    state = run_state(step)
    params = {"whole": mesh_lib.put(values, mesh_lib.replicated(mesh)),
              "halves": mesh_lib.put(values, halves)}
    return dataclasses.replace(state, train=dataclasses.replace(state.train, params=params))


def test_a_save_compiles_nothing_where_its_slices_were_compiled(tmp_path):
    metrics.count_compiles()
    manager, found = checkpoint.open_manager(tmp_path, keep=2), {}
    for step, width in ((1, 16), (2, 24)):
        first, second = spread(width, step), spread(width, 10 + step)
        if width == 24:
            checkpoint_files.compile_slices(first.train)
        before = metrics.compile_count()
        checkpoint.save(manager, second)
        checkpoint.wait(manager)
        found[width] = metrics.compile_count() - before
        got = checkpoint.restore(manager, second)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(one, other)
    checkpoint.close(manager)
    assert found[16] >= 6 and found[24] == 0, found


def test_a_process_whose_save_failed_waits_for_no_other(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint_files.ocp.multihost, "get_barrier_sync_fn",
                        lambda: lambda **given: waited.append(given))
    checkpoint_files.barrier(key="all is well", timeout_ms=5)
    with pytest.raises(OSError, match="No space left"):
        try:
            raise OSError("No space left on device")
        finally:
            checkpoint_files.barrier(key="on the way out", timeout_ms=5)
    assert waited == [{"key": "all is well", "timeout_ms": 5}]
