"""What the runs of the study of baselines have in common: the default run, shortened.

    python -m dapo_jax.reproduce baselines --out=DIR

starts its runs from this file, with the differences that dapo_jax/studies/baselines.py names. A run
of it alone is GRPO without the filter:

    python -m dapo_jax.train --config=configs/studies/baselines.py --workdir=DIR
"""

import pathlib

import ml_collections

from dapo_jax import config_file

BASE = pathlib.Path(__file__).parent.parent / "quickstart.py"


def get_config() -> ml_collections.ConfigDict:
    """GRPO on the default run's sums: every prompt that is sampled is learned from, no KL."""
    c = config_file.load(str(BASE))
    c.rl.algorithm.preset = "grpo"
    c.rl.algorithm.kl_coef = 0.0
    c.rl.steps = 120
    c.dynamic_sampling.predictor.kind = "fixed"
    c.dynamic_sampling.predictor.multiplier = 1.0
    c.eval.every = 10
    c.eval.page_rows = 0
    c.checkpoint.every = 60
    c.checkpoint.keep = 1
    c.log.tensorboard = False
    c.log.samples_per_step = 8
    return c
