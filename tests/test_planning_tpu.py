"""The planner against the TPU compiler: eight updates counted and compiled, and the slice that each
configuration names."""

import dataclasses

import pytest
from test_planning_configs import known, named

from dapo_jax import config, config_checks, config_file
from dapo_jax.planning import chips, compiler, estimate, memory, programs, sources, whole

pytestmark = [
    pytest.mark.slow, pytest.mark.tpu,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]


@dataclasses.dataclass(frozen=True)
class Case:
    """An update on a slice; the layers of the model that are left (0: all)."""

    preset: str
    layers: int
    remat: str
    chip: str
    mesh: str
    prompt: int
    new: int
    slots: int  # of a device
    rows: int = 1  # more: not packed


CASES = [Case("qwen2.5-1.5b", 0, "full", "v5e", "fsdp:4", 512, 3584, 1),
         Case("qwen2.5-1.5b", 0, "full", "v5e", "fsdp:4", 512, 7680, 4),
         Case("qwen2.5-1.5b", 8, "dots", "v5p", "fsdp:4", 512, 3584, 1),
         Case("qwen3-4b", 8, "full", "v5e", "fsdp:2,tensor:2", 1024, 4096, 2),
         Case("qwen3-0.6b", 8, "none", "v6e", "data:2,fsdp:2", 512, 3584, 1),
         Case("llama3.2-1b", 0, "full", "v6e", "fsdp:4", 512, 3584, 2),
         Case("qwen2.5-7b", 8, "full", "v5p", "fsdp:4", 1024, 7168, 1),
         Case("qwen2.5-0.5b", 0, "full", "v4", "fsdp:4", 512, 1024, 2, rows=4)]


def planned(case, parts):
    values = config.default()
    values.model.update({"source": "preset", "preset": case.preset, "remat": case.remat})
    values.prompts.buckets = (case.prompt,)
    values.rollout.max_new_tokens = case.new
    values.rl.update({"microbatch_slots": case.slots * parts, "samples_per_prompt": case.rows}
                     if case.rows > 1 else {
        "microbatch_slots": case.slots * parts, "packed_prompts": case.prompt})
    plan = programs.plan(config_checks.from_dict(values), backend="tpu")
    cut = programs.cut(plan.spec, case.layers)
    return dataclasses.replace(plan, spec=cut, traced=cut)


@pytest.mark.parametrize("case", CASES, ids=[
    f"{one.preset} {one.remat} {one.chip} {one.mesh} {one.slots}" for one in CASES])
def test_the_counted_memory_of_an_update_is_near_the_compiler_s(case):
    shape = chips.mesh_shape(case.mesh)
    plan, abstract = planned(case, shape.data * shape.fsdp), chips.shape_only(shape)
    on = compiler.slice_mesh(chips.find(case.chip), shape)
    accumulate = programs.only(programs.of_update(plan, on).accumulate)
    figures = compiler.compiled(accumulate)
    counted = estimate.of_update(plan, sources.of(plan, abstract, abstract)).temporary
    held = sum(map(memory.on_device, accumulate.arguments))
    # Arrays are padded to whole tiles there.
    assert held == pytest.approx(figures.arguments, rel=0.02)
    assert held + counted == pytest.approx(figures.arguments + figures.temporary, rel=0.15)


@pytest.mark.parametrize(("name", "flags"), list(named()), ids=[name for name, _ in named()])
def test_a_configuration_compiles_for_the_slice_that_it_names(name, flags):
    cfg = config_checks.from_dict(config_file.load(str(known()[name])))
    shape = chips.mesh_shape(flags["mesh"]) if "mesh" in flags else cfg.mesh
    figures = whole.planned(cfg, chips.find(flags["chip"]), shape, compiles=0, minutes=60)
    for program, one in figures["programs"].items():
        assert one["source"].startswith("TPU compiler"), (program, one["source"])
    assert max(figures[side]["peak"] for side in ("update", "rollout")) < figures["memory"]
