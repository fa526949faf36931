"""A sampler that splits the devices in another way than the trainer."""

import itertools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import config
from dapo_jax.models import transformer
from dapo_jax.rollout import engine as engines
from dapo_jax.rollout import programs, resharding
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent


def drawn(trained, split, **options):
    """Samples of the tiny model, whose parameters lie on `trained`."""
    engine = tiny.engine(on=trained, split=split, slots=(trained.size,), rows=2, **options)
    params = mesh_lib.put(tiny.params(), mesh_lib.param_shardings(trained, tiny.SPEC))
    root = jax.jit(lambda: jax.random.key(7), out_shardings=mesh_lib.replicated(trained))()
    metrics.count_compiles()
    before = metrics.compile_count()
    with jax.transfer_guard("disallow"):
        served = engines.sample(engine, params, tiny.plan([3, 0, 6, 1], 4), table=tiny.table(),
                                root=root, step=1)
    assert metrics.compile_count() == before
    assert served.use.weights_bytes == engine.weights_bytes > 0
    return served.samples


def assert_other_splits_change_nothing(trained, *splits, **options):
    wanted = drawn(trained, (), **options)
    for split in splits:
        found = drawn(trained, split, **options)
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


def test_samples_do_not_depend_on_how_the_sampler_splits_the_devices():
    assert_other_splits_change_nothing(tiny.mesh(data=2, fsdp=2), (2, 1, 2))


EIGHT = """
import sys
sys.path.insert(0, "tests")
import test_resharding, tiny
test_resharding.assert_other_splits_change_nothing(
    tiny.mesh(data=2, fsdp=4), (4, 1, 2), (2, 2, 2))
"""


@pytest.mark.slow
def test_on_eight_devices_too():
    subprocess.run([sys.executable, "-c", EIGHT], cwd=ROOT, check=True, timeout=600, env={
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"})


# ------------------------------------------------------------------------------------- bytes moved


def received(trees):
    """Bytes that devices hold after and not before, by marking every element, from arrays as they
    really lie."""
    total = 0
    for before, after in trees:
        held = {shard.device: shard.index for shard in before.addressable_shards}
        for shard in after.addressable_shards:
            mask = np.zeros(after.shape, bool)
            mask[shard.index] = True
            mask[held[shard.device]] = False
            total += int(mask.sum()) * after.dtype.itemsize
    return total


@pytest.mark.parametrize("split, gather", [((), True), ((), False), ((2, 1, 2), True),
                                           ((1, 2, 2), False)])
def test_moved_bytes_are_those_that_devices_did_not_hold(split, gather):
    trained = tiny.mesh(data=2, fsdp=2)
    sampling = mesh_lib.resplit(trained, split)
    params = mesh_lib.put(tiny.params(), mesh_lib.param_shardings(trained, tiny.SPEC))
    move = resharding.compile_move(tiny.SPEC, trained, sampling)
    assert (move is None) == (not split)
    moved = move(params) if move else params
    places = programs.weight_places(tiny.SPEC, sampling, gather=gather)
    cut = jax.jit(lambda tree: transformer.unstack(tiny.SPEC, tree))
    as_held = jax.jit(lambda tree: transformer.unstack(tiny.SPEC, tree), out_shardings=(
        programs.weight_places(tiny.SPEC, sampling, gather=False)))(moved)
    weights = jax.device_put(cut(moved), places)
    pairs = itertools.chain(
        zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True) if move else (),
        zip(jax.tree.leaves(as_held), jax.tree.leaves(weights), strict=True))
    found = resharding.moved_bytes(tiny.SPEC, trained, sampling, places)
    assert found == received(pairs)
    assert (found == 0) == (not split and not gather)


def test_another_number_of_devices_is_refused():
    with pytest.raises(config.ConfigError, match=r"\(1, 1, 2\) is for 2 devices, but config.mesh "):
        mesh_lib.resplit(tiny.mesh(data=2, fsdp=2), (1, 1, 2))
