"""Rewards of samples: the task's own from the scoring pool, and the shaping added to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config, types
from dapo_jax.envs import base, parts, shaping
from dapo_jax.envs import pool as pools


def score(
    samples: types.Samples, texts: Sequence[str], records: Sequence[Mapping[str, Any]], *,
    pool: pools.Pool, overlong: config.Overlong, max_length: int,
) -> tuple[types.Samples, pools.Scores]:
    """Fill in `reward`, `shaped` and `valid`; lengths in tokens, `max_length` is the limit.

    `reward` is the task's own. `shaped` is the sum of the parts by the pool's weights, and of the
    overlong penalty.
    """
    scores = pools.score(pool, texts, records)
    reward = np.where(scores.valid, scores.reward, 0).astype(np.float32)
    shaped = _weighted(reward, scores, pool.weights, texts=texts, lengths=samples.length,
                       limit=max_length)
    penalty = np.asarray(
        [base.overlong_penalty(int(length), max_length, overlong.cache, overlong.factor)
         for length in samples.length], np.float32)
    filled = dataclasses.replace(samples, reward=reward, shaped=shaped + penalty,
                                 valid=scores.valid)
    return filled, scores


def _weighted(
    reward: np.ndarray, scores: pools.Scores, weights: parts.Weights, *, texts: Sequence[str],
    lengths: np.ndarray, limit: int,
) -> np.ndarray:
    """f32[n] the sum of all parts; of a sample that failed the scored ones are 0."""
    shaped = weights.task * reward
    for name, weight in weights.scored:
        shaped = shaped + weight * scores.parts[name]
    for name, weight in weights.ready:
        shaped = shaped + weight * shaping.PARTS[name](texts, lengths, limit)
    return shaped.astype(np.float32)
