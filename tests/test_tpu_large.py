"""Updates of large models, compiled by the real TPU compiler for slices that are not there: bytes
on each chip, the arrays that exist, and what the chips send each other."""

import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from dapo_jax import config
from dapo_jax.learner import algorithms, packing, update
from dapo_jax.models import lora, presets, transformer
from dapo_jax.runtime import mesh as mesh_lib

pytestmark = [
    pytest.mark.slow, pytest.mark.tpu, pytest.mark.xdist_group("tpu"),
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 1024)
GIB = 2 ** 30
# Fused with the products beside them, they could not be counted (nor, in jax 0.10, be printed).
OPTIONS = {"xla_tpu_enable_async_collective_fusion": "false"}


def chips(slice_name, count):
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler")
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(platform="tpu", topology_name=slice_name).devices
    return tiny.mesh(1, count, 1, devices=list(devices))


def model(mesh, name, **chosen):
    """The spec, and shapes of its parameters, split over the mesh."""
    spec = presets.spec(name, compute_dtype="bfloat16", remat="full", attention="tpu", **chosen)
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return spec, mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))


def compiled(mesh, function, placed, *arguments):
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=0, out_shardings=placed).lower(*arguments)
        return lowered.compile(compiler_options=OPTIONS)


def dimensions(text):
    return {tuple(map(int, found.split(","))) for found in re.findall(r"\w\[([0-9,]+)\]", text)}


def batch_of(mesh, pack):
    (shape,) = packing.shapes(pack)
    return update.batch_structs(mesh, pack, *shape)


def test_the_update_of_a_32b_model_on_packed_rows_of_24k_tokens_fits_a_slice_of_v5p():
    mesh = chips("v5p:4x8x8", 256)
    spec, params = model(mesh, "qwen2.5-32b")
    pack = packing.PackShape(256, 1, (8192,), (16384,), packed=True)
    batch = batch_of(mesh, pack)
    placed = jax.tree.map(lambda leaf: leaf.sharding, params), mesh_lib.replicated(mesh)
    sums = jax.eval_shape(lambda p: update.start(p, batch, spec=spec, settings=SETTINGS), params)
    sums = tuple(map(mesh_lib.structs, sums, placed))
    program = compiled(
        mesh, lambda *args: update.accumulate(*args, spec=spec, settings=SETTINGS), placed, sums,
        params, batch)
    memory, text = program.memory_analysis(), program.as_text()
    # Parameters and summed gradients here, two moments beside them, of 95 GiB on a chip.
    held = 3 * memory.alias_size_in_bytes + memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes + held < 48 * GIB
    for shape in dimensions(text):
        tokens = [size for size in shape if size >= 8192 and size not in (spec.vocab, spec.ff)]
        assert len(tokens) < 2, f"an array of tokens by tokens: {shape}"
        assert spec.vocab not in shape or not tokens, f"of tokens by vocabulary: {shape}"
    # A layer's matrices are gathered for the forward pass and again for the backward pass, the
    # head's likewise, and nothing else of their size is.
    gathered = re.findall(r"bf16\[1,[0-9,]+\]\S* all-gather(?:-start)?\(", text)
    assert 14 <= len(gathered) <= 28, len(gathered)


def test_an_adapter_of_an_8b_model_trains_on_a_slice_of_v5e():
    mesh = chips("v5e:4x4", 16)
    spec, params = model(mesh, "llama3.1-8b", param_dtype="bfloat16")
    cfg = config.Lora(rank=16)
    batch = batch_of(mesh, packing.PackShape(16, 1, (2048,), (6144,), packed=True))
    shapes = jax.eval_shape(lambda: lora.init(spec, cfg, jax.random.key(0)))
    placed = mesh_lib.tree_shardings(mesh, shapes, lora.logical_axes(spec, cfg))
    adapter = mesh_lib.structs(shapes, placed)

    def add(total, adapter, params, batch):
        loss = lambda one: update.loss(  # noqa: E731
            lora.attach(params, one, cfg), batch, spec=spec, settings=SETTINGS)[0]
        return jax.tree.map(jnp.add, total, jax.grad(loss)(adapter))
    program = compiled(mesh, add, placed, adapter, adapter, params, batch)
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 15 * GIB  # of 16
    # Only adapters' gradients are exchanged: none of the size of a matrix.
    exchanged = re.findall(r"= (\S+) (?:all-reduce|reduce-scatter)(?:-start)?\(",
                           program.as_text())
    for shape in dimensions(" ".join(exchanged)):
        assert sum(size >= spec.d_model // 16 for size in shape) < 2, shape
