"""Parts that shape a reward, made from any task's text and lengths."""

from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.envs import finding
from dapo_jax.runtime import metrics


def format(texts: Sequence[str], lengths: np.ndarray, limit: int) -> np.ndarray:
    r"""1 where the answer is marked by `\boxed{}`, "Answer:", "####" or "answer is", else 0."""
    return np.array([finding.marked(text[-finding.TAIL:]) is not None for text in texts],
                    np.float32)


def length(texts: Sequence[str], lengths: np.ndarray, limit: int) -> np.ndarray:
    """The completion's share of the `limit`, both in tokens; a negative weight makes it a price."""
    return (np.asarray(lengths) / limit).astype(np.float32)


def repetition(texts: Sequence[str], lengths: np.ndarray, limit: int) -> np.ndarray:
    """How much of the text's end repeats, in [0, 1) (Open-Reasoner-Zero, arXiv 2503.24290)."""
    return np.array([metrics.repetition(text[-metrics.REPETITION_CHARACTERS:]) for text in texts],
                    np.float32)


PARTS: dict[str, Callable[[Sequence[str], np.ndarray, int], np.ndarray]] = {
    "format": format, "length": length, "repetition": repetition}
OF_ANSWERS = frozenset({"format"})  # of several turns, they look at the last
