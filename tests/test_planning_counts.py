"""What the planner counts from shapes, against counts by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from test_planning import small
from test_planning_fit import slots_room
from test_planning_parts import both

from dapo_jax import config
from dapo_jax.models import presets
from dapo_jax.planning import (
    collectives,
    compiler,
    estimate,
    fit,
    memory,
    meshes,
    moves,
    programs,
    whole,
)

MESH = {"data": 2, "fsdp": 4, "tensor": 8}


@pytest.fixture(scope="module")
def plan():
    return programs.plan(small(**{"rl.epochs_per_batch": 3, "rl.updates_per_step": 2,
                                  "model.remat": "full"}), backend="cpu", parts=4)


@pytest.fixture(scope="module")
def sides(plan):
    """Abstract programs, and what is held, over fsdp 4 and over data 2 x tensor 2."""
    found = {sizes: both(plan, sizes)[1] for sizes in ((1, 4, 1), (2, 1, 2))}
    return {sizes: (made, memory.held(plan, made)) for sizes, made in found.items()}


def test_a_step_runs_each_program_as_often_as_its_samples_need(plan):
    """16 prompts x 4 samples in microbatches of 2 parts x 4 slots x 2 rows; 8 slots x 2 rows draw,
    an eighth of them is admitted at once, and each group sits in a slot of its own."""
    part = memory.Split(slots=4, prompt=10, rows=2, width=6, tensor=1, parts=2, kept=1.0)
    prompts, samples = plan.phase.prompts_per_step, plan.phase.samples_per_prompt
    assert (samples, plan.cfg.rollout.slots, programs.rows(plan)) == (4, (4, 8), 2)
    runs = whole._runs(plan, config.Mesh(data=2), part, 5)
    passes = math.ceil(prompts * samples / (2 * 4 * 2))
    assert runs["update"] == 3 * passes and runs["log-probs, old"] == passes
    assert runs["apply"] == 2 * 3 and runs["weights"] == 1 and runs["states"] == 0
    assert runs["decode"] == math.ceil(prompts * samples * 5 / (8 * 2))
    assert runs["admit"] == runs["prefill"] >= prompts / 8


def test_another_mesh_holds_what_a_plan_for_it_holds(plan, sides):
    """Up to norms, which tensor does not split: of one slot a device, as all of these have."""
    (_, here), (_, there) = sides[1, 4, 1], sides[2, 1, 2]
    part = memory.Split(2, 10, 4, 6, 1, 4, 1 / 4)
    room = fit.Room(1e12, here, part, 4, plan)
    shape, other = config.Mesh(fsdp=4), config.Mesh(data=2, tensor=2)
    found = meshes._peaks(room, 100.0, shape, shape, other)
    one = memory.Split(1, 10, 4, 6, 2, 2, 1 / 2)
    temporary = sum(memory.accumulate_temporary(
        plan.spec, one, head_chunk=estimate.head_chunk(plan), saved=100.0).values())
    assert found["update"] == pytest.approx(there.in_update + temporary, rel=0.03)
    slots = plan.cfg.rollout.slots[-1] / 2
    caches = (there.prompt_cache + there.sample_cache) / slots
    prompts = memory.Split(1, plan.cfg.prompts.buckets[-1], 0, 6, 2, 2, 1 / 2)
    running = memory.prefill_temporary(plan.spec, prompts) + memory.prompt_cache(
        plan.spec, prompts)
    assert found["rollout"] == pytest.approx(
        there.always + there.weights + max(there.weights, caches + running), rel=0.03)
    assert there.parameters > 1.5 * here.parameters


def test_bytes_that_programs_move_are_those_that_are_held(plan, sides):
    made, held = sides[1, 4, 1]
    # Parameters and moments are read and written, sums read; a few counters are among them.
    step = estimate._apply(plan, made, "apply").bytes
    assert step == pytest.approx(2 * (held.parameters + held.optimizer) + held.gradients, abs=100)
    token = estimate._decode(plan, made, "decode").bytes
    assert token == held.weights + held.prompt_cache + held.sample_cache


@pytest.mark.parametrize("tensor, parts", [(1, 1), (2, 2), (4, 1)])
def test_caches_are_split_where_heads_of_keys_are(tensor, parts):
    part = memory.Split(3, 10, 0, 0, tensor, 1, 1.0)
    spec = tiny.SPEC  # two layers, two heads of 8 numbers, in float32
    assert memory.prompt_cache(spec, part) == 2 * 2 * 3 * 10 * 2 * 8 * 4 / parts


def test_what_an_update_sends_is_counted_from_its_parameters():
    """1,600 parameters in bfloat16, of which 160 are the head's table, whose gradient is in
    float32; an eighth of them over tensor."""
    found = {(one.kind, one.axes): (one.count, one.bytes) for one in collectives.of_update(
        parameters=1600, table=160, tokens=7, d_model=3, layers=2, size=2, mesh=MESH)}
    gradients = 2 * 1440 / 8 + 4 * 160 / 8
    assert found == {("all-gather", ("fsdp",)): (4, 2 * 2 * 1600 / 8),
                     ("reduce-scatter", ("fsdp",)): (2, gradients),
                     ("all-reduce", ("data",)): (2, gradients / 4),
                     ("all-reduce", ("tensor",)): (10, 10 * 7 * 3 * 2)}
    forward = collectives.of_forward(parameters=1600, tokens=7, d_model=3, layers=2, size=2,
                                     mesh=MESH | {"data": 1})
    assert [(one.axes, one.count, one.bytes) for one in forward] == [
        (("fsdp",), 2, 2 * 1600 / 8), (("tensor",), 5, 5 * 7 * 3 * 2)]


def test_figures_that_grow_with_each_layer_are_continued():
    def at(layers):
        sent = (collectives.Collective("all-reduce", ("tensor",), 1 + 2 * layers, 8.0 * layers),)
        return compiler.Figures(10 + 3 * layers, 5 * layers, 7, 2.0 * layers, 100.0 + layers, sent)
    assert compiler.by_layers(at(2), at(4), (2, 4, 28)) == at(28)
    assert estimate.line((2, 4), [16.0, 22.0], 28) == 10 + 3 * 28


def test_slots_searched_by_compiling_take_what_grows_with_them_along():
    """Beside 60 bytes: a slot takes 10 of caches; on top comes the larger of 7 for a token, of
    whatever number, and 1 a slot for prompts. So eight slots take 88 bytes, seven 77."""
    asked = []

    def compile_at(what, slots):
        asked.append((what, slots))
        return estimate.Estimate(7.0, 0, 0)
    found = fit.slots(*slots_room(147), compiles=9, asked=compile_at)
    assert found["largest slots"] == 7 and {what for what, _ in asked} == {"decode"}


@pytest.mark.parametrize("held, wanted", [
    (("data", "fsdp"), ("fsdp", "data")), ("tensor", ("data", "fsdp")), (None, ("fsdp", "data"))])
def test_parts_over_several_axes_lie_where_jax_says(held, wanted):
    mesh = tiny.mesh(data=2, fsdp=2)
    shapes = [jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(
        mesh, PartitionSpec(axes))) for axes in (held, wanted)]
    rows = [{device: set(np.arange(8)[index[0]].tolist()) for device, index in
             shape.sharding.devices_indices_map((8, 3)).items()} for shape in shapes]
    lacking = [len(rows[1][device] - rows[0][device]) * 3 * 4 for device in mesh.devices.flat]
    assert moves.received([shapes[0]], [shapes[1]]) == lacking


def test_a_preset_s_blocks_have_the_numbers_that_are_counted():
    """Against the shapes themselves, without norms and biases."""
    spec = presets.spec("qwen2.5-0.5b")
    heads = 2 * (14 + 2) * 64 * 896
    assert memory._block_numbers(spec) == heads + 3 * 896 * 4864
