"""The smallest run that has everything: SFT, then RL with dynamic sampling; a second or two."""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """4 SFT steps and 6 RL steps of 4 groups x 4 samples, rewarded for an odd digit."""
    c = config.default()
    c.model.layers = 2
    c.model.d_model = 32
    c.model.heads = 4
    c.model.kv_heads = 2
    c.model.head_size = 8
    c.model.ff = 48
    c.task.levels = ((1, 1.0),)
    c.task.train_size = 60
    c.task.reward = "tests.run_rewards:odd"
    c.prompts.buckets = (4,)
    c.rollout.max_new_tokens = 4
    c.rollout.slots = (4, 8)
    c.dynamic_sampling.predictor.multiplier = 1.5
    c.dynamic_sampling.predictor.window = 3
    c.dynamic_sampling.max_rounds = 3
    c.dynamic_sampling.at_limit = "partial"
    c.sft.steps = 4
    c.sft.prompts_per_step = 8
    c.sft.microbatch_slots = 8
    c.sft.optimizer.learning_rate = 1e-2
    c.rl.steps = 6
    c.rl.prompts_per_step = 4
    c.rl.samples_per_prompt = 4
    c.rl.microbatch_slots = 4
    c.rl.optimizer.learning_rate = 3e-3
    c.rl.optimizer.warmup_updates = 2
    c.eval.every = 3
    c.eval.prompts = 6
    c.eval.samples = 4
    c.checkpoint.every = 2
    c.log.tensorboard = False
    return c
