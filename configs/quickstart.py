"""The default run."""

import ml_collections

from dapo_jax import config


def get_config() -> ml_collections.ConfigDict:
    c = config.default()
    return c
