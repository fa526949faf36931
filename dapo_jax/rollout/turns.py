"""What is said between the sampler and environments of several turns: plain records.

`talking.serve` hands over each turn that the model ended and takes the replies as they come. A
sample's tokens are its turns and the replies between them, in one row of types.Samples whose loss
mask is False at replies. A reply after which the model goes on has at least one token, so the turns
are the runs of the loss mask, and no column says more.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

OUTSIDE = -1  # of `turn_numbers`: not sampled
LOOK = 1.0  # seconds at most of one wait for replies
BEAT = 0.01  # seconds of a look at the environments while the device draws


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
    attend: Callable[[float], None] = time.sleep  # keep the environments at work for so many
    # seconds; what they answer waits for the next look


def steady(talk: Talk, lag: int) -> Talk:
    """The same talk with replies at fixed times: to turns handed over at one look (a call of
    `replies` that waits for nothing) they are given at the `lag`-th look after it, waited for if
    late and held back if early. Where nothing else can go on, to the oldest turns at once.

    What is sampled where, and so each last bit, then does not depend on how fast replies come.
    """
    held: dict[tuple[int, int], int] = {}  # (group, sample) -> look, in the order of handing over
    early: dict[tuple[int, int], Reply] = {}
    looks = 0

    def ended(found: Sequence[Ended]) -> None:
        held.update({(one.group, one.sample): looks for one in found})
        talk.ended(found)

    def replies(seconds: float) -> list[Reply]:
        nonlocal looks
        looks += seconds == 0
        oldest = min(held.values(), default=looks)
        due = [key for key, look in held.items()
               if look + lag <= looks or (seconds and look == oldest)]
        _await(talk, early, due)
        for key in due:
            del held[key]
        return [early.pop(key) for key in due]

    return dataclasses.replace(talk, ended=ended, replies=replies, waiting=lambda: len(held))


def _await(talk: Talk, early: dict[tuple[int, int], Reply], due: Sequence[tuple[int, int]]) -> None:
    """Wait until the replies that are due are among those that are there."""
    limit = time.monotonic() + talk.patience
    early.update({(one.group, one.sample): one for one in talk.replies(0.0)})
    while missing := [key for key in due if key not in early]:
        if time.monotonic() >= limit:
            raise RuntimeError(f"group {missing[0][0]}, sample {missing[0][1]} and "
                               f"{len(missing) - 1} more wait for replies; none came in "
                               f"{talk.patience:g} s")
        early.update({(one.group, one.sample): one for one in talk.replies(LOOK)})


def turn_numbers(loss_mask: np.ndarray) -> np.ndarray:
    """i32[n, T] from bool[n, T]: the turn in which each token was sampled, else OUTSIDE."""
    before = np.pad(loss_mask[:, :-1], ((0, 0), (1, 0)))
    begun = np.cumsum(loss_mask & ~before, axis=1, dtype=np.int32)
    return np.where(loss_mask, begun - 1, OUTSIDE).astype(np.int32)
