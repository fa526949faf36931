"""DAPO's ladder of techniques at the paper's size: six settings of configs/dapo_qwen2_5_32b.py.

    python -m dapo_jax.sweep --config=configs/sweeps/dapo_ladder_32b.py --out=DIR --dry-run
    launch/sweep.sh --jobset --dry-run --config=configs/sweeps/dapo_ladder_32b.py --out=/runs/ladder

Each setting wants a slice of 256 TPU v5p, which was not at hand: not run. Reported by the paper
(arXiv 2503.14476, table 1): avg@32 on AIME 2024 of 30, 36, 38, 41, 42 and 50. The same in miniature
runs on a CPU: python -m dapo_jax.reproduce ablation.
"""

import pathlib

import ml_collections

from dapo_jax import config_file, sweeps

BASE = pathlib.Path(__file__).parent.parent / "dapo_qwen2_5_32b.py"
FILTER, CLIP, SOFT, WEIGHTS = ("overlong.mask", "rl.algorithm.clip_high", "overlong.cache",
                               "rl.algorithm.weights")


def get_config() -> ml_collections.ConfigDict:
    """The run as in the paper: the top of the ladder."""
    return config_file.load(str(BASE))


def sweep() -> sweeps.Settings:
    """From naive GRPO up; a rung is written as what it lacks of DAPO. Below the last all prompts
    that are sampled are learned from."""
    rungs = sweeps.zip_({FILTER: (False, True, True, False, False),
                         CLIP: (0.2, 0.2, 0.28, 0.28, 0.28), SOFT: (0, 0, 0, 4096, 4096),
                         WEIGHTS: ("sequence",) * 4 + ("token",)})
    unfiltered = {"filter.enable": (False,), "dynamic_sampling.predictor.kind": ("fixed",),
                  "dynamic_sampling.predictor.multiplier": (1.0,)}
    return sweeps.chain(sweeps.product(rungs, sweeps.grid(unfiltered)), [{FILTER: False}])
