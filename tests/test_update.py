import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch_model

from dapo_jax import config_learner, reductions
from dapo_jax.learner import advantages, algorithms, optim, packing, step, train_states, update
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import mesh as mesh_lib

TABLE = tiny.table()
SHAPE = packing.PackShape(slots=4, rows=2, prompt_buckets=(8,), completion_buckets=(tiny.NEW,))
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 0.7, 16)
RATES = config_learner.Optimizer(learning_rate=0.04, warmup_updates=4, clip_norm=0.0)
OPTIMIZER = optim.optimizer(RATES, 100)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def other_params(params):
    """Near those that sample, so that ratios differ from 1 and some are clipped, none twice."""
    rng = np.random.default_rng(4)
    return jax.tree.map(
        lambda leaf: leaf + 0.015 * rng.normal(size=leaf.shape).astype("f4"), params)


@pytest.fixture(scope="module")
def samples(params):
    """Groups of 2 to 5 samples from `params`, with rewards; one token in eight stops a sample."""
    engine = tiny.engine(how=tiny.sampling(stop_ids=tuple(range(2, 64, 8))), slots=(4,))
    plan = tiny.plan([2, 0, 1, 4, 6], [5, 2, 4, 4, 3])
    drawn = engines.run(engine, params, plan, table=TABLE, root=jax.random.key(7), step=1)
    assert len(set(drawn.length.tolist())) > 3
    reward = np.random.default_rng(0).integers(0, 3, len(drawn)).astype("f4")
    return dataclasses.replace(drawn, reward=reward, shaped=reward,
                               valid=np.ones(len(drawn), bool))


def compile_programs(mesh):
    return update.compile_programs(tiny.SPEC, SETTINGS, OPTIMIZER, mesh, pack=SHAPE)


@pytest.fixture(scope="module")
def programs():
    return compile_programs(tiny.mesh())


def new_state(params):
    # A copy: an update consumes its state.
    state = train_states.new_state(jax.tree.map(np.array, params), OPTIMIZER)
    return mesh_lib.put(state, mesh_lib.replicated(tiny.mesh()))


def prepare(samples, shape=SHAPE, algorithm=None, updates=1, table=TABLE):
    return step.prepare(samples, algorithm=algorithm or algorithms.dapo(), updates=updates, step=1,
                        table=table, shape=shape, max_length=tiny.NEW)


def values(metrics):
    return reductions.results([mesh_lib.fetch(metrics)])


# ----------------------------------------------------------------------- promise 1: exact sums


def padded(samples):
    """Whole sequences i32[n, L], and at which places their completions' logits stand."""
    tokens = np.zeros((len(samples), 16), np.int32)
    start = np.array([len(TABLE.tokens[p]) for p in samples.prompt])
    for row, prompt, own, end in zip(tokens, samples.prompt, samples.tokens, start):
        row[:end], row[end:end + len(own)] = TABLE.tokens[prompt], own
    return tokens, start[:, None] - 1 + np.arange(samples.tokens.shape[1])


def plain_logprobs(params, samples):
    tokens, places = padded(samples)
    logp = jax.nn.log_softmax(tiny.full_logits(tiny.SPEC, params, tokens) / 0.7)
    return logp[np.arange(len(samples))[:, None], places, samples.tokens]


def plain_gradient(params, samples, *, clip=True):
    """Of DAPO's token-level loss over all samples at once, each a whole sequence of its own."""
    advantage = advantages.ADVANTAGES["grpo"](
        samples.shaped, samples.group, valid=samples.valid, lengths=samples.length,
        settings=advantages.Settings())[:, None]
    on = samples.loss_mask

    def loss(tree):
        logp = plain_logprobs(tree, samples)
        ratio = jnp.exp(jnp.where(on, logp - samples.logprobs, 0))
        value = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        return -((value if clip else advantage * logp) * on).sum() / on.sum()

    return jax.jit(jax.grad(loss))(params)


