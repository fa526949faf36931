"""Updates of large models, compiled by the real TPU compiler for slices that are not there: bytes
on each chip, the arrays that exist, and what the chips send each other."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from dapo_jax import config
from dapo_jax.learner import algorithms, packing, train_states, update
from dapo_jax.models import lora, presets, transformer
from dapo_jax.runtime import mesh as mesh_lib

pytestmark = [
    pytest.mark.slow, pytest.mark.tpu,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 1024)
GIB = 2 ** 30
# Fused with the products beside them, they could not be counted (nor, in jax 0.10, be printed).
OPTIONS = {"xla_tpu_enable_async_collective_fusion": "false"}


def chips(slice_name, data, fsdp):
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler")
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(platform="tpu", topology_name=slice_name).devices
    return tiny.mesh(data, fsdp, 1, devices=list(devices))


def model(mesh, name, **changes):
    """The spec, and shapes of its parameters, split over the mesh."""
    spec = presets.spec(name, compute_dtype="bfloat16", remat="full", attention="tpu")
    spec = dataclasses.replace(spec, **changes)
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return spec, mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))


def lowered(mesh, function, placed, *arguments, platforms=None):
    with jax.set_mesh(mesh):
        traced = jax.jit(function, donate_argnums=0, out_shardings=placed).trace(*arguments)
        return traced.lower(lowering_platforms=platforms)


def shapes_of(text, every=False):
    """Of all arrays of a program in StableHLO, "4x5xf32", or in HLO, "f32[4,5]"; `every`: equal
    ones as often as they occur."""
    found = re.findall(r"<((?:\d+x)+)[a-z]", text) + re.findall(r"\w\[([0-9,]+)\]", text)
    shapes = [tuple(int(size) for size in re.split("[x,]", one) if size) for one in found]
    return shapes if every else set(shapes)


def full_update(mesh, spec, params, batch, **options):
    """The lowered accumulation of a microbatch of all parameters."""
    placed = jax.tree.map(lambda leaf: leaf.sharding, params), mesh_lib.replicated(mesh)
    sums = jax.eval_shape(lambda p: update.start(p, batch, spec=spec, settings=SETTINGS), params)
    sums = tuple(map(mesh_lib.structs, sums, placed))
    return lowered(mesh, lambda *args: update.accumulate(*args, spec=spec, settings=SETTINGS),
                   placed, sums, params, batch, **options)


def batch_of(mesh, pack):
    (shape,) = packing.shapes(pack)
    return train_states.batch_structs(mesh, pack, *shape)


def test_the_update_of_a_32b_model_on_packed_rows_of_24k_tokens_fits_a_slice_of_v5p():
    mesh = chips("v5p:4x8x8", 8, 32)
    spec, params = model(mesh, "qwen2.5-32b")
    batch = batch_of(mesh, packing.PackShape(256, 1, (8192,), (16384,), packed=True))
    memory = full_update(mesh, spec, params, batch).compile().memory_analysis()
    # Parameters and summed gradients here, two moments beside them, of 95 GiB on a chip.
    held = 2 * memory.alias_size_in_bytes + memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes + held < 50 * GIB


@pytest.mark.parametrize(("attention", "found"), [("tpu", False), ("xla", True)])
def test_no_array_is_of_tokens_by_tokens_or_by_vocabulary(attention, found):
    """In the program as it is given to the TPU compiler; the plain form shows that it is seen."""
    mesh = tiny.mesh(1, 4, 1)
    spec, params = model(mesh, "qwen2.5-32b", attention=attention)
    batch = batch_of(mesh, packing.PackShape(4, 1, (8192,), (16384,), packed=True))
    text = full_update(mesh, spec, params, batch, platforms=("tpu",)).as_text()
    lengths = {8192, 16383, 16384, 24575, 24576}
    tokens = [sum(size in lengths for size in shape) for shape in shapes_of(text)]
    assert (max(tokens) > 1) == found
    assert not any(spec.vocab in shape and lengths & set(shape) for shape in shapes_of(text))


def matrices_sent(text, spec):
    """kind -> how many arrays of a matrix's size the collectives of that kind hand back: of a
    block's matrices (gradients may be padded along D), and of the embedding."""
    found = collections.Counter()
    for line in text.splitlines():
        kind = re.search(r" (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", line)
        if kind:
            for shape in shapes_of(line[:kind.start()], every=True):
                if math.prod(shape) >= spec.d_model * spec.kv_heads * spec.head_size:
                    found[kind[1], "embedding" if spec.vocab in shape else "block"] += 1
    return found


def test_each_matrix_is_gathered_once_a_pass_and_each_gradient_exchanged_once():
    mesh = chips("v5e:2x2", 1, 4)
    spec, params = model(mesh, "qwen2.5-0.5b", layers=2, vocab=8192)
    batch = batch_of(mesh, packing.PackShape(4, 1, (512,), (2048,), packed=True))
    text = full_update(mesh, spec, params, batch).compile(compiler_options=OPTIONS).as_text()
    inside, outside = (matrices_sent(part, spec) for part in text.split("\nENTRY"))
    # Query, key, value, out, gate, up, down: in the loop of the forward pass and of the backward.
    assert inside.pop(("all-gather", "block")) == 2 * 7
    assert sum(inside.values()) == 7, inside  # gradients; the embedding's are in no loop
    # The embedding is the head: gathered at most for each pass of it, exchanged once.
    assert 1 <= outside.pop(("all-gather", "embedding")) <= 2
    assert sum(outside.values()) == 1, outside


def test_an_adapter_of_an_8b_model_trains_on_a_slice_of_v5e():
    mesh = chips("v5e:4x4", 1, 16)
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
    program = lowered(mesh, add, placed, adapter, adapter, params, batch).compile(
        compiler_options=OPTIONS)
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 15 * GIB  # of 16
    text = program.as_text()
    assert not any(sum(size in (2048, 6143, 6144, 8191, 8192) for size in shape) > 1
                   for shape in shapes_of(text))
    head = re.findall(r"= \S+128256\]\S* all-gather(?:-start)?\(", text)
    assert len(head) == 1  # not a chunk at a time
    # Only adapters' gradients are exchanged: none of the size of a matrix.
    exchanged = re.findall(r" = (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    for shape in shapes_of(" ".join(exchanged)):
        assert sum(size >= spec.d_model // 16 for size in shape) < 2, shape
