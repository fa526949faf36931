"""Programs for contexts that wait, at the widths of a real model, compiled by the real TPU compiler
for a slice that is not there: they change pools and slots in place, and send no context anywhere.
Two layers, to be quick."""

import dataclasses

import pytest
import test_tpu_rollout
import tiny

from dapo_jax.models import presets
from dapo_jax.planning import programs as planned
from dapo_jax.rollout import draw, programs
from dapo_jax.runtime import mesh as mesh_lib

pytestmark = [
    pytest.mark.tpu, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
SLOTS, LENGTH, REPLY = 64, 512, 64


@pytest.fixture(scope="module", params=[(1, 4, 1), (1, 2, 2)], ids=["fsdp", "tensor"])
def compiled(request):
    """Programs by name; no others of an engine are compiled."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler")
    from jax.experimental import topologies
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = tiny.mesh(*request.param, devices=list(chips))
    spec = dataclasses.replace(presets.spec("qwen2.5-1.5b", compute_dtype="bfloat16"), layers=2)
    made = programs.compile_programs(
        spec, draw.Sampling(max_new_tokens=LENGTH, stop_ids=(0,)), mesh, rows=1, slots=(SLOTS,),
        buckets=(LENGTH,), chunk=32, gather=True, room=programs.Room(SLOTS, 0, (REPLY,)),
        build=planned.program).parking
    wanted = {"lines": made.lines[SLOTS], "store": made.store, "extend": made.extend[REPLY],
              "seat": made.seat[SLOTS]}
    return {name: mesh_lib.compiled(one.function, mesh, *one.arguments)
            for name, one in wanted.items()}


def test_pools_and_slots_are_changed_in_place(compiled):
    for name in ("store", "extend", "seat"):
        memory = compiled[name].memory_analysis()
        assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes, name
        assert memory.temp_size_in_bytes < memory.output_size_in_bytes, name


def test_contexts_stay_on_their_chips(compiled):
    for name in ("lines", "store", "seat"):
        assert not test_tpu_rollout.collectives(compiled[name]), name
