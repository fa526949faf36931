"""What the runs of the study of the token-level loss have in common: sums worked out in columns.

    python -m dapo_jax.reproduce token_loss --out=DIR

starts its runs from this file, with the differences that dapo_jax/studies/token_loss.py names. A
run of it alone is DAPO with its token-level loss:

    python -m dapo_jax.train --config=configs/studies/token_loss.py --workdir=DIR
"""

import ml_collections

from dapo_jax import config

ANSWERED = "dapo_jax.envs.columns:answered"


def get_config() -> ml_collections.ConfigDict:
    """The default model; answers of 10 to 44 characters, small microbatches of like length."""
    c = config.default()
    c.task.name = "columns"
    c.task.levels = ((1, 0.15), (2, 0.4), (3, 0.35), (4, 0.1))  # (digits, share)
    c.task.train_size = 7000
    c.task.reward_weights = ((ANSWERED, 0.0),)  # logged, not learned from
    c.prompts.buckets = (10,)  # "1234+5678="
    c.rollout.max_new_tokens = 48
    c.rollout.slots = (16, 32)

    c.sft.steps = 190
    c.sft.prompts_per_step = 64
    c.sft.microbatch_slots = 16
    c.sft.completion_buckets = (16, 26, 36, 48)
    c.sft.optimizer.learning_rate = 2e-3
    c.sft.optimizer.warmup_updates = 20

    c.rl.steps = 150
    c.rl.prompts_per_step = 32
    c.rl.samples_per_prompt = 8
    c.rl.microbatch_slots = 4  # 8 microbatches an update: their means are what the study is about
    c.rl.completion_buckets = (16, 26, 36, 48)
    c.rl.optimizer.learning_rate = 3e-4

    c.eval.every = 15
    c.eval.prompts = 128
    c.eval.samples = 4
    c.eval.page_rows = 0
    c.checkpoint.every = 50
    c.checkpoint.keep = 1
    c.log.tensorboard = False
    c.log.samples_per_step = 16
    return c