def distance(got, want):
    """Norm of the difference over the norm."""
    flat = [np.concatenate([np.ravel(x).astype("f8") for x in jax.tree.leaves(tree)])
            for tree in (got, want)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


@pytest.fixture(scope="module")
def whole(other_params, samples):
    return plain_gradient(other_params, samples)


def summed(programs, placed, batches):
    sums = programs.start(placed)
    for batch in batches:
        shape = (batch.prompt_tokens.shape[1], batch.tokens.shape[2])
        sums = programs.accumulate[shape](
            sums, placed, mesh_lib.put(batch, programs.batch_sharding))
    return mesh_lib.fetch(sums)


def idle(batch):
    """A microbatch of the same shape without a loss token, full of junk."""
    return dataclasses.replace(batch, tokens=batch.tokens + 1, weights=np.zeros_like(batch.weights),
                               logprobs=np.full_like(batch.logprobs, np.nan))


def random_splits(samples, count):
    """The update's rows in any order, cut into uneven pieces that are packed apart."""
    weight = (samples.loss_mask / samples.loss_mask.sum()).astype("f4")
    advantage = advantages.ADVANTAGES["grpo"](
        samples.shaped, samples.group, valid=samples.valid, lengths=samples.length,
        settings=advantages.Settings())
    rng = np.random.default_rng(0)
    for _ in range(count):
        order = rng.permutation(len(samples))
        cuts = np.sort(rng.integers(0, len(samples), rng.integers(0, 4)))
        batches = []
        for rows in np.split(order, cuts):
            batches += packing.pack(samples.take(rows), prompts=TABLE, advantages=advantage[rows],
                                    weights=weight[rows], fresh=np.ones(len(rows), bool),
                                    shape=SHAPE)
        yield batches + [idle(batches[0])]


def test_gradient_and_metrics_do_not_depend_on_the_split(programs, other_params, samples, whole):
    placed = mesh_lib.put(other_params, mesh_lib.replicated(tiny.mesh()))
    sizes, seen = set(), []
    for batches in random_splits(samples, 12):
        grads, metrics = summed(programs, placed, batches)
        assert distance(grads, whole) <= 5e-6
        seen.append(values(metrics))
        sizes.add(len(batches))
    assert len(sizes) > 2
    for name in seen[0].keys() - {"policy/loss"}:  # that is a sum until the update is applied
        np.testing.assert_allclose([one[name] for one in seen], seen[0][name], rtol=1e-5)


@pytest.mark.parametrize("slots,rows,prompts,completions", [
    (1, 1, (8,), (6,)), (2, 2, (4, 8), (3, 6)), (8, 8, (16,), (9,))])
def test_the_gradient_does_not_depend_on_slots_rows_and_buckets(
        other_params, samples, whole, slots, rows, prompts, completions):
    shape = packing.PackShape(slots, rows, prompts, completions)
    (work,) = prepare(samples, shape)
    one = jax.jit(update.accumulate, static_argnames=("spec", "settings"))
    start = jax.jit(update.start, static_argnames=("spec", "settings"))
    sums = start(other_params, work.batches[0], spec=tiny.SPEC, settings=SETTINGS)
    for batch in work.batches:
        sums = one(sums, other_params, batch, spec=tiny.SPEC, settings=SETTINGS)
    assert distance(sums[0], whole) <= 5e-6
    got = values(sums[1])
    assert got["policy/clip_low"] + got["policy/clip_high"] > 0  # else clipping is not tested


@pytest.mark.parametrize("parts", [(2, 2, 1), (1, 2, 2)])
def test_the_gradient_does_not_depend_on_the_mesh(other_params, samples, whole, parts):
    mesh = tiny.mesh(*parts)
    placed = mesh_lib.put(other_params, mesh_lib.param_shardings(mesh, tiny.SPEC))
    (work,) = prepare(samples)
    grads, _ = summed(compile_programs(mesh), placed, work.batches)
    assert distance(grads, whole) <= 5e-6


def test_in_double_precision_the_splits_agree_to_ten_digits(other_params, samples):
    spec = dataclasses.replace(tiny.SPEC, compute_dtype="float64")
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda leaf: leaf.astype("f8"), other_params)
        one = jax.jit(functools.partial(update.accumulate, spec=spec, settings=SETTINGS))
        found = []
        for batches in random_splits(samples, 4):
            batches = [jax.tree.map(
                lambda x: x.astype("f8") if x.dtype == np.float32 else x, b) for b in batches]
            sums = update.start(tree, batches[0], spec=spec, settings=SETTINGS)
            for batch in batches:
                sums = one(sums, tree, batch)
            found.append(jax.tree.map(np.asarray, sums[0]))
    assert found[0]["embedding"].dtype == np.float64
    for other in found[1:]:
        assert 0 < distance(other, found[0]) <= 1e-10


def test_a_bucket_of_one_token_gives_the_same_log_probs(params, samples):
    (work,) = prepare(samples)
    batch = work.batches[0]
    first = dataclasses.replace(batch, **{
        name: getattr(batch, name)[..., :1]
        for name in ("tokens", "logprobs", "advantages", "weights", "fresh")})
    stats = jax.jit(update.token_logprobs, static_argnums=(0, 1))
    for want, got in zip(*(stats(tiny.SPEC, SETTINGS, params, b) for b in (batch, first))):
        np.testing.assert_allclose(got, want[..., :1], atol=1e-6)


