"""The default run's programs, compiled by the real TPU compiler for a slice that is not there."""

import dataclasses
import math

import jax
import pytest
import tiny

from dapo_jax import config, config_learner
from dapo_jax.learner import algorithms, optim, packing, train_states, update
from dapo_jax.models import families, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw
from dapo_jax.runtime import mesh as mesh_lib

pytestmark = [
    pytest.mark.tpu,
    # The cache cannot hand a TPU's program to a machine without one; it is compiled anew.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
SPEC = specs.from_scratch(config.Model(), vocab=19, compute_dtype="bfloat16")
SLOTS, ROWS, PROMPT, NEW = 32, 16, 8, 5
PACK = packing.PackShape(SLOTS, ROWS, (PROMPT,), (NEW,))


@pytest.fixture(scope="module")
def mesh():
    """data 2 x fsdp 2 over the four chips of a v5e slice."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: no TPU compiler")
    from jax.experimental import topologies
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    return tiny.mesh(2, 2, 1, devices=list(chips))


@pytest.fixture(scope="module")
def programs(mesh):
    cfg = config_learner.Optimizer()
    optimizer = optim.optimizer(cfg, 100)
    settings = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 1024)
    return update.compile_programs(SPEC, settings, optimizer, mesh, pack=PACK)


def parameter_bytes():
    shapes = jax.eval_shape(lambda: transformer.init(SPEC, jax.random.key(0)))
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))


def arguments(program):
    """Bytes of a program's arguments on each chip; its temporary memory is checked on the way.

    Arrays are padded to whole tiles there, so of so small a model half is not half the bytes; but
    whole parameters could not take less than their plain size.
    """
    memory = program.memory_analysis()
    assert 0 < memory.temp_size_in_bytes < 2 ** 30
    return memory.argument_size_in_bytes


def test_the_rollout_compiles_sharded_over_a_slice(mesh):
    how = draw.Sampling(max_new_tokens=NEW, stop_ids=(18,))
    engine = tiny.engine(SPEC, how, on=mesh, rows=ROWS, slots=(SLOTS,), buckets=(PROMPT,))
    prefill, draw_chunk = engine.programs.prefill[PROMPT], engine.programs.decode[SLOTS]
    assert arguments(prefill) < parameter_bytes()
    assert "all-gather" in prefill.as_text()  # fsdp: weights are gathered where they are used
    assert "all-gather" not in draw_chunk.as_text()  # but not for every token
    for program in (draw_chunk, engine.programs.admit[SLOTS, PROMPT]):
        memory = program.memory_analysis()  # caches: padded to tiles, and in place
        assert memory.alias_size_in_bytes > 0.95 * memory.output_size_in_bytes


def test_sliding_layers_compile_in_rollout_and_update(mesh):
    gemma = families.FAMILIES["gemma3"].features
    spec = dataclasses.replace(SPEC, **gemma, sliding_window=4, sliding=(True, False, True),
                               local_rope_base=100.0, attention_softcap=5.0, logit_softcap=3.0)
    how = draw.Sampling(max_new_tokens=NEW, stop_ids=(18,))
    tiny.engine(spec, how, on=mesh, rows=ROWS, slots=(SLOTS,), buckets=(PROMPT,))
    settings = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 1024)
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    params = mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))
    batch = train_states.batch_structs(mesh, PACK, PROMPT, NEW)
    gradient = jax.grad(lambda p, b: update.loss(p, b, spec=spec, settings=settings)[0])
    memory = jax.jit(gradient).lower(params, batch).compile().memory_analysis()
    assert 0 < memory.temp_size_in_bytes < 2 ** 30


def test_the_update_compiles_sharded_over_a_slice(programs):
    accumulate = programs.accumulate[PROMPT, NEW]
    # Summed gradients and parameters.
    assert arguments(accumulate) < 2 * parameter_bytes()
    text = accumulate.as_text()
    assert "all-reduce" in text or "reduce-scatter" in text
    # Parameters, two moments and the summed gradient.
    assert programs.apply.memory_analysis().argument_size_in_bytes < 4 * parameter_bytes()


def test_each_chip_holds_half_of_every_split_parameter(mesh):
    shardings = mesh_lib.param_shardings(mesh, SPEC)
    shapes = jax.eval_shape(lambda: transformer.init(SPEC, jax.random.key(0)))
    for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings)):
        assert 2 * math.prod(sharding.shard_shape(leaf.shape)) == leaf.size
