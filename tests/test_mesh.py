import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from dapo_jax import config
from dapo_jax.models import transformer
from dapo_jax.runtime import mesh as mesh_lib


def test_the_mesh_takes_the_first_devices_in_the_asked_shape():
    mesh = tiny.mesh(data=1, fsdp=2, tensor=1)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert mesh.devices.ravel().tolist() == jax.devices()[:2]
    assert tiny.mesh(data=-1, fsdp=2).shape["data"] == 2
    assert mesh_lib.batch_parts(tiny.mesh(data=2, fsdp=2)) == 4


class Device:  # jax keeps meshes by their devices, so these must be hashable
    def __init__(self, process_index):
        self.process_index = process_index


def test_a_process_owns_the_parts_of_a_batch_that_a_device_of_its_holds(monkeypatch):
    owners = (0, 1, 1, 0, 1, 1, 2, 2)  # of the devices, two to a part
    monkeypatch.setattr(jax, "devices", lambda: [Device(owner) for owner in owners])
    mesh = tiny.mesh(data=2, fsdp=2, tensor=2)
    assert mesh_lib.own_parts(mesh) is None  # the only process: all
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for index, parts in enumerate([(0, 1), (0, 1, 2), (3,)]):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        assert mesh_lib.own_parts(mesh) == parts


def test_a_mesh_that_leaves_out_a_process_is_refused(monkeypatch):
    devices = [Device(index // 2) for index in range(6)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert tiny.mesh(data=5).devices.size == 5
    with pytest.raises(config.ConfigError, match="first 2 of 6 devices, and none of process 1, 2"):
        tiny.mesh(data=2)


@pytest.mark.parametrize("sizes,message", [
    ({"data": 8}, "asks for 8 x 1 x 1 devices .* 4 are here"),
    ({"data": 1, "fsdp": 2, "tensor": 4}, "asks for 1 x 2 x 4"),
    ({"data": -1, "tensor": 8}, "asks for -1 x 1 x 8")])
def test_too_many_devices_are_refused_with_both_numbers(sizes, message):
    with pytest.raises(config.ConfigError, match=message):
        tiny.mesh(**sizes)


def names(sharding):
    return tuple(sharding.spec)


def test_parameters_are_split_by_their_logical_axes():
    placed = mesh_lib.param_shardings(tiny.mesh(1, 2, 2), tiny.SPEC)
    attention, mlp = placed["blocks"]["attention"], placed["blocks"]["mlp"]
    assert names(placed["embedding"]) == ("tensor", "fsdp")
    assert names(attention["query"]) == (None, "fsdp", "tensor", None)
    assert names(attention["out"]) == (None, "tensor", None, "fsdp")
    assert names(mlp["down"]) == (None, "tensor", "fsdp")
    assert names(attention["norm"]) == (None, "fsdp") and names(placed["norm"]) == ("fsdp",)


def test_an_axis_that_its_mesh_axis_does_not_divide_stays_whole():
    spec = dataclasses.replace(tiny.SPEC, vocab=63, kv_heads=1, heads=3)
    placed = mesh_lib.param_shardings(tiny.mesh(1, 2, 2), spec)
    assert names(placed["embedding"]) == (None, "fsdp")
    for kernel in ("query", "key"):
        assert names(placed["blocks"]["attention"][kernel]) == (None, "fsdp", None, None)
    assert names(placed["blocks"]["mlp"]["up"]) == (None, "fsdp", "tensor")
    made = jax.jit(lambda: transformer.init(spec, jax.random.key(0)), out_shardings=placed)()
    assert made["embedding"].addressable_shards[0].data.shape == (63, 16)


def test_what_an_axis_of_the_mesh_cannot_split_is_said_with_its_share():
    """Of the tiny model's numbers with heads, ff or vocabulary, two matrices of 2 heads a layer:
    2 * 2 * 32 * 2 * 8 of 2 * (2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 48) + 64 * 32."""
    said = {sizes: mesh_lib.unsplit(jax.sharding.AbstractMesh(sizes, mesh_lib.AXES), tiny.SPEC)
            for sizes in ((64, 1, 1), (3, 2, 2), (1, 2, 4), (1, 3, 1))}
    assert said[64, 1, 1] == said[3, 2, 2] == []
    (heads,), (width,) = said[1, 2, 4], said[1, 3, 1]
    assert heads.startswith("mesh.tensor = 4 does not divide 12% of the parameters")
    assert "(blocks.attention.key is" in heads or "(blocks.attention.value is" in heads
    assert width.startswith("mesh.fsdp = 3 does not divide 100% of the parameters")


def test_each_moment_of_the_optimizer_lies_where_its_parameter_does():
    mesh = tiny.mesh(1, 2, 2)
    placed = mesh_lib.param_shardings(mesh, tiny.SPEC)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.eval_shape(lambda: transform.init(transformer.init(tiny.SPEC, jax.random.key(0))))
    found = mesh_lib.like_params(mesh, placed, state)
    adam = found[1][0]
    assert adam.mu == placed and adam.nu == placed
    assert names(adam.count) == ()


def test_a_moment_of_a_short_name_is_not_mistaken_for_a_longer_path():
    """`norm` stands at the top and inside blocks, where it has an axis more."""
    mesh = tiny.mesh(1, 2, 1)
    placed = mesh_lib.param_shardings(mesh, tiny.SPEC)
    shapes = jax.eval_shape(lambda: transformer.init(tiny.SPEC, jax.random.key(0)))
    found = mesh_lib.like_params(mesh, placed, {"mu": shapes})
    assert names(found["mu"]["norm"]) == ("fsdp",)
    assert names(found["mu"]["blocks"]["mlp"]["norm"]) == (None, "fsdp")


def test_what_is_not_of_the_shape_of_its_parameter_is_whole_everywhere():
    """Sums over rows, as Adafactor holds them under the parameters' paths."""
    mesh = tiny.mesh(1, 2, 2)
    placed = mesh_lib.param_shardings(mesh, tiny.SPEC)
    state = jax.eval_shape(lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=1).init(
        transformer.init(tiny.SPEC, jax.random.key(0))))
    found = mesh_lib.like_params(mesh, placed, state)
    assert all(names(leaf) == () for leaf in jax.tree.leaves((found.v_row, found.v_col))
               if leaf != found.v["norm"])
    assert names(found.v["norm"]) == ("fsdp",)


def test_slots_that_the_mesh_does_not_divide_are_refused_by_name():
    mesh = tiny.mesh(2, 2, 1)
    mesh_lib.check_divides(mesh, (4, 8), "rollout.slots")
    with pytest.raises(config.ConfigError, match=r"config.rollout.slots holds 2, 6; .* = 4"):
        mesh_lib.check_divides(mesh, (2, 4, 6), "rollout.slots")


def test_put_and_fetch_give_back_what_they_got():
    tree = {"a": np.arange(8, dtype=np.int32), "b": np.ones((4, 3), np.float32)}
    there = mesh_lib.put(tree, mesh_lib.batch_sharding(tiny.mesh(2, 2)))
    assert there["a"].addressable_shards[0].data.shape == (2,)
    jax.tree.map(np.testing.assert_array_equal, mesh_lib.fetch(there), tree)


def test_structs_carry_shape_type_and_sharding():
    mesh = tiny.mesh(2, 2)
    made = mesh_lib.structs({"a": np.zeros((4, 2), np.int32)}, mesh_lib.batch_sharding(mesh))
    assert made["a"].shape == (4, 2) and made["a"].dtype == np.int32
    assert made["a"].sharding.spec == P(("data", "fsdp"))
