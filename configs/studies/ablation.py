"""What the runs of DAPO's ladder in miniature have in common: DAPO on sums worked out in columns.

    python -m dapo_jax.reproduce ablation --out=DIR

starts its runs from this file, with the differences that dapo_jax/studies/ablation.py names. A run
of it alone is the top of the ladder:

    python -m dapo_jax.train --config=configs/studies/ablation.py --workdir=DIR

Each technique has something to act on: four-digit sums worked out in full are up to the limit
long, and the soft penalty grows over the last 8 tokens before it; lengths differ; and the four
updates of a step make ratios that a clip can reach.
"""

import pathlib

import ml_collections

from dapo_jax import config_file

BASE = pathlib.Path(__file__).parent / "token_loss.py"


def get_config() -> ml_collections.ConfigDict:
    """As in the study of the token-level loss, with longer sums and several updates a step."""
    c = config_file.load(str(BASE))
    c.task.levels = ((1, 0.1), (2, 0.35), (3, 0.35), (4, 0.2))  # (digits, share)
    c.rollout.max_new_tokens = 42  # the longest demonstration
    c.overlong.cache = 8
    c.sft.steps = 160
    c.sft.completion_buckets = (16, 26, 36, 42)
    c.rl.steps = 40
    c.rl.optimizer.learning_rate = 2e-4
    c.rl.updates_per_step = 4
    c.rl.microbatch_slots = 8
    c.rl.completion_buckets = (16, 26, 36, 42)
    c.eval.every = 10
    c.log.samples_per_step = 8
    return c
