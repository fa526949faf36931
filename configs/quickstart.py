"""The default run: a character-level Llama of 0.33M parameters learns addition on a CPU.

    launch/local.sh      (python -m dapo_jax.train --config=configs/quickstart.py --workdir=DIR)

Measured on 2 shared cores: 3 to 4 minutes; held-out accuracy at temperature 1 from 0.37 after the
SFT to 0.68 (means of 3 seeds), greedy from 0.53 to 0.76. The settings were chosen on held-out
accuracy with seed 0.

260 steps of SFT on worked sums, then 300 steps of DAPO on the same kind of sums, most of which it
gets right only in part: some one-digit sums are easy, four-digit sums stay hopeless, so that some
groups are all right and some all wrong at every stage and dynamic sampling has work to do.
"""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    """Two phases on one task; the model is the default one of dapo_jax.config."""
    c = config.default()

    # (digits, share). A level with fewer problems than its share gives all it has.
    c.task.levels = ((1, 0.02), (2, 0.83), (3, 0.10), (4, 0.05))
    c.task.train_size = 7000
    c.prompts.buckets = (10,)  # "1234+5678="
    c.rollout.max_new_tokens = 6  # "6912\n" and one to spare

    c.sft.steps = 260
    c.sft.prompts_per_step = 128
    c.sft.microbatch_slots = 128
    c.sft.optimizer.learning_rate = 1e-3
    c.sft.optimizer.warmup_updates = 20

    c.rl.steps = 300
    c.rl.prompts_per_step = 64
    c.rl.samples_per_prompt = 8
    c.rl.microbatch_slots = 64
    c.rl.optimizer.learning_rate = 2e-4

    c.eval.every = 50
    c.eval.prompts = 256
    c.checkpoint.every = 100
    return c
