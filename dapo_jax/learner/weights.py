"""Weights: how much each loss token counts in an update.

The loss is `sum(weights * per_token_loss)` and nothing else, so a weight already holds the whole
normalisation. Every function takes `(mask bool[n, L], group i32[n], *, max_length)`, where `mask`
is true on the loss tokens of *all* samples of one update, and returns f32[n, L], 0 outside the
mask. Numerator and denominator see the same mask; with nothing left in it all weights are 0.

Schemes in PACKED depend on how the samples were packed, which no right scheme does: they take and
return the weights of the samples in each of an update's microbatches.
"""

from collections.abc import Sequence

import numpy as np


def token(mask: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """1 / all loss tokens: every token counts alike; DAPO (arXiv 2503.14476), SFT."""
    return _over(mask, mask.sum())


def sequence(mask: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """1 / (rows x loss tokens of the row): every sample counts alike; GRPO, GSPO."""
    tokens = mask.sum(axis=1, keepdims=True)
    return _over(mask, (tokens > 0).sum() * tokens)


def constant(mask: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """1 / (rows x `max_length` tokens), whatever the padding; Dr. GRPO (arXiv 2503.20783)."""
    return _over(mask, mask.any(axis=1).sum() * max_length)


def group(mask: np.ndarray, group: np.ndarray, *, max_length: int) -> np.ndarray:
    """1 / (groups x loss tokens of the group): every prompt counts alike, whatever its budget."""
    _, inverse = np.unique(group, return_inverse=True)
    tokens = np.bincount(inverse, mask.sum(axis=1))
    return _over(mask, (tokens > 0).sum() * tokens[inverse][:, None])


def microbatch_token(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The *wrong* mean of the microbatches' token means, kept for the study of its harm only.

    Each microbatch counts alike, so a token of a short one counts more: of losses 2.0 on 100
    tokens and 1.0 on 1000 it makes 1.5, where `token` makes 1.09.
    """
    masks = [weight > 0 for weight in weights]
    microbatches = sum(mask.any() for mask in masks)
    return [_over(mask, microbatches * mask.sum()) for mask in masks]


def _over(mask: np.ndarray, count: np.ndarray) -> np.ndarray:
    """mask / count in float64, rounded once; a count of 0 only stands where the mask is empty."""
    share = (1 / np.maximum(count, 1).astype(np.float64)).astype(np.float32)
    return np.where(mask, share, np.float32(0))  # no matrix in float64: a step's may be gigabytes


WEIGHTS = {
    "token": token,
    "sequence": sequence,
    "constant": constant,
    "group": group,
}
PACKED = {
    "microbatch_token": microbatch_token,
}
