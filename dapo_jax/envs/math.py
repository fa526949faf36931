"""Mathematics: records of a problem and its answer, from any data set, scored by math_answers."""

from collections.abc import Mapping
from typing import Any

from dapo_jax.envs import base, math_answers


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the answer that `text` ends in equals the record's, else 0.0."""
    return math_answers.score(text, record["answer"])


def extract(text: str, record: Mapping[str, Any]) -> str | None:
    """What math_answers takes for the text's answer."""
    return math_answers.extract(text)


def convert(row: Mapping[str, Any]) -> base.Record:
    """The row itself; faults.UnusableRecord, a ValueError, if no answer can be compared with its
    own."""
    math_answers.check_gold(row["answer"])
    return dict(row)


EXAMPLES = (
    {"prompt": "A shop sold 48 clips in April, and half as many in May. How many is that in "
     "both months?", "answer": "48 / 2 = 24\n48 + 24 = 72\n#### 72"},
    {"prompt": "What is the sum of 1/3 and 1/6?", "answer": "\\frac{1}{2}"})


def task(build: base.Build) -> base.Task:
    """The task on records that `build` reads."""
    return base.Task(
        "math", build, "dapo_jax.envs.math:score", "dapo_jax.envs.math:extract",
        purpose="records of prompt and answer from a data set; numbers, fractions, expressions",
        examples=EXAMPLES)
