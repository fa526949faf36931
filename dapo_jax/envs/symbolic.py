r"""Whether two expressions are equal, by math-verify, within bounds that need no clock.

math-verify's own time limits are signals, which exist in the main thread alone and make a verdict
depend on the machine's load. Here they are off. Instead an expression that could blow up inside one
C call (towers of powers, huge factorials) is refused before it is read, and all else is stopped
after `BUDGET` function calls.
"""

import functools
import logging
import math
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import math_verify
import sympy

MAX_LENGTH = 300  # characters of an expression
MAX_NESTING = 12  # brackets in brackets
MAX_DIGITS = 30  # of one number
MAX_POWER = 999  # of an exponent, all numbers in it multiplied
BUDGET = 3_000_000  # calls and returns of functions for one pair of answers; one to two seconds

Profile = Callable[[FrameType, str, Any], None]

_LATEX = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_DIGITS = re.compile(r"\d+")
_EXPONENT = re.compile(r"\s*(?:[-+]?\d+|\\[A-Za-z]+(?:\s*\{[^{}]*\})*|\S)?")
_TOWER = re.compile(r"\d\s*[)}\]]*\s*\^|!")
# Factorials of all but a letter or a number of two digits, large binomials, roots that are powers.
_GROWS = re.compile(
    r"(?:[^A-Za-z0-9\s]|\^\s*\w+|\d{3})\s*!(?!=)|\\Gamma|\\choose|\\uparrow|\\sqrt\s*\[(?!\s*\w{1,2}\s*\])"
    r"|\\[td]?binom(?!\s*\{\s*\w{1,3}\s*\}\s*\{\s*\w{1,3}\s*\})")
_FRACTION = re.compile(r"(?<![\d.^])(\d+)/(\d+)(?![\d.])")
_LOCK = threading.Lock()  # neither the parser's tables nor sympy's caches are made for threads

# It warns that the caller must bound the time. The caller does.
logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class _OverBudget(BaseException):
    """The budget is used up. No Exception: those are caught inside of sympy."""


def within_budget(decide: Callable[[], bool]) -> bool:
    """What `decide` says of two answers; false if that takes more than the budget."""
    with _LOCK:
        count = _counter(BUDGET)
        before, hook = sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = _rearming(count, hook)
        sys.setprofile(count)
        try:
            return decide()
        except (_OverBudget, RecursionError):
            return False
        finally:
            sys.setprofile(before)
            sys.unraisablehook = hook


def equal(found: str, wanted: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal; false if it cannot read one.

    To be called inside of `within_budget`.
    """
    if not (safe(found) and safe(wanted)):
        return False
    left, right = _parse(found), _parse(wanted)
    if not (left and right):
        return False
    return bool(math_verify.verify(right, left, timeout_seconds=None)) and _close(left, right)


def safe(expression: str) -> bool:
    """Whether no part of an expression can grow out of hand within one call of a C function."""
    if len(expression) > MAX_LENGTH or any(
            len(digits) > MAX_DIGITS for digits in _DIGITS.findall(expression)):
        return False
    depth = deepest = 0
    for character in expression:
        depth += _BRACKETS.get(character, 0)
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTING and not _GROWS.search(expression) and _small_powers(expression)


def _small_powers(expression: str) -> bool:
    """Whether every exponent, and a power's power, is at most MAX_POWER, and none is a tower."""
    levels = [1]  # the largest power within each bracket that is open
    closed = 1  # the same of the bracket that was closed last
    for at, character in enumerate(expression):
        step = _BRACKETS.get(character, 0)
        if step > 0:
            levels.append(1)
        elif step < 0 and len(levels) > 1:
            closed = levels.pop()
            levels[-1] = max(levels[-1], closed)
        elif character == "^":
            grouped = expression[:at].rstrip()[-1:] in (")", "]", "}")
            power = _power(expression, at + 1) * (closed if grouped else 1)
            levels[-1] = max(levels[-1], power)
            if power > MAX_POWER:
                return False
    return True


def _power(text: str, start: int) -> int:
    """The product of all numbers of the exponent at `start`; beyond the limit for a tower."""
    found = _EXPONENT.match(text, start)
    assert found is not None  # the pattern matches nothing at all too
    exponent = found[0]
    if text[start:].lstrip()[:1] in ("(", "[", "{"):
        exponent = _bracket(text, start)
    # A power of numbers in an exponent is a tower: 2^{3^4}; e^{x^2} is none.
    if _TOWER.search(exponent) or text[start + len(exponent):].lstrip()[:1] == "^":
        return MAX_POWER + 1
    return math.prod(max(1, int(digits)) for digits in _DIGITS.findall(exponent))


def _bracket(text: str, start: int) -> str:
    """Up to where the bracket at `start`, after spaces, closes; or all that is left."""
    depth = 0
    for at in range(start, len(text)):
        depth += _BRACKETS.get(text[at], 0)
        if depth <= 0 and not text[at].isspace():
            return text[start:at + 1]
    return text[start:]


@functools.lru_cache(maxsize=512)
def _parse(expression: str) -> list[Any]:
    """Sympy's form of an expression; empty if there is none."""
    # In plain spelling 1/2x is half of x here, as the \frac{1}{2}x is that it mostly comes from.
    latex = _FRACTION.sub(r"\\frac{\1}{\2}", expression)
    return math_verify.parse(f"${latex}$", _LATEX, fallback_mode="no_fallback",
                             parsing_timeout=None)


def _close(left: list[Any], right: list[Any]) -> bool:
    """Not 0.0 for 1e-9: decimals are compared to six places, which for small numbers is none."""
    pair = (left[0], right[0])
    if not all(isinstance(one, sympy.Expr) and not isinstance(one, sympy.MatrixExpr)
               and one.is_number for one in pair) or not any(
                   one.has(sympy.Float) for one in pair):
        return True
    values = [complex(sympy.N(one, 15)) for one in pair]
    return abs(values[0] - values[1]) <= 1e-5 * max(map(abs, values))


def _counter(budget: int) -> Profile:
    """Counts what is called, and raises once the budget is used up."""
    left = budget

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0 and frame.f_code.co_filename != __file__:  # not in `handle` below
            raise _OverBudget
    return count


def _rearming(count: Profile, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """`hook`, but where an exception is lost, as in a generator's end, the counting goes on."""
    def handle(lost: Any) -> None:
        if lost.exc_type is _OverBudget:
            sys.setprofile(count)  # an exception in it has ended it
        else:
            hook(lost)
    return handle
