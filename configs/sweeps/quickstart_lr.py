"""Four learning rates of the default run's RL phase, one seed each.

    python -m dapo_jax.sweep --config=configs/sweeps/quickstart_lr.py --out=DIR [--parallel=2]

Each run is a run of configs/quickstart.py. `sweeps.product(rates, sweeps.seeds(3))` would run every
rate with three seeds and give the table intervals.
"""

import pathlib

import ml_collections

from dapo_jax import config_file, sweeps

BASE = pathlib.Path(__file__).parent.parent / "quickstart.py"


def get_config() -> ml_collections.ConfigDict:
    """The default run."""
    return config_file.load(str(BASE))


def sweep() -> sweeps.Settings:
    """Around the default run's own rate, 2e-4."""
    return sweeps.grid({"rl.optimizer.learning_rate": (5e-5, 1e-4, 2e-4, 4e-4)})
