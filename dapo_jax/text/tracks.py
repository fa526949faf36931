"""The tokens of one episode: what the model sampled stays as it is, what it was told is appended.

Nothing is ever decoded and encoded again: other tokens may spell the same text, and their
log-probs would be no one's.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

OUTSIDE = -1  # of `turn`: not sampled


class PrefixMismatch(ValueError):
    """A turn was sampled after other tokens than the episode holds: the episode is invalid."""


@dataclasses.dataclass(frozen=True)
class Track:
    """Tokens after the prompt, in order; equally long."""

    tokens: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()  # in which it was sampled, or OUTSIDE
    logprobs: tuple[float, ...] = ()  # of the sampler; 0 where not sampled
    turns: int = 0  # sampled so far


def sampled(track: Track, tokens: Sequence[int], logprobs: Sequence[float], *,
            prefix: Sequence[int]) -> Track:
    """The track after a turn of the model; `prefix` are the tokens that the sampler went on from.

    PrefixMismatch if they are not the track's. ValueError for log-probs that do not match the
    tokens, or are not finite.
    """
    if tuple(prefix) != track.tokens:
        at = next((at for at, (one, other) in enumerate(zip(prefix, track.tokens))
                   if one != other), min(len(prefix), len(track.tokens)))
        raise PrefixMismatch(f"turn {track.turns} was sampled after {len(prefix)} tokens, the "
                             f"episode holds {len(track.tokens)}; they differ from token {at} on")
    if len(tokens) != len(logprobs):
        raise ValueError(f"turn {track.turns}: {len(tokens)} tokens but {len(logprobs)} log-probs")
    if not np.isfinite(np.asarray(logprobs, float)).all():
        raise ValueError(f"turn {track.turns}: a log-prob is not finite")
    return Track(track.tokens + tuple(int(token) for token in tokens),
                 track.turn + (track.turns,) * len(tokens),
                 track.logprobs + tuple(float(value) for value in logprobs), track.turns + 1)


def told(track: Track, tokens: Sequence[int]) -> Track:
    """The track after tokens that the model did not choose: a reply, encoded once."""
    return dataclasses.replace(
        track, tokens=track.tokens + tuple(int(token) for token in tokens),
        turn=track.turn + (OUTSIDE,) * len(tokens),
        logprobs=track.logprobs + (0.0,) * len(tokens))


def rows(tracks: Sequence[Track], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens i32[n, width], turn i32[n, width] and log-probs f32[n, width], padded on the right.

    Pads are token 0 of turn OUTSIDE; the loss mask is `turn != OUTSIDE`. ValueError for a track
    longer than `width`: cutting it would leave a reward for tokens that are not there.
    """
    longest = max((len(track.tokens) for track in tracks), default=0)
    if longest > width:
        raise ValueError(f"an episode of {longest} tokens in rows of {width}")
    tokens = np.zeros((len(tracks), width), np.int32)
    turn = np.full((len(tracks), width), OUTSIDE, np.int32)
    logprobs = np.zeros((len(tracks), width), np.float32)
    for row, track in enumerate(tracks):
        size = len(track.tokens)
        tokens[row, :size], turn[row, :size] = track.tokens, track.turn
        logprobs[row, :size] = track.logprobs
    return tokens, turn, logprobs


def model_texts(track: Track, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What the model wrote, turn by turn: all that a reward may look at.

    Each turn is decoded by itself, so that bytes of a character that a reply cuts in two do not
    run into the next turn.
    """
    return [decode([token for token, of in zip(track.tokens, track.turn) if of == turn])
            for turn in range(track.turns)]
