"""What the runs of the study of dynamic batching have in common: the default run, evaluated often.

    python -m dapo_jax.reproduce dynamic_batching --out=DIR

starts its runs from this file, with the differences that dapo_jax/studies/dynamic_batching.py
names. A run of it alone is the default run with an evaluation every 10 steps:

    python -m dapo_jax.train --config=configs/studies/dynamic_batching.py --workdir=DIR
"""

import pathlib

import ml_collections

from dapo_jax import config_file

BASE = pathlib.Path(__file__).parent.parent / "quickstart.py"


def get_config() -> ml_collections.ConfigDict:
    """The default run; held-out accuracy often, and little else on the disk."""
    c = config_file.load(str(BASE))
    c.eval.every = 10
    c.eval.page_rows = 0
    c.checkpoint.every = 50
    c.checkpoint.keep = 1
    c.log.tensorboard = False
    c.log.samples_per_step = 64
    return c
