import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.models import spec as specs
from dapo_jax.models import transformer
from dapo_jax.rollout import bounds, draw
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import metrics

TABLE = tiny.table()
LADDER = (2, 4)


@pytest.fixture(scope="module")
def root():
    return jax.random.key(7)


@pytest.fixture(scope="module")
def params():
    return mesh_lib.put(tiny.params(), mesh_lib.replicated(tiny.mesh()))


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(slots=LADDER, buckets=(4, 8))


def sample(engine, params, root, plan, step=0):
    return engines.run(engine, params, plan, table=TABLE, root=root, step=step)


def test_rows_come_back_in_plan_order_with_their_identity(engine, params, root):
    plan = tiny.plan([3, 0, 6, 1, 3], [4, 2, 4, 1, 3], visit=5, group=[9, 8, 7, 6, 5])
    samples = sample(engine, params, root, plan, step=11)
    want = [(group, prompt, number)
            for group, prompt, size in zip(plan.group, plan.prompt, plan.size)
            for number in range(size)]
    assert list(zip(samples.group, samples.prompt, samples.sample)) == want
    assert (samples.visit == 5).all() and (samples.born == 11).all() and not samples.valid.any()
    np.testing.assert_array_equal(samples.loss_mask.sum(1), samples.length)
    # Prompt 3 is asked for twice at the same visit: the same samples, in another slot.
    np.testing.assert_array_equal(samples.tokens[:3], samples.tokens[-3:])


def test_a_sample_does_not_depend_on_the_plan_it_is_in(engine, params, root):  # promise 3
    alone = sample(engine, params, root, tiny.plan([6], 4))  # bucket 8, two slots
    among = sample(engine, params, root, tiny.plan([0, 1, 2, 4, 5, 7, 6, 3, 0], 4))
    rows = np.flatnonzero(among.prompt == 6)
    np.testing.assert_array_equal(among.tokens[rows], alone.tokens)
    short = sample(engine, params, root, tiny.plan([1], 4))  # bucket 4 instead of 8
    rows = np.flatnonzero(among.prompt == 1)
    np.testing.assert_array_equal(among.tokens[rows], short.tokens)
    np.testing.assert_allclose(among.logprobs[rows], short.logprobs, atol=1e-5)


def test_groups_larger_than_a_slot_and_plans_larger_than_the_ladder_are_cut(engine, params, root):
    plan = tiny.plan([0, 1, 2, 3], [11, 3, 4, 9])  # 3 + 1 + 1 + 3 slots, in calls of 4
    samples = sample(engine, params, root, plan)
    assert np.bincount(samples.group).tolist() == [11, 3, 4, 9]
    for prompt in (0, 3):
        rows = samples.prompt == prompt
        np.testing.assert_array_equal(samples.sample[rows], np.arange(rows.sum()))
        assert len({tuple(row) for row in samples.tokens[rows].tolist()}) > rows.sum() - 2
        first = sample(engine, params, root, tiny.plan([prompt], 4))
        np.testing.assert_array_equal(samples.tokens[rows][:4], first.tokens)


def test_an_empty_slot_costs_no_sample_and_no_sample_comes_of_an_empty_slot(engine, params, root):
    samples = sample(engine, params, root, tiny.plan([2, 4, 5], [1, 1, 1]))
    assert len(samples) == 3 and (samples.length > 0).all()


def test_nothing_compiles_after_the_engine_is_made(engine, params, root):  # promise 2
    sample(engine, params, root, tiny.plan([0], 4))
    metrics.count_compiles()
    before = metrics.compile_count()
    rng = np.random.default_rng(0)
    for count in rng.integers(1, 9, 50):
        plan = tiny.plan(rng.permutation(8)[:count], rng.integers(1, 10, count))
        budget = rng.integers(1, tiny.NEW + 1, count).astype(np.int32)
        samples = sample(engine, params, root, dataclasses.replace(plan, budget=budget))
        assert (samples.length <= np.repeat(budget, plan.size)).all()
    assert metrics.compile_count() == before


