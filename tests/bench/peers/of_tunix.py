"""google-tunix: its Sampler, update_actor, and GRPOLearner.train, in microbatches of one prompt."""

import os

os.environ["TQDM_DISABLE"] = "1"

import time  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import workload as W  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.generate import sampler as samplers  # noqa: E402
from tunix.models.llama3 import model as llama3  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402

NEVER = [W.VOCAB + 1]  # an end of text that does not come
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None}


def model(mesh):
    with mesh:
        made = llama3.Llama3(llama3.ModelConfig(
            num_layers=W.LAYERS, vocab_size=W.VOCAB, embed_dim=W.WIDTH, hidden_dim=W.FF,
            num_heads=W.HEADS, head_dim=W.SIZE, num_kv_heads=W.KV_HEADS, rope_theta=int(W.ROPE),
            norm_eps=W.EPS, weight_tying=True), rngs=nnx.Rngs(0))
    given = W.weights()
    pairs = [(made.embedder.input_embedding, given["embedding"]),
             (made.final_norm.w, given["norm"])]
    for layer, of in zip(made.layers, given["layers"]):
        pairs += [(layer.input_layernorm.w, of["norm1"]),
                  (layer.post_attention_layernorm.w, of["norm2"])]
        pairs += [(getattr(layer.attn, f"{name}_proj").w, of[name]) for name in "qkvo"]
        pairs += [(getattr(layer.mlp, f"{name}_proj").kernel, of[name])
                  for name in ("gate", "up", "down")]
    for parameter, value in pairs:
        assert parameter.get_value().shape == value.shape
        parameter.set_value(jnp.asarray(value))
    graph, state = nnx.split(made)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return nnx.merge(graph, jax.device_put(state, whole))


def check(made):
    tokens = jnp.asarray(W.checked())
    size = tokens.shape[1]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(tokens), size, size))
    position = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    return W.mean_logprob(made(tokens, position, None, mask)[0])


def learner(made, mesh, reward):
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    optimizer = optax.chain(optax.clip_by_global_norm(W.NORM),
                            optax.adamw(W.RATE, weight_decay=0.0))
    cluster = rl_cluster.RLCluster(
        actor=made, tokenizer=W.Words(), cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=10 ** 6, max_steps=10 ** 6,
                mini_batch_size=W.PROMPTS, train_micro_batch_size=1,
                rollout_micro_batch_size=W.PROMPTS, compute_logps_micro_batch_size=W.PROMPTS),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=W.NEW, max_prompt_length=W.PROMPT,
                kv_cache_size=W.PROMPT + W.NEW, eos_tokens=NEVER, **SAMPLING)))
    return cluster, grpo_learner.GRPOLearner(
        rl_cluster=cluster, reward_fns=reward, algo_config=grpo_learner.GRPOConfig(
            num_generations=W.GROUP, num_iterations=1, beta=0.0, loss_agg_mode="token-mean"))


def rollout(made, mesh, repeats):
    sampler = samplers.Sampler(made, W.Words(), samplers.CacheConfig(
        cache_size=W.PROMPT + W.NEW, num_layers=W.LAYERS, num_kv_heads=W.KV_HEADS,
        head_dim=W.SIZE))
    texts, seeds = [one for one in W.texts() for _ in range(W.GROUP)], iter(range(999))

    def sample():
        found = sampler(texts, max_generation_steps=W.NEW, max_prompt_length=W.PROMPT,
                        eos_tokens=NEVER, seed=next(seeds), **SAMPLING)
        assert sum(map(len, found.tokens)) == W.SAMPLES * W.NEW
    with mesh:
        return W.seconds(sample, repeats)


def update(cluster, repeats):
    prompts = np.repeat(W.prompts(), W.GROUP, axis=0)
    tokens, advantages = W.completions()

    def example(start):
        rows = slice(start, start + W.GROUP)
        ids = jnp.asarray(prompts[rows]), jnp.asarray(tokens[rows])
        return grpo_learner.TrainExample(
            prompt_ids=ids[0], prompt_mask=ids[0] != W.PAD, completion_ids=ids[1],
            completion_mask=ids[1] != W.PAD, advantages=jnp.asarray(advantages[rows]),
            ref_per_token_logps=None, old_per_token_logps=None)
    examples = [example(start) for start in range(0, W.SAMPLES, W.GROUP)]
    return W.seconds(lambda: cluster.update_actor(examples, None, False), repeats)


def step(cluster, made, stamps, repeats):
    """The reward's clock marks one point of every step."""
    trainer, steps = cluster.actor_trainer, repeats + 2
    cluster.cluster_config.training_config.max_steps = trainer.train_steps + steps
    cluster.global_steps = 0
    made._iter_steps = made._last_iter_step = trainer.iter_steps
    made.train([{"prompts": np.array(W.texts())} for _ in range(steps)])
    return W.between(stamps)


def main():
    given, stamps = W.arguments(), []
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    made = model(mesh)
    result = {"peer": "google-tunix 0.1.7", "versions": f"jax {jax.__version__}",
              "check": check(made)}
    if "rollout" in given.parts:
        result["rollout"] = rollout(made, mesh, given.repeats)

    def reward(prompts, completions, **_):
        stamps.append(time.process_time())
        return [W.reward(one) for one in completions]
    cluster, trained = learner(made, mesh, reward)
    if "update" in given.parts:
        result["update"] = update(cluster, given.repeats)
    if "step" in given.parts:
        result["step"] = step(cluster, trained, stamps, given.repeats)
    W.report(**result)


main()
