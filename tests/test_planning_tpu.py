"""The planner against the TPU compiler: eight updates counted and compiled, and the slice that each
configuration names."""

import re

import pytest
from conftest import ROOT

from dapo_jax import command_line, config, config_checks
from dapo_jax.planning import chips, compiler, memory, programs, whole

pytestmark = [
    pytest.mark.slow, pytest.mark.tpu, pytest.mark.xdist_group("tpu"),
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
# Preset, layers, chip, mesh, prompt and completion tokens, slots of a device.
CASES = [("qwen2.5-0.5b", 0, "v5e", "fsdp:4", 512, 3584, 1),
         ("qwen2.5-0.5b", 0, "v5e", "fsdp:4", 512, 3584, 2),
         ("qwen2.5-1.5b", 0, "v5e", "fsdp:4", 512, 1536, 1),
         ("qwen2.5-1.5b", 0, "v5p", "data:2,fsdp:2", 1024, 3072, 2),
         ("qwen2.5-7b", 8, "v5p", "fsdp:4", 1024, 7168, 1),
         ("llama3.2-1b", 0, "v6e", "fsdp:4", 512, 3584, 2),
         ("qwen3-4b", 8, "v4", "fsdp:4", 512, 3584, 1),
         ("qwen2.5-7b", 8, "v5p", "fsdp:2,tensor:2", 1024, 7168, 1)]


def planned(preset, layers, prompt, new, slots):
    values = config.default()
    values.model.update({"source": "preset", "preset": preset, "remat": "full"})
    values.prompts.buckets = (prompt,)
    values.rollout.max_new_tokens = new
    values.rl.update({"packed_prompts": prompt, "microbatch_slots": slots})
    plan = programs.plan(config_checks.from_dict(values), backend="tpu")
    cut = programs.cut(plan.spec, layers)
    return programs.Plan(plan.cfg, cut, cut, plan.phase, plan.algorithm, plan.shape_from)


@pytest.mark.parametrize("case", CASES, ids=[f"{one[0]} {one[2]} {one[3]} {one[6]}"
                                             for one in CASES])
def test_the_counted_memory_of_an_update_is_near_the_compiler_s(case):
    preset, layers, chip, mesh, prompt, new, slots = case
    shape = chips.mesh_shape(mesh)
    plan = planned(preset, layers, prompt, new, slots * shape.data * shape.fsdp)
    on = compiler.slice_mesh(chips.find(chip), shape)
    accumulate = programs.only(programs.of_update(plan, on).accumulate)
    figures = compiler.compiled(accumulate, text=True)
    part = memory.split(accumulate)
    counted = sum(memory.accumulate_temporary(
        plan.spec, part, head_chunk=plan.cfg.model.head_chunk).values())
    held = sum(map(memory.on_device, accumulate.arguments))
    # Arrays are padded to whole tiles there.
    assert held == pytest.approx(figures.arguments, rel=0.02)
    assert held + counted == pytest.approx(figures.arguments + figures.temporary, rel=0.15)
    assert figures.sent  # their text was there to be counted


def named():
    """(path, chip, mesh) of configurations whose docstring gives the command that plans them."""
    for path in sorted((ROOT / "configs").rglob("*.py")):
        if command := re.search(r"dapo_jax\.plan --config=\S+((?:[ \\\n]+--\S+)*)",
                                path.read_text()):
            flags = dict(re.findall(r"--(\w+)=(\S+)", command[1]))
            if chips.find(flags["chip"]).slices:
                yield path, flags


@pytest.mark.parametrize(("path", "flags"), list(named()), ids=[path.stem for path, _ in named()])
def test_a_configuration_compiles_for_the_slice_that_it_names(path, flags):
    cfg = config_checks.from_dict(command_line.load_file(str(path)))
    shape = chips.mesh_shape(flags["mesh"]) if "mesh" in flags else cfg.mesh
    figures = whole.planned(cfg, chips.find(flags["chip"]), shape, compiles=0)
    for name, one in figures["programs"].items():
        assert one["source"].startswith("TPU compiler"), (name, one["source"])
    assert max(figures[side]["peak"] for side in ("update", "rollout")) < figures["memory"]


def test_all_configurations_that_name_a_slice_are_found():
    assert {path.stem for path, _ in named()} >= {"dapo_qwen2_5_32b", "bench_qwen2_5_1_5b"}