def test_the_context_limits_each_prompt_by_its_own_length(params, root):  # B47
    engine = tiny.engine(how=tiny.sampling(stop_ids=(99,)), slots=(4,), max_context=6)
    samples = sample(engine, params, root, tiny.plan([0, 1, 3], 4))  # prompts of 4, 3, 1 tokens
    assert samples.length.tolist() == [2] * 4 + [3] * 4 + [5] * 4
    assert not samples.stopped.any()


def test_stopped_and_truncated_samples_are_told_apart(engine, params, root):  # B44, B47
    samples = sample(engine, params, root, tiny.plan(range(8), 12))
    for tokens, mask, length, stopped in zip(samples.tokens, samples.loss_mask, samples.length,
                                             samples.stopped):
        found = np.flatnonzero(tokens[:length] == tiny.STOP)
        assert found.tolist() == ([length - 1] if stopped else [])
        assert stopped or length == tiny.NEW
        assert mask.tolist() == [True] * length + [False] * (tiny.NEW - length)
    assert 0 < samples.stopped.sum() < len(samples)


@pytest.mark.parametrize("parts", [(4, 1, 1), (1, 2, 2)])
def test_samples_do_not_depend_on_the_mesh(engine, params, root, parts):  # promise 3
    mesh = tiny.mesh(*parts)
    spread = tiny.engine(on=mesh, slots=(4,))
    plan = tiny.plan([0, 1, 2, 6], 4)
    want = sample(engine, params, root, plan)
    placed = mesh_lib.put(tiny.params(), mesh_lib.param_shardings(mesh, tiny.SPEC))
    got = sample(spread, placed, mesh_lib.put(root, mesh_lib.replicated(mesh)), plan)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.slow
def test_samples_do_not_depend_on_eight_devices():  # promise 3
    """conftest gives four devices, so this is a process of its own."""
    code = (
        "import jax, numpy as np, tiny\n"
        "from dapo_jax.rollout import engine as engines\n"
        "from dapo_jax.runtime import mesh as mesh_lib\n"
        "out = []\n"
        "for parts in ((1, 1, 1), (8, 1, 1), (2, 2, 2)):\n"
        "    mesh = tiny.mesh(*parts)\n"
        "    engine = tiny.engine(on=mesh, slots=(8,), rows=2, share=5)\n"
        "    params = mesh_lib.put(tiny.params(), mesh_lib.param_shardings(mesh, tiny.SPEC))\n"
        "    root = mesh_lib.put(jax.random.key(7), mesh_lib.replicated(mesh))\n"
        "    out.append(engines.run(engine, params, tiny.plan(range(8), 5), table=tiny.table(),\n"
        "                           root=root, step=0))\n"
        "for other in out[1:]:\n"
        "    np.testing.assert_array_equal(other.tokens, out[0].tokens)\n"
        "    np.testing.assert_allclose(other.logprobs, out[0].logprobs, atol=1e-5)\n")
    flags = "--xla_force_host_platform_device_count=8"
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600,
                   env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths})


def check_against_whole_forwards(params, samples):
    """Log-probs of every token, from whole sequences through the model without a cache."""
    for row in range(len(samples)):
        prompt, length = TABLE.tokens[samples.prompt[row]], samples.length[row]
        tokens = np.zeros((1, 8 + tiny.NEW), np.int32)
        whole = np.concatenate([prompt, samples.tokens[row, :length]])
        tokens[0, :len(whole)] = whole
        logits = np.asarray(tiny.full_logits(tiny.SPEC, params, tokens))[0] / 0.7
        want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        at = np.arange(length)
        np.testing.assert_allclose(samples.logprobs[row, :length],
                                   want[len(prompt) - 1 + at, whole[len(prompt):]], atol=1e-5)


def streamed(plan):
    """A feed that hands out one group at a time, each time one is wanted."""
    parts = iter([jax.tree.map(lambda x, i=i: x[i:i + 1], plan) for i in range(len(plan.size))])
    nothing = jax.tree.map(lambda x: x[:0], plan)
    return lambda boundary: next(parts, nothing) if boundary.free else nothing


