"""What becomes of an episode: after each turn that its environment took, and in the end.

Pure functions and records; the waiting is in episodes_talk.py.
"""

import dataclasses

import numpy as np

from dapo_jax.envs import episode_play
from dapo_jax.rollout import turns
from dapo_jax.text import replies

DONE, TURNS, TOKENS, FAILED = "done", "turns", "tokens", "failed"  # why an episode is over
NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What follows a turn: the tokens that the model is told, or the end."""

    tokens: np.ndarray = dataclasses.field(default_factory=NOTHING.copy)  # i32[*]; empty: the end
    budget: int = 0  # absolute limit of the sample's tokens for the next turn, these included
    end: str = ""
    fault: str = ""  # of FAILED: what is wrong with the reply


@dataclasses.dataclass(frozen=True)
class Played:
    """The episodes of a round, in the order of its samples."""

    episodes: tuple[episode_play.Episode, ...]
    ends: tuple[str, ...]
    told: np.ndarray  # i32[n] tokens of replies
    cut: np.ndarray  # i32[n] turns that did not end by themselves
    latency: np.ndarray  # f64[*] seconds of each call, waiting for a worker included
    retries: int
    refused: int


def after(
    episode: episode_play.Episode, turn: turns.Ended, *, encode: replies.Encoder, limit: int,
    most_turns: int, turn_tokens: int,
) -> Outcome:
    """What follows the turn that `episode` ends with.

    `limit` are tokens of the whole sample, `turn_tokens` those of one turn, 0: as many as are left.
    The reply is encoded here and nowhere else.
    """
    if episode.done or len(episode.turns) >= most_turns:
        return Outcome(end=DONE if episode.done else TURNS)
    try:
        tokens = encode(episode.turns[-1].reply, int(turn.tokens[-1]))
    except ValueError as error:
        return Outcome(end=FAILED, fault=str(error))
    if not len(tokens):
        return Outcome(end=FAILED, fault="the reply has no tokens, but the episode goes on")
    length = turn.length + len(tokens)
    if length >= limit:
        return Outcome(end=TOKENS)
    return Outcome(tokens, min(limit, length + (turn_tokens or limit)))


def stopped(end: str, *, by_itself: bool, length: int, limit: int) -> bool:
    """Whether an episode of `length` tokens is whole, which is the opposite of truncated.

    The environment's end counts also where it took a last turn that a turn's own limit had cut:
    `by_itself` is False then. A turn that the whole sample's limit cut is truncated whatever the
    environment made of it, as an answer of one turn is.
    """
    return end == DONE and (by_itself or length < limit)
