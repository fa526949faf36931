"""How far completions lie apart, and a subset that lies far apart."""

from collections.abc import Sequence

import numpy as np

SAME = 1e-9  # squared distance up to which features are equal but for rounding
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost modulo 2^64
_SALT = 0xD1B54A32D192ED03


def ngram_distances(tokens: np.ndarray, own: np.ndarray, *, longest: int) -> np.ndarray:
    """Squared distances f64[m, m] between completions i32[m, T] whose `own` bool[m, T] tokens the
    policy drew; what an environment told is not looked at.

    A completion's features are how often each run of 1 to `longest` tokens occurs in it, scaled to
    norm 1; so 0 means the same counts up to a factor, 2 that no token is shared.
    """
    rows, runs = [], []
    for order in range(1, min(longest, tokens.shape[1]) + 1):
        row, run = _runs(tokens, own, order)
        rows.append(row)
        runs.append(run)
    names, column = np.unique(np.concatenate(runs), return_inverse=True)
    counts = np.zeros((len(tokens), len(names)))
    np.add.at(counts, (np.concatenate(rows), column), 1)
    return _between_units(counts)


def state_distances(states: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Squared distances f64[m, m] between completions by their `states` f32[m, D] at norm 1: 0 to
    4, twice 1 - cosine. Equal completions lie at 0, whatever rounding made of their states."""
    own = np.where(np.arange(tokens.shape[1]) < length[:, None], tokens, -1)
    _, text = np.unique(own, axis=0, return_inverse=True)
    return np.where(np.equal.outer(text, text), 0, _between_units(states.astype(np.float64)))


def _between_units(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1)
    return np.maximum(np.add.outer(*[(unit ** 2).sum(axis=1)] * 2) - 2 * unit @ unit.T, 0)


def _runs(tokens: np.ndarray, own: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Row i64[k] and hash u64[k] of every run of `order` own tokens that follow one another."""
    places = max(tokens.shape[1] - order + 1, 0)
    # Runs of different order begin at values far apart: small ones would meet after the xor.
    value = np.full((len(tokens), places), order, np.uint64) * np.uint64(_SALT)
    within = np.ones(value.shape, bool)
    for offset in range(order):
        within &= own[:, offset:offset + places]
        token = tokens[:, offset:offset + places].astype(np.uint64)
        value = (value ^ (token + np.uint64(1))) * np.uint64(_MULTIPLIER)
        value ^= value >> np.uint64(29)
    row, place = np.nonzero(within)
    return row, value[row, place]


def farthest(distances: np.ndarray, count: int, *, first: Sequence[int]) -> list[int]:
    """Up to `count` of m items: `first`, then again and again the one farthest from all chosen.

    `distances` f64[m, m] squared; ties go to the lower number. It ends early where all that is
    left equals something chosen. The greedy 2-approximation of k-centre (Gonzalez, 1985).
    """
    chosen = list(first)
    nearest = distances[chosen].min(axis=0)
    while len(chosen) < count and nearest.max() > SAME:
        chosen.append(int(np.argmax(nearest)))
        nearest = np.minimum(nearest, distances[chosen[-1]])
    return chosen
