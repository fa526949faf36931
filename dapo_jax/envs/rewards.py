"""Rewards of samples: the task's own from the scoring pool, and the shaping added to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config, types
from dapo_jax.envs import base
from dapo_jax.envs import pool as pools


def score(
    samples: types.Samples, texts: Sequence[str], records: Sequence[Mapping[str, Any]], *,
    pool: pools.Pool, overlong: config.Overlong, max_length: int,
) -> tuple[types.Samples, pools.Scores]:
    """Fill in `reward`, `shaped` and `valid`; lengths in tokens, `max_length` is the limit."""
    scores = pools.score(pool, texts, records)
    penalty = np.asarray(
        [base.overlong_penalty(int(length), max_length, overlong.cache, overlong.factor)
         for length in samples.length], np.float32)
    reward = np.where(scores.valid, scores.reward, 0).astype(np.float32)
    filled = dataclasses.replace(samples, reward=reward, shaped=reward + penalty,
                                 valid=scores.valid)
    return filled, scores
