"""What chips send each other, read from compiled programs, and by which links it goes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.planning import chips, collectives, compiler, programs, times
from dapo_jax.runtime import mesh as mesh_lib

TEXT = """HloModule one

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %g = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %h = bf16[8,16]{1,0} all-gather-done(%g)
  %r = f32[2,16]{1,0} reduce-scatter(%y), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: bf16[8,16]) -> f32[] {
  %w = (s32[], bf16[8,16]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %s = f32[10]{0} all-reduce(%z), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add
}
"""


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    found = {(one.kind, one.axes): (one.count, one.bytes) for one in collectives.found(TEXT, MESH)}
    inner = ("fsdp", "tensor")
    assert found == {("all-gather", inner): (3, 3 * 8 * 16 * 2),
                     ("all-reduce", ("data",)): (1, 40),
                     ("reduce-scatter", inner): (3, 3 * 4 * 2 * 16 * 4)}


# As the TPU compiler writes both: the loop's length stands in its condition alone, and what is sent
# as a reduce-scatter is an all-reduce in a fusion.
TPU_TEXT = """HloModule two

%cond (p: (s32[], bf16[8,16])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(28)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i, %constant.4), direction=LT
}

%all-reduce-scatter.3.clone (input.5: bf16[8,16]) -> bf16[2,16] {
  %all-reduce.7 = bf16[8,16]{1,0:T(8,128)(2,1)} all-reduce(%input.5), \
replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %s = bf16[2,16]{1,0} dynamic-slice(%all-reduce.7, %at)
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %f = bf16[2,16]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3.clone
}

ENTRY %main (p: bf16[8,16]) -> f32[] {
  %w = (s32[], bf16[8,16]) while(%t), condition=%cond, body=%body, metadata={op_name="while"}
}
"""


def test_loops_and_scatters_are_read_as_the_tpu_compiler_writes_them():
    (found,) = collectives.found(TPU_TEXT, MESH)
    assert found == collectives.Collective("reduce-scatter", ("fsdp", "tensor"), 28,
                                           28 * 8 * 16 * 2)


@pytest.mark.parametrize(("groups", "axes"), [
    ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
    ("replica_groups=[2,2,2]<=[8]", ("tensor",)), ("replica_groups={}", tuple(MESH)),
    ("replica_groups=mesh['x'=4,'y'=2] {'x':(2)2,'y'}", ("fsdp", "tensor")),
    ("replica_groups=mesh['x'=4,'y'=2] {'x':(1)2}", ("data",)),
    ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ("tensor",)),
    ("replica_groups=mesh['x'=2,'y'=4], device_ids=(0,2,1,3,4,6,5,7) {'x'}", ("data",)),
    ("source_target_pairs={{0,4},{4,0}}", ("data",)),
    ("source_target_pairs={{0,0},{1,2},{2,1},{3,3}}", ("fsdp", "tensor"))])
def test_the_axes_of_a_collective_are_those_in_which_its_devices_differ(groups, axes):
    text = f"ENTRY %main () -> f32[] {{\n  %s = f32[4]{{0}} all-to-all(%z), {groups}\n}}\n"
    (found,) = collectives.found(text, MESH)
    assert found.axes == axes


def test_a_bound_names_the_slowest_resource():
    chip, mesh = chips.find("h100"), {"data": 2, "fsdp": 1, "tensor": 8}
    sums = lambda axis: [collectives.Collective("all-reduce", (axis,), 1, 90e9)]  # noqa: E731
    near, far = (times.bound(chip, flops=989e12, moved=3350e9 / 2, sent=sums(axis), mesh=mesh)
                 for axis in ("tensor", "data"))
    assert (near.seconds, near.limit) == (1.0, "compute")
    assert near.links == pytest.approx(2 * 90e9 * 7 / 8 / 450e9) and near.network == 0
    assert far.limit == "network" and far.network == pytest.approx(90e9 / 50e9)
    assert times.sum_of([(2, near), (3, far)])[1] == "network"


@pytest.mark.parametrize("mesh", [(2, 4, 2), (4, 2, 4), (1, 16, 1), (2, 2, 1)])
@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("tensor",), ("data", "fsdp")])
def test_bytes_by_link_are_those_that_a_hierarchical_gather_takes_in(mesh, axes):
    """Counted part by part for device 0: first its share of what other nodes hold, then all else
    from its node."""
    sizes, node, whole = dict(zip(mesh_lib.AXES, mesh)), 8, 1024.0
    places = [tuple(map(int, np.unravel_index(device, mesh))) for device in range(math.prod(mesh))]
    index = [mesh_lib.AXES.index(axis) for axis in axes]
    group = [device for device, place in enumerate(places)
             if all(place[i] == 0 for i in range(3) if i not in index)]
    near = [device for device in group if device < node]
    share = whole / len(group)
    beyond = (len(group) - len(near)) * share / len(near)
    inside = whole - share - beyond
    sent = [collectives.Collective("all-gather", axes, 1, whole)]
    assert times.sent_bytes(sent, sizes, node=node) == pytest.approx((inside, beyond))
    assert times.sent_bytes(sent, sizes, node=0) == pytest.approx((whole - share, 0))


def test_what_a_program_compiled_here_sends_is_read_from_its_text(monkeypatch):
    monkeypatch.setattr(compiler, "READABLE", {})  # options of the TPU compiler
    mesh = mesh_lib.make(config.Mesh(data=2, fsdp=2))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=split)
    function = jax.jit(lambda x: x.sum(axis=1), out_shardings=mesh_lib.replicated(mesh))
    found = compiler.compiled(programs.program(function, mesh, x), text=True)
    assert found.sent == (collectives.Collective("all-reduce", ("fsdp",), 1, 4 * 4),)
    assert found.arguments == 4 * 8 // 2 * 4


def test_a_program_without_operations_has_figures(monkeypatch):
    """As the TPU compiler gives them for one that moves parameters: its analysis names none."""
    monkeypatch.setattr(compiler, "READABLE", {})
    mesh, place = mesh_lib.make(config.Mesh(fsdp=2)), jax.sharding.PartitionSpec
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32,
                             sharding=jax.sharding.NamedSharding(mesh, place("fsdp")))
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda self: {"utilization": 1.0})
    function = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, place()))
    found = compiler.compiled(programs.program(function, mesh, x), text=True)
    assert (found.flops, found.bytes) == (0, 0) and found.result == 4 * 8 * 4
    assert [one.kind for one in found.sent] == ["all-gather"]
