"""Exact arithmetic of a short expression: integers and fractions, every size bounded.

Walks the syntax tree, so nothing of the text is ever run. No number may grow beyond MOST_DIGITS
digits in numerator or denominator, and a power is refused before it is computed, hence a time bound
of well below a millisecond for each of at most LONGEST characters.
"""

import ast
import fractions
import math
import operator
import warnings
from collections.abc import Callable

LONGEST = 256  # characters
MOST_DIGITS = 256
MOST_DEPTH = 64  # of nesting
_MOST = 10**MOST_DIGITS

Number = fractions.Fraction


class NoValue(ValueError):
    """The expression has no value, or one beyond the bounds; the message says which."""


def value(text: str) -> Number:
    """The exact value of + - * / // % ** and brackets over numbers such as 12 or 0.25.

    NoValue for anything else.
    """
    if len(text) > LONGEST:
        raise NoValue(f"more than {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a text such as "1(2)"
            tree = ast.parse(text.strip(), mode="eval")
        return _walk(tree.body, text.strip(), MOST_DEPTH)
    except (SyntaxError, RecursionError, MemoryError):
        raise NoValue("not an expression") from None
    except ZeroDivisionError:
        raise NoValue("division by zero") from None
    except NoValue:
        raise
    except ValueError as error:  # of the parser: too many digits, a null byte
        raise NoValue("not an expression") from error


def shown(number: Number) -> str:
    """An integer, or p/q in lowest terms."""
    return str(number)


def _walk(node: ast.expr, text: str, depth: int) -> Number:
    if not depth:
        raise NoValue(f"nested deeper than {MOST_DEPTH}")
    if isinstance(node, ast.Constant):
        return _bounded(_constant(node, text))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_walk(node.operand, text, depth - 1))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = (_walk(side, text, depth - 1) for side in (node.left, node.right))
        return _bounded(OPERATORS[type(node.op)](left, right))
    raise NoValue(f"{type(node).__name__} is not arithmetic")


def _constant(node: ast.Constant, text: str) -> Number:
    if type(node.value) not in (int, float):
        raise NoValue(f"{type(node.value).__name__} is no number")
    if isinstance(node.value, int):
        return Number(node.value)
    # As it is written: 0.1 is a tenth. An exponent could be huge.
    written = ast.get_source_segment(text, node) or ""
    if not written.replace(".", "", 1).isascii() or not written.replace(".", "", 1).isdigit():
        raise NoValue("write a decimal number without an exponent")
    return Number(written)


def _bounded(number: Number) -> Number:
    if abs(number.numerator) >= _MOST or number.denominator >= _MOST:
        raise NoValue(f"more than {MOST_DIGITS} digits")
    return number


def _power(left: Number, right: Number) -> Number:
    if right.denominator != 1:
        raise NoValue("a power must be an integer")
    size = max(abs(left.numerator), left.denominator)
    if size > 1 and abs(right.numerator) * math.log10(size) > MOST_DIGITS + 1:
        raise NoValue(f"more than {MOST_DIGITS} digits")
    if not left:
        return left ** max(-1, min(1, right.numerator))
    if size == 1:  # an exponent of any size
        return left ** (right.numerator % 2)
    return Number(left ** right.numerator)


def _whole(function: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    return lambda left, right: Number(function(left, right))


SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: _whole(operator.floordiv),
             ast.Mod: operator.mod, ast.Pow: _power}