def test_samples_depend_neither_on_slots_rows_chunks_nor_order(engine, params, root):  # promise 3
    plan = tiny.plan([6, 3, 0, 1, 6], [5, 2, 4, 1, 3])
    want = sample(engine, params, root, plan)
    check_against_whole_forwards(params, want)
    narrow = tiny.engine(slots=(1,), rows=2, share=3, chunk=2)
    back = jax.tree.map(lambda x: x[::-1], plan)
    for got in (sample(narrow, params, root, plan), sample(engine, params, root, back),
                engines.serve(narrow, params, table=TABLE, root=root, step=0,
                              feed=streamed(plan)).samples):
        order = np.lexsort((got.sample, got.group))
        first = np.lexsort((want.sample, want.group))
        np.testing.assert_array_equal(got.tokens[order], want.tokens[first])
        np.testing.assert_allclose(got.logprobs[order], want.logprobs[first], atol=1e-5)


def test_a_feed_is_told_of_each_group_once_and_drops_what_is_in_flight(engine, params, root):
    plan = tiny.plan(range(8), [3, 5, 1, 4, 2, 3, 9, 2], group=np.arange(20, 28))
    told, boundaries = [], []

    def feed(boundary):
        boundaries.append(boundary)
        told.extend(dict.fromkeys(boundary.finished.group.tolist()))
        if len(boundaries) > 1 and len(told) >= 4:
            return None
        return plan if len(boundaries) == 1 else jax.tree.map(lambda x: x[:0], plan)

    served = engines.serve(engine, params, table=TABLE, root=root, step=3, feed=feed)
    assert [b.number for b in boundaries] == list(range(len(boundaries)))
    assert len(set(told)) == len(told) and not set(told) & set(boundaries[-1].in_flight.tolist())
    assert set(told) | set(boundaries[-1].in_flight.tolist()) == set(range(20, 28))
    assert (np.diff(boundaries[-1].in_flight) > 0).all()
    assert set(told) == set(served.samples.group.tolist())
    want = sample(engine, params, root, plan)
    whole = np.isin(want.group, told)
    np.testing.assert_array_equal(served.samples.tokens, want.tokens[whole])
    for row in range(len(served.partial)):  # a beginning of what it would have been
        length = served.partial.length[row]
        np.testing.assert_array_equal(served.partial.tokens[row, :length],
                                      want.tokens[~whole][row, :length])
        assert not served.partial.tokens[row, length:].any()
    assert served.partial.length.sum() < want.length[~whole].sum()


@pytest.mark.parametrize("budget", [0, tiny.NEW + 1])
def test_a_budget_that_cannot_be_is_refused_by_its_group(engine, params, root, budget):
    plan = tiny.plan([0, 1], 2, group=[8, 9])
    plan = dataclasses.replace(plan, budget=np.array([1, budget], np.int32))
    with pytest.raises(ValueError, match="group 9: a budget of"):
        sample(engine, params, root, plan)


def test_a_prompt_longer_than_the_largest_bucket_is_refused_by_its_group(engine, params, root):
    table = dataclasses.replace(TABLE, tokens=(*TABLE.tokens, np.zeros(9, np.int32)))
    with pytest.raises(ValueError, match="group 1: prompt 8 has 9 tokens, more than the 8"):
        engines.run(engine, params, tiny.plan([0, 8], 2), table=table, root=root, step=0)


@pytest.mark.parametrize("token, length", [(tiny.STOP, 1), (5, tiny.NEW)])
@pytest.mark.parametrize("prompts, size", [([3], 1), ([0, 1, 2, 6], 4), ([6], 4 * tiny.ROWS + 1)])
def test_samples_that_end_all_at_once_are_all_there(
        engine, params, root, token, length, prompts, size):  # B44, B47
    samples = sample(engine, tiny.always(params, token), root, tiny.plan(prompts, size))
    assert samples.length.tolist() == [length] * len(prompts) * size
    assert (samples.stopped == (token == tiny.STOP)).all() and (samples.tokens[:, 0] == token).all()


