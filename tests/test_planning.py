"""The planner: bytes against what is allocated, counts against loops, and refusals."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT

from dapo_jax import config, config_checks, plan
from dapo_jax.planning import (
    chips,
    collectives,
    compiler,
    estimate,
    fit,
    memory,
    programs,
    times,
    work,
)
from dapo_jax.runtime import mesh as mesh_lib

GIB = 2 ** 30


def small(**changes):
    values = config.default()
    values.model.update({"layers": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "head_size": 8,
                         "ff": 48, "compute_dtype": "float32"})
    values.rollout.update({"slots": (4, 8), "rows": 2})
    values.rl.update({"microbatch_slots": 8, "samples_per_prompt": 4})
    values.update_from_flattened_dict(changes)
    return config_checks.from_dict(values)


@pytest.fixture(scope="module")
def planned():
    return programs.plan(small(), backend="cpu")


def shape_only(data, fsdp, tensor):
    return chips.shape_only(config.Mesh(data=data, fsdp=fsdp, tensor=tensor))


def allocated(tree):
    """Bytes of the arrays on the first device."""
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree)
               for shard in leaf.addressable_shards if shard.device == jax.devices()[0])


def made(structs, function):
    placed = jax.tree.map(lambda leaf: leaf.sharding, structs)
    return jax.jit(function, out_shardings=placed)()


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 1, 2)])
def test_bytes_by_kind_are_those_that_are_allocated(planned, shape):
    abstract, mesh = shape_only(*shape), mesh_lib.make(config.Mesh(*shape))
    held = memory.held(programs.of_update(planned, abstract),
                       programs.of_rollout(planned, abstract))
    of_update = programs.of_update(planned, mesh)
    state, sums = of_update.apply.arguments
    weights, slots, *_ = programs.only(programs.of_rollout(planned, mesh).decode).arguments
    zeros = lambda tree: lambda: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    for name, structs in {"parameters": state.params, "optimizer": state.opt_state,
                          "gradients": sums[0], "weights": weights, "prompt_cache": slots.cache,
                          "sample_cache": slots.own}.items():
        assert getattr(held, name) == allocated(made(structs, zeros(structs))), name


def test_contexts_that_wait_take_the_bytes_that_are_allocated():
    plan = programs.plan(small(**{"environment.name": "calculator", "environment.parked": 6,
                                  "rollout.slots": (4, 8)}), backend="cpu")
    mesh = mesh_lib.make(config.Mesh(data=2, tensor=2))
    shapes = programs.of_rollout(plan, mesh).parking.store.arguments[0]
    pool = made(shapes, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
                                             shapes))
    held = memory.held(programs.of_update(plan, mesh), programs.of_rollout(plan, mesh))
    assert held.parked == allocated(pool) > 0 and shapes.keys.shape[1] == 6 + 2
    assert programs.rows(plan) == 1


def test_a_program_compiled_here_takes_the_bytes_that_are_planned(planned):
    mesh = mesh_lib.make(config.Mesh(data=2, fsdp=2))
    accumulate = programs.only(programs.of_update(planned, mesh).accumulate)
    compiled = mesh_lib.compiled(accumulate.function, mesh, *accumulate.arguments)
    sums, params, batch = accumulate.arguments
    found = compiled.memory_analysis()
    # What a program does not read is no argument of it: the sampler's log-probs, for one, are.
    assert found.argument_size_in_bytes == sum(map(memory.on_device, (sums, params, batch)))
    assert found.alias_size_in_bytes == memory.on_device(sums)


def test_the_work_of_a_loop_is_counted_as_often_as_it_runs():
    x, w = jnp.zeros((3, 4)), jnp.zeros((5, 4, 4))

    def chain(x, w):
        return jax.lax.scan(lambda y, one: (jnp.tanh(y @ one), None), x, w)[0] @ jnp.ones((4, 7))
    program = programs.program(jax.jit(chain), shape_only(1, 1, 1), x, w)
    found = work.counted(program)
    assert found.flops == 5 * 2 * 3 * 4 * 4 + 2 * 3 * 4 * 7
    assert found.bytes == 4 * (5 * (12 + 16 + 12) + (12 + 28 + 21))


def test_the_work_of_an_update_is_a_forward_twice_and_a_backward(planned):
    cfg = small(**{"model.remat": "full", "model.head_chunk": 4})
    found = {remat: work.counted(programs.only(programs.of_update(
        programs.plan(one, backend="cpu"), shape_only(1, 1, 1)).accumulate)).flops
        for remat, one in (("none", small(**{"model.head_chunk": 4})), ("full", cfg))}
    spec, part = planned.spec, memory.split(programs.only(
        programs.of_update(planned, shape_only(1, 1, 1)).accumulate))
    tokens = part.slots * (part.prompt + part.rows * (part.width - 1))
    matrices = spec.layers * spec.d_model * (2 * (4 + 2) * 8 + 3 * spec.ff)
    again = found["full"] - found["none"]
    needed = matrices - spec.layers * spec.d_model * spec.ff  # a block's last product is not
    assert 1 <= again / (2 * tokens * needed) < 1.5  # the rest is attention
    assert found["none"] > 3 * 2 * tokens * matrices


TEXT = """HloModule one

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %g = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %h = bf16[8,16]{1,0} all-gather-done(%g)
  %r = f32[2,16]{1,0} reduce-scatter(%y), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (p: bf16[8,16]) -> f32[] {
  %w = (s32[], bf16[8,16]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %s = f32[10]{0} all-reduce(%z), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    found = {one.kind: (one.count, one.bytes) for one in collectives.found(TEXT)}
    assert found == {"all-gather": (3, 3 * 8 * 16 * 2), "all-reduce": (1, 40),
                     "reduce-scatter": (3, 3 * 4 * 2 * 16 * 4)}
    deeper = collectives.found(TEXT, scale=lambda times: 64 if times == 3 else times)
    assert {one.kind: one.count for one in deeper}["all-gather"] == 64


def test_each_slice_has_the_chips_that_its_name_says():
    for chip in chips.CHIPS.values():
        for count, name in chip.slices.items():
            assert count == math.prod(int(size) for size in name.split("x"))
    assert chips.topology(chips.find("v5p"), config.Mesh(data=16, fsdp=16)) == "v5p:4x8x8"
    assert chips.topology(chips.find("H100"), config.Mesh(data=16, fsdp=8)) == "128 x h100"


@pytest.mark.parametrize(("flags", "said"), [
    (["--chip=v7"], "known are v4"), (["--mesh=date:4"], "AXIS:SIZE"),
    (["--mesh=data:4,data:2"], "named once"), (["--mesh=data:0"], "size from 1"),
    (["--mesh=data:3"], "there is no slice of 3 v5p; there are 4 (2x2x1)"),
    (["--mesh=data:12", "--chip=h100"], "nodes of 8"), (["--length=9999"], "max_new_tokens"),
    ([f"--json={__file__}/plan.json"], "--json: "),
    (["--mesh=fsdp:4", "--config.rl.microbatch_tokens=8"], "raise it to at least"),
    (["--config.model.source=folder", "--config.model.path=none/such"], "config.model.preset")])
def test_what_cannot_be_planned_is_refused_by_name(flags, said):
    with pytest.raises(config.ConfigError) as error:
        plan.main([f"--config={ROOT / 'tests' / 'tiny_config.py'}", "--mesh=data:4", *flags])
    assert said in str(error.value)


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    out = tmp_path / "new" / "plan.json"
    assert plan.main([f"--config={ROOT / 'tests' / 'tiny_config.py'}", "--mesh=data:2,fsdp:2",
                      "--chip=h100", f"--json={out}"]) == 0
    figures, text = json.loads(out.read_text()), capsys.readouterr().out
    assert figures["slice"] == "4 x h100" and figures["longest row"]["fits"]
    assert figures["notes"] == []
    assert "without context parallelism" in text and "at the peak" in text
    held = figures["held"]["in update"]
    assert figures["update"]["peak"] == held + figures["update"]["temporary"]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 31])