# --------------------------------------------------------------------- promise 6: on policy


def test_the_first_update_is_on_policy_and_a_later_one_is_not(programs, params, samples):  # B38
    (work,) = prepare(samples)
    state, metrics = step.learn(programs, new_state(params), [work, work])
    first, second = (values(one) for one in metrics)
    assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert first["mismatch/max"] <= 1e-5 and first["policy/kl"] == pytest.approx(0, abs=1e-9)
    assert first["policy/clip_low"] == first["policy/clip_high"] == 0
    assert first["policy/grad_norm"] > 0.01
    assert second["policy/ratio_max"] > 1.01 and second["policy/kl"] > 1e-4
    assert int(state.updates) == 2


def test_on_policy_the_gradient_is_that_of_reinforce(programs, params, samples):  # B38
    (work,) = prepare(samples)
    grads, _ = summed(programs, mesh_lib.put(params, mesh_lib.replicated(tiny.mesh())),
                      work.batches)
    # The ratio is 1 up to the sampler's rounding, about 1e-6.
    assert distance(grads, plain_gradient(params, samples, clip=False)) <= 2e-5


def test_supervised_gradients_equal_torch_s_cross_entropy(params):
    torch = torch_model.torch()
    model = torch_model.llama(tiny.SPEC, params)
    table = dataclasses.replace(TABLE, demonstrations=tuple(
        np.random.default_rng(i).integers(0, 64, 1 + i % 5).astype("i4") for i in range(8)))
    ids = np.array([3, 0, 6, 1])
    shown = packing.from_demonstrations(table, ids, width=tiny.NEW, step=1)
    (work,) = prepare(shown, dataclasses.replace(SHAPE, rows=1), algorithms.sft(), table=table)
    settings = update.Settings(algorithms.loss_settings(algorithms.sft()), 1.0, 16)
    sums = jax.jit(lambda tree, batch: update.accumulate(
        update.start(tree, batch, spec=tiny.SPEC, settings=settings), tree, batch, spec=tiny.SPEC,
        settings=settings))(params, work.batches[0])

    logits, labels = [], []
    for i in ids:
        prompt, answer = table.tokens[i], table.demonstrations[i]
        sequence = torch.tensor(np.concatenate([prompt, answer])[None], dtype=torch.long)
        logits.append(model(sequence).logits[0, len(prompt) - 1:-1])
        labels.append(sequence[0, len(prompt):])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
    loss.backward()
    assert float(sums[1]["policy/loss"].total) == pytest.approx(loss.item(), abs=1e-5)
    layer = model.model.layers[1]
    attention, mlp = (sums[0]["blocks"][part] for part in ("attention", "mlp"))
    for got, want in (
            (sums[0]["embedding"], model.model.embed_tokens), (sums[0]["norm"], model.model.norm),
            (attention["query"][1].reshape(32, -1).T, layer.self_attn.q_proj),
            (attention["out"][1].reshape(-1, 32).T, layer.self_attn.o_proj),
            (mlp["norm"][1], layer.post_attention_layernorm),
            (mlp["down"][1].T, layer.mlp.down_proj)):
        np.testing.assert_allclose(got, want.weight.grad.numpy(), atol=1e-5)


# ------------------------------------------------------------------------------- the optimizer


def test_the_schedule_counts_updates_also_after_a_round_trip(programs, params, samples):  # B59
    (work,) = prepare(samples)
    assert len(work.batches) > 1  # so counting microbatches would be seen
    state, metrics = step.learn(programs, new_state(params), [work, work])
    rates = [values(one)["policy/lr"] for one in metrics]
    stored = jax.tree.map(np.array, mesh_lib.fetch(state))
    again = mesh_lib.put(stored, mesh_lib.replicated(tiny.mesh()))
    resumed, metrics = step.learn(programs, again, [work])
    rates.append(values(metrics[0])["policy/lr"])
    np.testing.assert_allclose(rates, [0.01, 0.02, 0.03], atol=1e-7)
    straight, _ = step.learn(programs, state, [work])
    jax.tree.map(np.testing.assert_array_equal, mesh_lib.fetch(resumed), mesh_lib.fetch(straight))
    assert int(resumed.updates) == 3


def test_an_update_moves_every_parameter_by_about_its_rate(programs, params, samples):
    (work,) = prepare(samples)
    state, _ = step.learn(programs, new_state(params), [work])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), mesh_lib.fetch(state.params), params)
    # Adam's first step is the sign of the gradient times the rate, 0.01.
    np.testing.assert_allclose(jax.tree.leaves(moved), 0.01, rtol=1e-3)