def countdown(lengths, limit):
    """A model that draws a length from those given as its first token, then counts down to 1, which
    stops; and its spec."""
    vocab = limit + 2  # the last is the prompt
    spec = specs.ModelSpec(vocab=vocab, layers=1, d_model=vocab, heads=1, kv_heads=1, head_size=2,
                           ff=2, tied=False, norm_eps=0.0)
    head = np.full((vocab, vocab), -40.0, np.float32)
    head[np.arange(1, vocab), np.arange(vocab - 1)] = 40.0
    share = np.bincount(lengths.ravel(), minlength=vocab) / lengths.size
    head[-1] = np.log(np.maximum(share, 1e-30))
    zeros = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), zeros)
    return spec, tree | {"embedding": np.eye(vocab, dtype=np.float32), "head": head / vocab ** 0.5,
                         "norm": np.ones(vocab, np.float32)}


def test_heavy_tailed_lengths_reach_the_simulated_use_of_rows(root):
    limit, ladder, rows, share = 32, (4, 8), 2, 8
    spec, tree = countdown(bounds.heavy_tailed(500, 8, limit=limit), limit)
    how = draw.Sampling(max_new_tokens=limit, stop_ids=(1,))
    engine = tiny.engine(spec, how, slots=ladder, buckets=(1,), rows=rows, share=share, chunk=8)
    groups = 8 * ladder[-1]
    table = types.PromptTable((np.array([limit + 1], np.int32),) * groups, ({},) * groups, ())
    params = mesh_lib.put(tree, mesh_lib.replicated(tiny.mesh()))
    served = engines.sample(engine, params, tiny.plan(range(groups), share), table=table, root=root,
                            step=0)
    lengths = served.samples.length
    assert (served.samples.tokens[:, 0] == lengths).all() and lengths.max() == limit
    assert np.median(lengths) <= 0.13 * limit
    bound = bounds.row_use(list(lengths.reshape(groups, share)), ladder=ladder, rows=rows, chunk=8)
    assert 0.9 * bound <= served.use.row_use <= 1.1 * bound
    assert served.use.live == lengths.sum() and served.use.prompt_tokens == groups
    assert set(served.use.sizes) == set(ladder)  # the tail went down the ladder


def test_caches_are_changed_in_place(engine):
    size = LADDER[-1]
    cache = sum(2 * 2 * size * rows * 2 * 8 * width * 4 for rows, width in ((tiny.ROWS, tiny.NEW),
                                                                            (1, 8)))
    for program in (engine.programs.decode[size], engine.programs.admit[size, 8]):
        memory, text = program.memory_analysis(), program.as_text()
        assert memory.alias_size_in_bytes >= cache
        for shape in ((size, tiny.ROWS, 2, 8, tiny.NEW), (size, tiny.ROWS, 2, tiny.NEW, 8),
                      (size, 2, 8, 8)):
            copied = [line for line in text.splitlines() if " copy(" in line
                      and f"f32[{','.join(map(str, shape))}]" in line.split("=")[1]]
            assert not copied, copied


def test_prefill_costs_a_group_as_much_as_a_sample():
    """Prompts of 512, groups of 16: floating-point work and cache, counted from the program."""
    spec = dataclasses.replace(tiny.SPEC, layers=1)
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))

    def cost(count):
        asked = (jax.ShapeDtypeStruct((count, 512), jnp.int32),
                 jax.ShapeDtypeStruct((count,), jnp.int32))
        program = jax.jit(functools.partial(transformer.prefill, spec)).lower(shapes, *asked)
        program = program.compile()
        return program.cost_analysis()["flops"], program.memory_analysis().output_size_in_bytes

    once, tiled = cost(1), cost(16)
    # What all prompts share, such as the rotations' angles, is 1 % of so small a model's work.
    assert once[0] == pytest.approx(tiled[0] / 16, rel=0.02)
    assert once[1] == pytest.approx(tiled[1] / 16, rel=0.01)