def test_the_largest_number_that_fits_is_found(limit):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= 4 * limit
    assert estimate.largest(fits, parts=4, least=4, most=4 * 20) == 4 * min(limit, 20)
    assert len(asked) <= 10


def test_a_bound_names_the_slowest_resource():
    chip = chips.find("h100")
    near = times.bound(chip, flops=989e12, moved=3350e9 / 2, sent=90e9, group=8)
    far = times.bound(chip, flops=989e12, moved=3350e9 / 2, sent=90e9, group=16)
    assert (near.seconds, near.limit) == (1.0, "compute")
    assert far.limit == "links" and far.seconds == pytest.approx(90e9 / 50e9)
    assert times.sum_of([(2, near), (3, far)])[1] == "links"


def test_what_the_compiler_refuses_is_stepped_down_from_a_bounded_number_of_times():
    asked = []

    def compile_at(number):
        asked.append(number)
        return 10.0 * number
    assert fit.confirmed(7, compile_at, {}, room=55.0, compiles=3) == (5, "compiled")
    assert asked == [7, 6, 5]
    assert fit.confirmed(7, compile_at, {}, room=5.0, compiles=2) == (5, "counted")
    assert fit.confirmed(0, None, {}, room=5.0, compiles=2) == (0, "counted")


def test_the_count_is_near_what_the_compiler_said_of_the_largest_model():
    """GiB of temporary memory of two updates of Qwen2.5-32B that were compiled for v5p."""
    values = config.default()
    values.model.update({"source": "preset", "preset": "qwen2.5-32b", "remat": "full"})
    spec = programs.plan(config_checks.from_dict(values), backend="tpu").spec
    for layers, part, compiled in (
            (64, memory.Split(1, 8192, 1, 16384, 1, 1 / 32), 30.77),
            (7, memory.Split(1, 2048, 1, 20480, 1, 1 / 16), 12.33)):
        parts = memory.accumulate_temporary(programs.cut(spec, layers), part, head_chunk=1024)
        assert sum(parts.values()) / GIB == pytest.approx(compiled, rel=0.1)


def test_slots_that_a_mesh_cannot_split_are_raised_and_said():
    plan = programs.plan(small(), backend="tpu", parts=12)
    assert (plan.cfg.rollout.slots, plan.phase.microbatch_slots) == ((12,), 12)
    assert [note.split(" does")[0] for note in plan.notes] == [
        "config.rollout.slots = 8", "config.rl.microbatch_slots = 8"]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match="pip install libtpu"):
        compiler.slice_mesh(chips.find("v5e"), config.Mesh(fsdp=4))
