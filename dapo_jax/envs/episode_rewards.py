"""Rewards of episodes: the task's own and its shaping, in all and by turn."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from dapo_jax import config, types
from dapo_jax.envs import base, episode_play, episodes, parts, shaping
from dapo_jax.envs import pool as pools

LOG = logging.getLogger(__name__)


def weights(pairs: tuple, environment: episodes.Environment) -> parts.Weights:
    """Config.task.reward_weights for an environment; ConfigError: it gives no such part."""
    found = parts.weights(pairs)
    for name, _ in found.named:
        if environment.parts and name not in environment.parts:
            raise config.ConfigError(
                f"config.task.reward_weights: the turns of {environment.name!r} give no part "
                f"{name!r}{config.near(name, environment.parts)}; they give "
                f"{', '.join(environment.parts)}")
    return found


def scores(played: Sequence[episode_play.Episode], weighed: parts.Weights) -> pools.Scores:
    """What the episodes earned: the sum of their turns' rewards, none where one failed, and the
    sum of each part, of at most MOST_PARTS names. Failures are counted by kind, apart from those of
    scorers."""
    valid = np.array([not one.failure for one in played], bool)
    reward = np.array([one.reward for one in played], np.float32)
    names = list(dict.fromkeys(name for name, _ in weighed.named) | dict.fromkeys(
        name for one in played for turn in one.turns for name in turn.parts))
    most = max(episodes.MOST_PARTS, len(weighed.named))
    if len(names) > most:
        LOG.warning("the turns of %d episodes name %d parts; the first %d are logged: let names of "
                    "Turn.parts be few", len(played), len(names), most)
    return pools.Scores(
        np.where(valid, reward, 0).astype(np.float32), valid, errors=0, timeouts=0,
        first_failure=next((one.message for one in played if one.failure), ""),
        failures=episode_play.failures(played),
        parts={name: np.where(valid, _by_turn(played, name).sum(1), 0).astype(np.float32)
               for name in names[:most]})


def filled(
    samples: types.Samples, played: Sequence[episode_play.Episode], texts: Sequence[str],
    found: pools.Scores, *, weighed: parts.Weights, overlong: config.Overlong, max_length: int,
    by_turn: int = 0,
) -> types.Samples:
    """Samples with reward, shaped and valid filled in; `texts` are what the model wrote in all.

    `by_turn` turns, if any, are kept: types.Episodes, whose rewards of turns sum to `shaped`. What
    is of the whole episode (format, length, repetition, the overlong penalty) falls to its last.
    The length is of what the model wrote; the penalty of all tokens, which `max_length` limits. An
    answer's form is looked for in the last turn, where its scorer looks.
    """
    last = np.zeros(len(samples), np.float64)
    written = samples.loss_mask.sum(1)  # the model is not charged for what it was told
    for name, weight in weighed.ready:
        seen = [one.final for one in played] if name in shaping.OF_ANSWERS else texts
        last += weight * shaping.PARTS[name](seen, written, max_length)
    last += [base.overlong_penalty(int(length), max_length, overlong.cache, overlong.factor)
             for length in samples.length]
    turns = weighed.task * _by_turn(played, "")
    for name, weight in weighed.named:
        turns = turns + weight * _by_turn(played, name)
    turns[np.arange(len(played)), np.maximum([len(one.turns) - 1 for one in played], 0)] += last
    turns = np.where(found.valid[:, None], turns, 0)
    shaped = turns.sum(1).astype(np.float32)
    samples = dataclasses.replace(samples, reward=found.reward, shaped=shaped, valid=found.valid)
    if not by_turn:
        return samples
    kept = np.zeros((len(samples), by_turn), np.float32)
    kept[:, :turns.shape[1]] = turns
    return types.Episodes(**vars(samples), turn_rewards=kept)


def _by_turn(played: Sequence[episode_play.Episode], part: str) -> np.ndarray:
    """f64[n, K >= 1]: a part of each turn, or its reward for no name; 0 where there is none."""
    found = np.zeros((len(played), max([1, *(len(one.turns) for one in played)])))
    for row, one in enumerate(played):
        for at, turn in enumerate(one.turns):
            found[row, at] = turn.parts.get(part, 0.0) if part else turn.reward
    return found
