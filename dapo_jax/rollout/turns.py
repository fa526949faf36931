"""What is said between the sampler and environments of several turns: plain records.

`talking.serve` hands over each turn that the model ended and takes the replies as they come. A
sample's tokens are its turns and the replies between them, in one row of types.Samples whose loss
mask is False at replies. A reply after which the model goes on has at least one token, so the turns
are the runs of the loss mask, and no column says more.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

OUTSIDE = -1  # of `turn_numbers`: not sampled


@dataclasses.dataclass(frozen=True)
class Ended:
    """A turn of the model that ended."""

    group: int  # Plan.group
    sample: int  # number within the visit
    prompt: int
    visit: int
    turn: int  # from 0
    tokens: np.ndarray  # i32[*] of this turn, as sampled, stop token included
    logprobs: np.ndarray  # f32[*]
    length: int  # tokens of the sample so far, this turn's included
    stopped: bool  # ended by itself, not by the budget


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the environment answered to the turn of a sample that ended last."""

    group: int
    sample: int
    tokens: np.ndarray  # i32[*] appended after the turn; empty if over, and only then
    over: bool  # nothing follows; the sample is complete
    budget: int  # absolute limit of the sample's tokens for its next turn, replies included
    valid: bool = True  # False: the episode failed (and is over); its sample comes back invalid


@dataclasses.dataclass(frozen=True)
class Talk:
    """The environments' side. Every turn that is handed over is answered once, in bounded time."""

    ended: Callable[[Sequence[Ended]], None]  # hand over; must not block
    replies: Callable[[float], list[Reply]]  # those that are there; waits up to so many seconds
    # for a first one
    waiting: Callable[[], int]  # turns handed over whose reply has not been taken
    first_budget: int  # tokens of first turns
    patience: float = 3600.0  # seconds without any reply, and nothing to draw: an error


def turn_numbers(loss_mask: np.ndarray) -> np.ndarray:
    """i32[n, T] from bool[n, T]: the turn in which each token was sampled, else OUTSIDE."""
    before = np.pad(loss_mask[:, :-1], ((0, 0), (1, 0)))
    begun = np.cumsum(loss_mask & ~before, axis=1, dtype=np.int32)
    return np.where(loss_mask, begun - 1, OUTSIDE).astype(np.int32)
