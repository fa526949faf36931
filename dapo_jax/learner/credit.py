"""Which reward each token of an episode of several turns is credited with.

Rewards are f32[n, K] by turn, 0 beyond an episode's own turns. `turn` i32[n, L] is the turn in
which the model sampled a token, and OUTSIDE for what it did not: prompt, environment and padding.
Those get 0 here and have no loss, so nothing that the environment wrote is paid for.
"""

from collections.abc import Callable

import numpy as np

OUTSIDE = -1

Advantage = Callable[..., np.ndarray]


def discounted(rewards: np.ndarray, turns: np.ndarray, discount: float) -> np.ndarray:
    """f32[n, K]: a turn's own reward and those after it, `discount` to the power of the distance.

    The discount is by turn, not by token: a long answer does not make its reward small.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"a discount of {discount} is outside 0..1")
    within = _within(rewards, turns)
    known, returns = np.where(within, rewards, 0), np.zeros(rewards.shape, np.float64)
    following = np.zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        following = known[:, turn] + discount * following
        returns[:, turn] = following
    return np.where(within, returns, 0).astype(np.float32)


def by_token(values: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """f32[n, L] from f32[n, K]: the value of the turn that a token belongs to, 0 outside of all.

    ValueError for a turn that `values` has not.
    """
    if turn.size and not OUTSIDE <= turn.min() <= turn.max() < values.shape[1]:
        raise ValueError(f"turns {turn.min()}..{turn.max()}, but values of {values.shape[1]}")
    if not values.shape[1]:
        return np.zeros(turn.shape, np.float32)
    found = np.take_along_axis(values, np.maximum(turn, 0), axis=1)
    return np.where(turn == OUTSIDE, 0, found).astype(np.float32)


def advantages(
    advantage: Advantage, returns: np.ndarray, turns: np.ndarray, *, group: np.ndarray,
    valid: np.ndarray, lengths: np.ndarray, settings: object,
) -> np.ndarray:
    """f32[n, K]: an advantage of ADVANTAGES, each turn against the same turn of its group.

    `turns` i32[n] counts an episode's turns. An invalid episode is in no statistic, and one that
    is over in none of later turns: a turn that fewer than two of a group reached gets what the
    advantage gives where there is no baseline. Terminal credit is none of this: there the advantage
    is of the sums, once, for all of an episode's tokens.
    """
    found = np.zeros(returns.shape, np.float32)
    for turn in range(returns.shape[1]):
        reached = valid & (turns > turn)
        found[:, turn] = np.where(reached, advantage(
            returns[:, turn], group, valid=reached, lengths=lengths, settings=settings), 0)
    return found


def _within(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    if turns.min(initial=0) < 0 or turns.max(initial=0) > rewards.shape[1]:
        raise ValueError(f"episodes of {turns.min()}..{turns.max()} turns, but rewards of "
                         f"{rewards.shape[1]}")
    return np.arange(rewards.shape[1]) < turns[:, None]
