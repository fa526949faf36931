"""Updates of an adapter: the base is an argument, and all that changes is of the adapter's size."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny

from dapo_jax import config, config_learner, types
from dapo_jax.learner import algorithms, optim, packing, step, train_states, update
from dapo_jax.models import lora
from dapo_jax.runtime import mesh as mesh_lib

CFG = config.Lora(rank=3, alpha=6.0, patterns=("attention.*", "mlp.up", "mlp.down"))
LOSS = algorithms.loss_settings(dataclasses.replace(
    algorithms.dapo(), kl_coef=0.1, old_logprobs="recomputed"))
SETTINGS = update.Settings(LOSS, 0.7, 16, lora=CFG)
RATES = config_learner.Optimizer(learning_rate=0.01, warmup_updates=0)
OPTIMIZER = optim.optimizer(RATES, 100)
PACK = packing.PackShape(4, 2, (4,), (3,))
SHAPE = (4, 3)


def compiled(mesh, settings=SETTINGS):
    return update.compile_programs(tiny.SPEC, settings, OPTIMIZER, mesh, pack=PACK)


@pytest.fixture(scope="module")
def programs():
    return compiled(tiny.mesh())


@pytest.fixture(scope="module")
def base():
    return tiny.params()


@pytest.fixture(scope="module")
def adapter():
    """One whose B is not 0."""
    rng = np.random.default_rng(0)
    made = lora.init(tiny.SPEC, CFG, jax.random.key(0))
    return jax.tree.map(lambda leaf: (0.2 * rng.normal(size=leaf.shape)).astype("f4"), made)


@pytest.fixture(scope="module")
def batches():
    """Two microbatches of one update."""
    rng, shape = np.random.default_rng(1), (4, 2, 3)
    return [types.TrainBatch(
        prompt_tokens=rng.integers(0, 64, (4, 4), np.int32),
        prompt_length=rng.integers(1, 5, 4, np.int32),
        tokens=rng.integers(0, 64, shape, np.int32),
        logprobs=-rng.uniform(3, 5, shape).astype("f4"),
        advantages=rng.normal(size=shape).astype("f4"),
        weights=np.full(shape, 1 / 48, "f4"), fresh=np.ones(shape, "f4")) for _ in range(2)]


def place(tree, mesh=None):
    return mesh_lib.put(tree, mesh_lib.replicated(mesh or tiny.mesh()))


def scored(programs, adapter, base, batches):
    """With log-probs of the adapter for `old`, and of the base for `reference`."""
    base = place(base)
    return update.scored(programs, place(adapter), base, batches, base=base)


def plain_merged(base, adapter):
    """W + alpha / r * A B, a matrix and a layer at a time."""
    tree = base | {"blocks": {part: dict(found) for part, found in base["blocks"].items()}}
    for part, found in adapter["blocks"].items():
        for name, pair in found.items():
            matrix, rows = base["blocks"][part][name], []
            for layer in range(tiny.SPEC.layers):
                low = pair["a"][layer].reshape(-1, 3) @ pair["b"][layer].reshape(3, -1)
                rows.append(matrix[layer] + 6.0 / 3 * low.reshape(matrix[layer].shape))
            tree["blocks"][part][name] = jax.numpy.stack(rows)
    return tree


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_a_new_adapter_gives_the_base_s_logprobs_bit_for_bit(programs, base, adapter, batches):
    new = lora.init(tiny.SPEC, CFG, jax.random.key(0))
    for one in scored(programs, new, base, batches):
        np.testing.assert_array_equal(one.old, one.reference)
    for one in scored(programs, adapter, base, batches):
        assert np.abs(np.asarray(one.old) - one.reference).max() > 0.01


def test_the_gradient_is_that_of_a_plain_loop_that_merges(programs, base, adapter, batches):
    batches = scored(programs, adapter, base, batches)
    sums = programs.start(place(adapter))
    for one in batches:
        placed = mesh_lib.put(one, programs.batch_sharding)
        sums = programs.accumulate[SHAPE](sums, place(adapter), placed, place(base))

    def plain(adapter, one):
        whole = plain_merged(jax.tree.map(jax.numpy.asarray, base), adapter)
        return update.loss(whole, one, spec=tiny.SPEC, settings=update.Settings(LOSS, 0.7, 16))[0]
    gradient = jax.jit(jax.value_and_grad(plain))
    loss, wanted = jax.tree.map(lambda a, b: a + b, *(gradient(adapter, one) for one in batches))
    difference = jax.tree.map(lambda a, b: np.asarray(a) - b, sums[0], wanted)
    assert optax.tree.norm(wanted) > 0.01
    assert optax.tree.norm(difference) < 5e-6 * optax.tree.norm(wanted)
    assert sums[1]["policy/loss"].total == pytest.approx(float(loss), abs=1e-6)


def test_updates_change_the_adapter_and_nothing_of_the_base(programs, base, adapter, batches):
    held = place(base)
    state = place(train_states.new_state(jax.tree.map(np.array, adapter), OPTIMIZER))
    work = [step.Work(batches, 48)]
    with jax.transfer_guard("disallow"):
        work = step.scored(programs, state.params, work, reference=held, base=held)
        state, metrics = step.learn(programs, state, work, epochs=3, base=held)
    assert int(state.updates) == 3
    jax.tree.map(np.testing.assert_array_equal, held, base)
    jax.tree.map(lambda a, b: np.testing.assert_raises(
        AssertionError, np.testing.assert_array_equal, a, b), state.params, adapter)
    assert jax.tree.structure(state.params) == jax.tree.structure(adapter)


def test_gradients_and_moments_are_of_the_adapter_s_size(programs, adapter, base):
    state = train_states.state_structs(tiny.SPEC, OPTIMIZER, tiny.mesh(), CFG)
    assert size(state.params) == size(adapter) < size(base) / 4
    assert 2 * size(adapter) <= size(state.opt_state) <= 2 * size(adapter) + 64
    kept = programs.accumulate[SHAPE].memory_analysis()
    assert size(adapter) <= kept.output_size_in_bytes < size(adapter) + 1024  # and metrics
    assert kept.argument_size_in_bytes > size(base) + 2 * size(adapter)  # the base is an argument
    taken = programs.apply.memory_analysis()
    assert taken.output_size_in_bytes < 3 * size(adapter) + 1024


@pytest.mark.slow
def test_the_gradient_is_the_same_on_a_mesh(programs, base, adapter, batches):
    mesh = tiny.mesh(fsdp=2, tensor=2)
    split, found = compiled(mesh), []
    model = mesh_lib.put(base, mesh_lib.param_shardings(mesh, tiny.SPEC))
    structs = mesh_lib.trained_structs(mesh, tiny.SPEC, CFG)
    assert any("fsdp" in leaf.sharding.spec for leaf in jax.tree.leaves(structs))
    placed = mesh_lib.put(adapter, jax.tree.map(lambda leaf: leaf.sharding, structs))
    for chosen, trained, under in ((programs, place(adapter), place(base)),
                                   (split, placed, model)):
        sums = chosen.start(trained)
        for one in update.scored(chosen, trained, under, batches, base=under):
            sums = chosen.accumulate[SHAPE](
                sums, trained, mesh_lib.put(one, chosen.batch_sharding), under)
        found.append(mesh_lib.fetch(sums[0]))
    difference = jax.tree.map(lambda a, b: a - b, *found)
    assert optax.tree.norm(difference) < 5e-6 * optax.tree.norm(found[0])
