r"""The final answer of a worked solution, and whether it equals the right one.

`finding` says where the answer stands, `normalise` how it is spelled, `exact` which answers are the
same by rules that take microseconds, `symbolic` (math-verify) decides the rest: expressions,
equations, unions, matrices. All of it is bounded without a clock, so it is usable from any thread
and gives the same on every machine: texts are cut to their last `finding.TAIL` characters, every
pattern is linear, and `symbolic` works within a budget. What lies beyond a bound is a wrong answer.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from dapo_jax.envs import exact, faults, finding, normalise

MAX_ANSWER = 1000  # characters of an answer; a number may be longer

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-z])")


class _Undecided(Exception):
    """Exact rules do not tell whether two answers are the same."""


def extract(text: str) -> str | None:
    r"""The answer a text ends in, normalised; None if there is none.

    The last balanced `\boxed{}` or `\fbox{}`, else the last "Answer:" line, "#### x" or "answer is
    x", else the last formula or number.
    """
    found = finding.answer(text)
    return None if found is None else normalise.normalise(found) or None


def score(text: str, gold: str) -> float:
    r"""1.0 if the answer `text` ends in equals `gold`, else 0.0.

    `gold` may itself be a worked solution with a `\boxed{}`, "Answer:" or "####"; of an option it
    is the letter. `faults.UnusableRecord` (a ValueError) if it holds no answer.
    """
    wanted = _wanted(gold)
    found = finding.answer(text, option=is_option(wanted))
    return float(found is not None and same(normalise.normalise(found), wanted))


def same(found: str, wanted: str) -> bool:
    """Whether two normalised answers are equal: by exact rules, else by math-verify."""
    if len(found) > MAX_ANSWER or len(wanted) > MAX_ANSWER:
        return found == wanted
    try:
        return exact.same(found, wanted, _undecided)
    except _Undecided:
        # Half a second to import, and most answers never need it.
        from dapo_jax.envs import symbolic
        return symbolic.within_budget(
            lambda: exact.same(found, wanted, symbolic.equal))


def is_option(gold: str) -> bool:
    """Whether a right answer is the letter of an option."""
    return len(gold) == 1 and "A" <= gold <= "Z"


def check_gold(gold: Any) -> None:
    """faults.UnusableRecord says why, if no answer can be compared with `gold`; as `score` does."""
    _wanted(gold)


def last_number(text: str, record: Mapping[str, Any]) -> float:
    """The reward of question-and-answer data: `score`, or the very text of the answer."""
    gold = record["answer"]
    right = score(text, gold)
    return right or float(text.strip() == gold.strip())


def _wanted(gold: Any) -> str:
    if not isinstance(gold, str):
        raise faults.UnusableRecord(
            f"the right answer {gold!r:.100} is a {type(gold).__name__}, not a text")
    return _spelled(gold[-finding.TAIL:])


@functools.lru_cache(maxsize=256)
def _spelled(gold: str) -> str:
    """The right answer, normalised; UnusableRecord says why it is none."""
    marked = finding.marked(gold)
    wanted = normalise.normalise(gold if marked is None else marked)
    if not any(character.isalnum() or character in "\\<>[](){}" for character in wanted):
        raise faults.UnusableRecord(f"the right answer {gold!r:.100} is empty")
    if _BOX.search(wanted):
        raise faults.UnusableRecord(f"the box of the right answer {gold!r:.100} is blank or open")
    if len(wanted) > MAX_ANSWER and not wanted.replace("-", "").replace(".", "").isdigit():
        raise faults.UnusableRecord(f"the right answer {gold!r:.100} has {len(wanted)} characters "
                                    r"and neither \boxed{}, 'Answer:' nor '####'")
    if wanted.casefold().strip("+-") in ("nan", "inf", "infinity", "none", "null"):
        raise faults.UnusableRecord(f"the right answer is {gold!r}")
    if exact.divides_by_zero(wanted):
        raise faults.UnusableRecord(f"the right answer {gold!r:.100} divides by zero")
    return wanted


def _undecided(found: str, wanted: str) -> bool:
    raise _Undecided
