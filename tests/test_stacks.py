"""Microbatches in stacks: the same sums, the same log-probs, nothing run beyond their number."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import config_learner, reductions, types
from dapo_jax.learner import algorithms, optim, packing, stacks, step, train_states, update, weights
from dapo_jax.runtime import failed_updates
from dapo_jax.runtime import mesh as mesh_lib

SPEC = dataclasses.replace(tiny.SPEC, layers=1, d_model=16, ff=16)
ALGORITHM = dataclasses.replace(algorithms.dapo(), old_logprobs="recomputed", kl_coef=0.1)
SETTINGS = update.Settings(algorithms.loss_settings(ALGORITHM), 0.7, 16)
RATES = config_learner.Optimizer(learning_rate=0.01, warmup_updates=0)
OPTIMIZER = optim.optimizer(RATES, 100)
PLAIN = packing.PackShape(slots=2, rows=2, prompt_buckets=(8,), completion_buckets=(tiny.NEW,))
STACKED = dataclasses.replace(PLAIN, stack=3)
TABLE = tiny.table()


def microbatch(number, width=4, prompt=2):
    """Two slots of three rows, every field of its own value."""
    shape = (2, 3, width)
    return types.TrainBatch(
        np.full((2, prompt), number, np.int32), np.full(2, number + 1, np.int32),
        np.full(shape, number + 2, np.int32),
        *(np.full(shape, number + i, np.float32) for i in range(3, 7)))


def packed():
    """Microbatches of an update: more than a stack holds, and not a multiple of it."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(8), [2, 4, 1, 4, 3, 4, 2, 4]).astype(np.int32)
    length = rng.integers(1, tiny.NEW + 1, len(group)).astype(np.int32)
    mask = np.arange(tiny.NEW) < length[:, None]
    shape = mask.shape
    blank = jax.tree.map(lambda leaf: np.zeros((len(group), *leaf.shape[1:]), leaf.dtype),
                         types.no_samples(tiny.NEW))
    samples = dataclasses.replace(
        blank, tokens=rng.integers(0, SPEC.vocab, shape).astype(np.int32), loss_mask=mask,
        logprobs=rng.normal(-3, 0.3, shape).astype(np.float32), length=length, group=group,
        prompt=group, valid=np.ones(len(group), bool))
    return packing.pack(
        samples, prompts=TABLE, advantages=rng.normal(size=len(group)).astype(np.float32),
        weights=weights.token(mask, group, max_length=tiny.NEW), fresh=np.ones(len(group), bool),
        shape=PLAIN)


def learned(mesh, pack, batches, junk=False):
    """State and metrics after two epochs, and the work as it was scored."""
    programs = update.compile_programs(SPEC, SETTINGS, OPTIMIZER, mesh, pack=pack)
    params = mesh_lib.put(tiny.params(SPEC), mesh_lib.param_shardings(mesh, SPEC))
    other = mesh_lib.put(train_states.reference_params(SPEC, tiny.params(SPEC, seed=1)),
                         mesh_lib.param_shardings(mesh, SPEC))
    places = jax.tree.map(lambda leaf: leaf.sharding,
                          train_states.state_structs(SPEC, OPTIMIZER, mesh))
    state = jax.jit(lambda tree: train_states.new_state(tree, OPTIMIZER),
                    out_shardings=places)(params)
    work = [step.Work(batches, 1)]
    with jax.transfer_guard("disallow"):
        if junk:
            work = [step.Work([spoiled(b) for b in stacks.stacked(batches, programs.stacks)], 1)]
        work = step.scored(programs, state.params, work, reference=other)
        state, metrics = step.learn(programs, state, work, epochs=2)
        found = mesh_lib.fetch(metrics)
    return (mesh_lib.fetch(state.params), [reductions.results([one]) for one in found],
            work[0].batches)


def spoiled(stack):
    """The stack with what would be NaN, and out of the vocabulary, where nothing is run."""
    def spoil(leaf):
        leaf = leaf.copy()
        leaf[int(stack.count):] = np.nan if leaf.dtype == np.float32 else 2 ** 30
        return leaf
    return dataclasses.replace(stack, batch=jax.tree.map(spoil, stack.batch))


@pytest.fixture(scope="module")
def alone():
    return learned(tiny.mesh(), PLAIN, packed())


def test_stacks_give_what_microbatches_one_by_one_give(alone):
    batches = packed()
    params, values, scored = learned(tiny.mesh(2), STACKED, batches, junk=True)
    assert [int(stack.count) for stack in scored] == [3, 3, 1]
    for got, want in zip(values, alone[1], strict=True):
        assert want["policy/grad_norm"] > 0.01 and want["policy/kl_reference"] > 1e-4
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    # Adam's first steps divide by the gradient's own size, so its last bits are in them.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, alone[0])
    flat = [stack[i] for stack in scored for i in range(int(stack.count))]
    for one, other in zip(flat, alone[2], strict=True):
        np.testing.assert_allclose(one.old, other.old, atol=1e-5)
        np.testing.assert_allclose(one.reference, other.reference, atol=1e-5)
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_every_microbatch_is_in_one_stack_in_its_order_and_shapes_are_apart():
    batches = [microbatch(i) for i in range(5)] + [microbatch(9, width=8)] + [
        microbatch(i, prompt=6) for i in (6, 7)]
    made = list(stacks.stacked(batches, {(2, 4): 2, (2, 8): 1, (6, 4): 4}))
    assert [type(one) for one in made] == [types.Stack] * 3 + [types.TrainBatch, types.Stack]
    assert [int(one.count) for one in made if isinstance(one, types.Stack)] == [2, 2, 1, 2]
    assert [one.batch.tokens.shape[0] for one in made if isinstance(one, types.Stack)] == [
        2, 2, 2, 4]
    flat = [part for one in made for part in (
        [one[i] for i in range(int(one.count))] if isinstance(one, types.Stack) else [one])]
    for one, other in zip(flat, batches, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert all(one is other for one, other in zip(
        stacks.stacked(made, {(2, 4): 9, (6, 4): 9}), made, strict=True))


def test_a_stack_is_bounded_in_microbatches_and_in_tokens():
    shape = packing.PackShape(4, 8, (32,), (64,), stack=16)
    size = 4 * (32 + 8 * 64)
    assert packing.stacked(shape, 32, 64) == 16
    assert packing.stacked(dataclasses.replace(shape, stack=1), 32, 64) == 1
    assert packing.stacked(dataclasses.replace(shape, stack=10 ** 6), 32, 64) == (
        packing.STACK_TOKENS // size)
    assert packing.stacked(shape, 4096, 20480) == 1


def test_stale_tokens_of_a_stack_are_no_longer_fresh():
    (stack,) = stacks.stacked([microbatch(0), microbatch(1)], {(2, 4): 2})
    stale = step._stale(stack)
    assert not stale.batch.fresh.any() and stack.batch.fresh.all()
    assert stale.batch.tokens is stack.batch.tokens


def test_a_failed_update_is_kept_by_microbatch_also_out_of_stacks(tmp_path):
    batches = [microbatch(i) for i in range(3)] + [microbatch(7, width=8)]
    made = list(stacks.stacked(batches, {(2, 4): 2}))
    with np.load(failed_updates.write(tmp_path, made, step=1, number=0)) as kept:
        assert len(kept.files) == 4 * 7
        for number, batch in enumerate(batches):
            for field in ("tokens", "fresh", "prompt_length"):
                np.testing.assert_array_equal(kept[f"{number}.{field}"], getattr(batch, field))
