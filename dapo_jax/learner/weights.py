"""Weights: how much each loss token counts in an update.

The loss is `sum(weights * per_token_loss)` and nothing else, so a weight already holds the whole
normalisation. All loss tokens of a row weigh alike, 1 / a count. Every function of COUNTS takes
`(tokens i[n], group i32[n], *, max_length)`, the loss tokens of *all* samples of one update, and
returns that count, of each row or of all. Numerator and denominator see the same tokens.

Schemes in PACKED depend on how the samples were packed, which no right scheme does: they take
`(tokens i[n], microbatch i[n])`, the number of the microbatch that each row stands in.
"""

import functools
from collections.abc import Callable

import numpy as np


def token_count(tokens: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """All loss tokens: every token counts alike; DAPO (arXiv 2503.14476), SFT."""
    return tokens.sum()


def sequence_count(tokens: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """Rows x loss tokens of the row: every sample counts alike; GRPO, GSPO."""
    return (tokens > 0).sum() * tokens


def constant_count(tokens: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """Rows x `max_length` tokens, whatever the padding; Dr. GRPO (arXiv 2503.20783)."""
    return (tokens > 0).sum() * max_length


def group_count(tokens: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """Groups x loss tokens of the group: every prompt counts alike, whatever its budget."""
    _, inverse = np.unique(group, return_inverse=True)
    of_group = np.bincount(inverse, tokens)
    return (of_group > 0).sum() * of_group[inverse]


def microbatch_count(tokens: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
    """The *wrong* mean of the microbatches' token means, kept for the study of its harm only.

    Each microbatch counts alike, so a token of a short one counts more: of losses 2.0 on 100
    tokens and 1.0 on 1000 it makes 1.5, where `token` makes 1.09.
    """
    of_microbatch = np.bincount(microbatch, tokens)
    return (of_microbatch > 0).sum() * of_microbatch[microbatch]


COUNTS: dict[str, Callable[..., np.ndarray]] = {
    "token": token_count,
    "sequence": sequence_count,
    "constant": constant_count,
    "group": group_count,
}
PACKED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "microbatch_token": microbatch_count,
}


def shares(tokens: np.ndarray, count: np.ndarray) -> np.ndarray:
    """f32[n]: 1 / count in float64, rounded once; a count of 0 only stands where nothing weighs."""
    share = 1 / np.maximum(count, 1).astype(np.float64)
    return np.broadcast_to(share.astype(np.float32), tokens.shape)


def spread(mask: np.ndarray, share: np.ndarray) -> np.ndarray:
    """f32[n, L]: a row's share f32[n] on its loss tokens, 0 elsewhere."""
    return np.where(mask, share[:, None], np.float32(0))


def _weights(count: Callable[..., np.ndarray], mask: np.ndarray, group: np.ndarray, *,
             max_length: int) -> np.ndarray:
    """Weights f32[n, L] of mask bool[n, L], 0 outside it; with nothing in it all are 0."""
    tokens = mask.sum(axis=1)
    return spread(mask, shares(tokens, count(tokens, group, max_length=max_length)))


WEIGHTS = {name: functools.partial(_weights, count) for name, count in COUNTS.items()}
token, sequence, constant, group = WEIGHTS.values()
