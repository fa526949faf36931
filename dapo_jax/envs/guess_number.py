"""A game: find a number by guesses that are answered with higher or lower.

A record may have "low" and "high", the number's bounds, and "tries". The number is drawn by the
episode's seed.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax.envs import base, episodes

LOW, HIGH, TRIES = 1, 100, 8
_NUMBER = re.compile(r"-?\d{1,18}(?!\d)")


def start(record: Mapping[str, Any], seed: int) -> tuple[dict, list[episodes.Message]]:
    """Draw the number; ValueError for bounds that hold none."""
    low, high = int(record.get("low", LOW)), int(record.get("high", HIGH))
    left = int(record.get("tries", TRIES))
    if low > high or left < 1:
        raise ValueError(f"no number from {low} to {high}, or no try ({left})")
    number = int(np.random.default_rng(seed).integers(low, high, endpoint=True))
    text = record.get("prompt") or prompt(low, high, left)
    return {"number": number, "left": left}, episodes.told(text)


def prompt(low: int, high: int, tries: int) -> str:
    """What the model is told."""
    return (f"I think of a whole number from {low} to {high}. Guess it: write one number. You have "
            f"{tries} tries; I say higher or lower.")


def step(state: dict, text: str) -> episodes.Turn:
    """Judge the last number of the text; a text without one costs a try too."""
    number, left = state["number"], state["left"] - 1
    guesses = _NUMBER.findall(text)
    if guesses and int(guesses[-1]) == number:
        return episodes.Turn("correct", 1.0, True, parts={"malformed": 0})
    said = "no number found" if not guesses else (
        "higher" if int(guesses[-1]) < number else "lower")
    return episodes.Turn(f"{said}, {left} left", 0.0, left == 0, {"number": number, "left": left},
                         {"malformed": int(not guesses)})


def records(*, seed: int, split: str, count: int) -> list[base.Record]:
    """Games with different bounds, 10 to 100 numbers between them; "eval" has odd upper bounds."""
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is not 'train' or 'eval'")
    odd = int(split == "eval")
    rng = np.random.default_rng([seed, odd])
    bounds = [(low, 2 * ((low + size) // 2) + odd) for low in range(1, 1001)
              for size in range(10, 100, 2)]
    order = rng.permutation(len(bounds))[:count].tolist()
    chosen = [bounds[at] for at in order]
    return [{"prompt": prompt(low, high, TRIES), "low": low, "high": high, "tries": TRIES,
             "answer": base.NO_ANSWER} for low, high in chosen]


ENVIRONMENT = episodes.Environment(
    "guess_number", start, step, idempotent=True, records=records,
    parts=("malformed",),
    purpose="a game: find a number by guesses that are answered with higher or lower")
