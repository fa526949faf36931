"""Rewards of samples: the task's own from the scoring pool, and the shaping added to it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax import config, types
from dapo_jax.envs import base, parts, shaping
from dapo_jax.envs import pool as pools


def filled(
    samples: types.Samples, texts: Sequence[str], scores: pools.Scores, *, weights: parts.Weights,
    overlong: config.Overlong, max_length: int,
) -> types.Samples:
    """Fill in `reward`, `shaped` and `valid`; lengths in tokens, `max_length` is the limit.

    `reward` is the task's own. `shaped` is the sum of the parts by the pool's weights, and of the
    overlong penalty.
    """
    reward = np.where(scores.valid, scores.reward, 0).astype(np.float32)
    shaped = _weighted(reward, scores, weights, texts=texts, lengths=samples.length,
                       limit=max_length)
    penalty = np.asarray(
        [base.overlong_penalty(int(length), max_length, overlong.cache, overlong.factor)
         for length in samples.length], np.float32)
    return dataclasses.replace(samples, reward=reward, shaped=shaped + penalty,
                               valid=scores.valid)


def joined(found: Sequence[pools.Scores], places: Sequence[slice], count: int) -> pools.Scores:
    """The scores of `count` samples from those of disjoint parts of them."""
    def column(values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        whole: np.ndarray = np.zeros(count, dtype)
        for place, part in zip(places, values, strict=True):
            whole[place] = part
        return whole

    kinds = sorted({kind for one in found for kind in one.failures})
    names = dict.fromkeys(name for one in found for name in one.parts)
    return pools.Scores(
        column([one.reward for one in found], np.float32),
        column([one.valid for one in found], bool),
        sum(one.errors for one in found), sum(one.timeouts for one in found),
        next((one.first_failure for one in found if one.first_failure), ""),
        {kind: sum(one.failures.get(kind, 0) for one in found) for kind in kinds},
        {name: column([one.parts[name] for one in found], np.float32) for name in names})


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
