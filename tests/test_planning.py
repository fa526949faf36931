"""The planner: bytes against what is allocated, counts against loops, and refusals."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from jax.experimental import pallas

from dapo_jax import config, config_checks, plan
from dapo_jax.models import head, presets
from dapo_jax.planning import chips, compiler, memory, programs, sources, work
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
    held = memory.held(planned, sources.of(planned, abstract, abstract))
    of_update = programs.of_update(planned, mesh)
    state, sums = of_update.apply.arguments
    weights, slots, *_ = programs.only(programs.of_rollout(planned, mesh).decode).arguments
    zeros = lambda tree: lambda: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    for name, structs in {"parameters": state.params, "optimizer": state.opt_state,
                          "gradients": sums[0], "weights": weights, "prompt_cache": slots.cache,
                          "sample_cache": slots.own}.items():
        assert getattr(held, name) == allocated(made(structs, zeros(structs))), name


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


@pytest.mark.parametrize("causal", [True, False])
def test_the_products_of_attention_s_kernels_are_two_forward_and_five_backward(causal):
    """Of 4 heads of 16 numbers, 128 queries after 128 tokens that all of them see: scores of each
    pair that is seen, where of a query's own row half is."""
    rows, heads, width, size = 3, 4, 128, 16
    seen = sum(width + (query + 0.5 if causal else width) for query in range(width))
    one = 2 * rows * heads * seen * size
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    query, keys = shape(rows, heads, width, size), shape(rows, heads, 2 * width, size)

    def equation(*given):
        call = pallas.pallas_call(lambda *_: None, out_shape=query)
        (found,) = jax.make_jaxpr(call)(*given).eqns
        return work._kernel(found, causal)[0]
    backward = (query, keys, keys, shape(rows, heads, 1, width), query)
    assert equation(query, keys, keys) == pytest.approx(2 * one)
    assert 2 * equation(*backward) == pytest.approx(5 * one)


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
    ([f"--json={__file__}/plan.json"], "--json: "), (["--json="], "--json is empty"),
    (["--count=2"], "--count=2: 0 or 1"), (["--compiles=-1"], "at least 0"),
    (["--minutes=-1"], "--minutes=-1: at least 0"),
    (["--config.rollout.mesh=(2,1,1)"], "for 2 devices, but the mesh has 4"),
    (["--config.lora.rank=99"], "config.lora.rank = 99 is more than the"),
    (["--mesh=fsdp:4", "--config.rl.microbatch_tokens=8"], "raise it to at least"),
    (["--config.model.source=folder", "--config.model.path=none/such"], "config.model.preset")])
def test_what_cannot_be_planned_is_refused_by_name(flags, said):
    with pytest.raises(config.ConfigError) as error:
        plan.main([f"--config={ROOT / 'tests' / 'tiny_config.py'}", "--mesh=data:4", *flags])
    assert said in str(error.value)


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    out = tmp_path / "new" / "plan.json"
    assert plan.main([f"--config={ROOT / 'tests' / 'tiny_config.py'}", "--mesh=fsdp:1,tensor:4",
                      "--chip=h100", f"--json={out}"]) == 0
    figures, text = json.loads(out.read_text()), capsys.readouterr().out
    assert figures["slice"] == "4 x h100" and figures["longest row"]["fits"]
    (note,) = figures["notes"]  # two heads of keys
    assert note.startswith("mesh.tensor = 4 does not divide 13%") and note[:60] in text
    assert "without context parallelism" in text and "at the peak" in text
    held = figures["held"]["in update"]
    assert figures["update"]["peak"] == held + figures["update"]["temporary"]
    assert {"update", "apply", "weights", "prefill", "admit", "decode"} <= set(figures["programs"])
    assert "NVLink" in text and "network" in text


# Temporary bytes that the TPU compiler gave for updates: model, layers (0: all), what is kept, and
# slots, prompt, rows, width, tensor, parts and fsdp of a device, tokens of a chunk of the head.
SEEN = [("qwen2.5-1.5b", 0, "full", (1, 512, 1, 3584, 1, 4, 4), 0, 4220387328),
        ("qwen2.5-1.5b", 0, "full", (4, 512, 1, 7680, 1, 4, 4), 0, 9000943616),
        ("qwen2.5-1.5b", 8, "dots", (1, 512, 1, 3584, 1, 4, 4), 0, 4189323264),
        ("qwen3-4b", 8, "full", (2, 1024, 1, 4096, 2, 2, 2), 0, 3427237888),
        ("llama3.2-1b", 0, "full", (2, 512, 1, 3584, 1, 4, 4), 0, 4372594688),
        ("qwen2.5-32b", 0, "full", (1, 2048, 1, 20480, 4, 64, 8), 0, 23.159 * GIB),
        ("qwen2.5-32b", 0, "full", (1, 2048, 1, 20480, 1, 256, 16), 0, 37770936320),
        ("qwen2.5-32b", 0, "full", (1, 8192, 1, 16384, 1, 256, 32), 1024, 30.77 * GIB),
        ("qwen2.5-32b", 7, "full", (1, 2048, 1, 20480, 1, 256, 16), 1024, 12.33 * GIB)]


@pytest.mark.parametrize(("preset", "layers", "remat", "on", "chunk", "given"), SEEN)
def test_the_count_of_temporary_bytes_is_near_what_the_tpu_compiler_gave(
        preset, layers, remat, on, chunk, given):
    spec = programs.cut(presets.spec(preset, compute_dtype="bfloat16", remat=remat,
                                     attention="tpu"), layers)
    part = memory.Split(*on[:6], 1 / (on[4] * on[6]))
    numbers = spec.d_model if remat == "full" else (  # queries, keys and values, then gate and up
        2 * spec.d_model + (spec.heads + 2 * spec.kv_heads) * spec.head_size + 2 * spec.ff)
    parts = memory.accumulate_temporary(spec, part, saved=2 * spec.layers * numbers,
                                        head_chunk=chunk or head.chunk_size(spec.vocab))
    assert sum(parts.values()) == pytest.approx(given, rel=0.08)


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_what_blocks_leave_for_the_backward_pass_is_read_from_the_program(remat):
    plan = programs.plan(small(**{"model.remat": remat, "model.compute_dtype": "bfloat16"}),
                         backend="cpu")
    accumulate = programs.only(programs.of_update(plan, shape_only(1, 2, 2)).accumulate)
    part, spec = memory.split(accumulate), plan.spec
    found = memory.saved_of_token(work.counted(accumulate, layers=2).saved, spec, part)
    run = part.slots * (part.prompt + part.rows * (part.width - 1))
    # Bytes of a token on a device.
    wide, heads, ff = 2 * 32, 2 * (4 + 2 * 2) * 8 / 2, 2 * 2 * 48 / 2
    expected = {"full": wide, "dots": 2 * wide + heads + ff}
    if remat in expected:
        assert found == pytest.approx(2 * expected[remat] * run / part.tokens)
    else:  # norms in float32, scores, and what dots keep
        assert found > 2 * (expected["dots"] + 4 * 2 * wide) * run / part.tokens


def test_slots_that_a_mesh_cannot_split_are_raised_and_said():
    plan = programs.plan(small(), backend="tpu", parts=12)
    assert (plan.cfg.rollout.slots, plan.phase.microbatch_slots) == ((12,), 12)
    assert [note.split(" does")[0] for note in plan.notes] == [
        "config.rollout.slots = 8", "config.rl.microbatch_slots = 8"]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match="pip install libtpu"):
        compiler.slice_mesh(chips.find("v5e"), config.Mesh(fsdp=4))
