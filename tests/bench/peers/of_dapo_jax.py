"""Our sampler, our update with all its metrics, and both with scoring between them."""

import dataclasses

import jax
import numpy as np
import workload as W

from dapo_jax import config, config_learner, reductions, types
from dapo_jax.learner import algorithms, optim, packing, step, train_states, update
from dapo_jax.models import head, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw, engine
from dapo_jax.runtime import mesh as mesh_lib

SPEC = specs.ModelSpec(vocab=W.VOCAB, layers=W.LAYERS, d_model=W.WIDTH, heads=W.HEADS,
                       kv_heads=W.KV_HEADS, head_size=W.SIZE, ff=W.FF, rope_base=W.ROPE,
                       norm_eps=W.EPS)
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 1024)
PACK = packing.PackShape(1, W.GROUP, (W.PROMPT,), (W.NEW,), stack=packing.MOST_STACKED)
TABLE = types.PromptTable(tuple(W.prompts()), ({},) * W.PROMPTS, ())


def params():
    given = W.weights()
    of = lambda name: np.stack([layer[name] for layer in given["layers"]])  # noqa: E731
    return {"embedding": given["embedding"], "norm": given["norm"], "blocks": {
        "attention": {"norm": of("norm1"), "query": of("q"), "key": of("k"), "value": of("v"),
                      "out": of("o")},
        "mlp": {"norm": of("norm2"), "gate": of("gate"), "up": of("up"), "down": of("down")}}}


def check(tree):
    """The first token is the prompt, the others continue it; the last of them predicts nothing."""
    tokens = W.checked()
    first, cache = transformer.prefill(SPEC, tree, tokens[:, :1], np.ones(len(tokens), np.int32))
    rest = transformer.extend(SPEC, tree, tokens[:, None, 1:], cache)[:, 0]
    return W.mean_logprob(head.logits(tree, np.concatenate([first[:, None], rest], axis=1)))


def fixed(scorer, state):
    """The fixed completions as samples, with the log-probs of the state that begins."""
    tokens, advantages = W.completions()
    group = np.repeat(np.arange(W.PROMPTS, dtype=np.int32), W.GROUP)
    blank = jax.tree.map(lambda leaf: np.zeros((W.SAMPLES, *leaf.shape[1:]), leaf.dtype),
                         types.no_samples(W.NEW))
    yes = np.ones(W.SAMPLES, bool)
    samples = dataclasses.replace(
        blank, tokens=tokens, loss_mask=np.ones(tokens.shape, bool), group=group, prompt=group,
        length=np.full(W.SAMPLES, W.NEW, np.int32), stopped=yes, valid=yes)
    batches = packing.pack(
        samples, prompts=TABLE, advantages=advantages, fresh=yes, shape=PACK,
        weights=np.full(tokens.shape, 1 / tokens.size, np.float32))
    return [dataclasses.replace(one, logprobs=np.asarray(scorer(state.params, one)))
            for one in batches]


def main():
    given, mesh = W.arguments(), mesh_lib.make(config.Mesh())
    rates = config_learner.Optimizer(learning_rate=W.RATE, warmup_updates=0, b2=0.999)
    optimizer = optim.optimizer(rates, 1000)
    place = lambda tree: mesh_lib.put(tree, mesh_lib.replicated(mesh))  # noqa: E731
    state = [place(train_states.new_state(jax.tree.map(jax.numpy.asarray, params()), optimizer))]
    programs = update.compile_programs(SPEC, SETTINGS, optimizer, mesh, pack=PACK)
    result = {"peer": "dapo_jax", "versions": f"jax {jax.__version__}",
              "check": check(state[0].params)}
    root, groups = place(jax.random.key(0)), np.arange(W.PROMPTS, dtype=np.int32)
    sampler = engine.compile_engine(
        SPEC, draw.Sampling(max_new_tokens=W.NEW, stop_ids=()), mesh, rows=W.GROUP, share=W.GROUP,
        slots=(W.PROMPTS,), buckets=(W.PROMPT,))
    visits = iter(range(1000))

    def sample():
        plan = types.Plan(groups, np.full_like(groups, next(visits)), groups,
                          np.full_like(groups, W.GROUP))
        return engine.run(sampler, state[0].params, plan, table=TABLE, root=root, step=0)

    def learn(batches):
        state[0], metrics = update.update(programs, state[0], batches)
        return reductions.results([mesh_lib.fetch(metrics)])

    def whole():
        samples = sample()
        rewards = np.array([W.reward(W.Words().decode(row)) for row in samples.tokens], np.float32)
        samples = dataclasses.replace(samples, reward=rewards, shaped=rewards,
                                      valid=np.ones(len(samples), bool))
        (work,) = step.prepare(samples, algorithm=algorithms.dapo(), updates=1, step=0,
                               table=TABLE, shape=PACK, max_length=W.NEW)
        return learn(work.batches)
    batches = fixed(jax.jit(lambda tree, one: update.score(
        tree, one, spec=SPEC, settings=SETTINGS)), state[0])
    calls = {"rollout": sample, "update": lambda: learn(batches), "step": whole}
    W.report(**result, **{part: W.seconds(calls[part], given.repeats) for part in given.parts})


main()
