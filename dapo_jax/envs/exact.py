r"""Whether two normalised answers are the same, as far as exact rules decide it.

- **Numbers** compare by exact value: whole numbers, decimals, a/b, mixed a b/c, 2.5e3, "5 million",
  2 \times 10^3. A decimal with at least six significant digits also equals a number that is no
  decimal (1/3) and rounds to it. `x%` equals x, and equals x/100 if the other writes no percent.
- **Units** are not compared: words after a number, and known abbreviations, are left out.
- **If the right answer is a number, the answer must be a number**, spelled by these rules or after
  the last "=": an expression still to be worked out (12+35 for 47) is not an answer.
- **Words** ("July 5", "Evelyn"), and letters of options, compare as text without regard to case.
- **Lists**: `[`, `(`, `]`, `)` must agree, and the parts in order; parts of `\{ \}` in any order. A
  list without brackets equals a set, or a tuple in the same order.
- All else is left to the caller.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.envs import normalise

MAX_DIGITS = 400  # characters of a number that is compared by value
MAX_PARTS = 64  # of a list that is compared part by part
MAX_DEPTH = 6  # lists in lists

Leaf = Callable[[str, str], bool]


class Number(NamedTuple):
    """An exact value and how it was written."""

    value: Fraction
    percent: bool
    digits: int  # significant digits of a decimal; 0 for what is none
    places: int  # after the point


class List(NamedTuple):
    """A bracketed or bare list, its parts normalised."""

    ends: str  # "()", "[)", "{}", ... or "" for a bare one
    parts: tuple[str, ...]


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_TIMES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
          "dozen": 12}
_UNITS = _set("""
    mm cm dm km in ft yd mi mg kg lb lbs oz ml cl dl kl ms min hr hrs kb mb gb tb hz khz mhz ghz kw
    kwh kj kn mv kv mph kmh kph cc sq deg rad pt qt gal usd eur gbp cad aud""")
_LETTERS = frozenset("mgshLlNJWVAKCF")  # units only with a space before
_NO_UNITS = _set("""
    am pm or and plus minus times over to mod squared cubed factorial pi tau phi theta alpha beta
    gamma delta lambda omega infinity inf sin cos tan log ln exp sqrt root not half halves third
    thirds quarter quarters""")
_UNSIGNED = r"\d++(?:\.\d++)?+(?:[eE][-+]?\d{1,2}(?!\w))?+"
_NUMBER = re.compile(
    rf"([-+]?) ?(?:(\d++) (\d++)/(\d++)|(\d++)/(\d++)|({_UNSIGNED}))"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?(?:\{([-+]?\d{1,3})\}|(\d{1,3})))?"
    r"(?: ?(%|percent(?:age)?(?![a-z])|pct(?![a-z])))?([^\n]*+)")
_POWER = re.compile(r"([-+]?) ?10 ?\^ ?(?:\{([-+]?\d{1,3})\}|(\d{1,3}))")
_ZERO = re.compile(r"[-+]? ?(?:\d++ )?\d++/0++")
_UNIT = re.compile(r"( ?/)?( ?)([^\W\d_]++)\.?(?: ?\^(?:\d|\{-?\d\}))?")
_EQUALS = re.compile(r"(?<![<>!:])=|\\equiv(?![a-z])")
_ABOUT = re.compile(r"\\(?:approx|simeq)(?![a-z])")
_NEEDLESS = re.compile(r"(?<!\w)\s++|\s++(?!\w)")
_PROSE = re.compile(r"[\w .:,'\u2019-]++")
_WORDS = re.compile(r"[^\W\d_]++")
_FUNCTIONS = _set("""
    sin cos tan cot sec csc log exp sqrt inf infinity theta alpha beta phi lambda omega gamma delta
    arcsin arccos arctan max min""")


def same(found: str, wanted: str, leaf: Leaf, *, depth: int = 0) -> bool:
    """Whether normalised `found` is the right answer `wanted`; `leaf` decides what rules do not."""
    target = number(wanted)
    if target is not None:
        value = number(found) or _last_number(found)
        return value is not None and equal(value, target)
    if _squeezed(found) == _squeezed(wanted):
        return True
    if len(wanted) == 1 and "A" <= wanted <= "Z":  # an option
        return found.upper() == wanted
    if is_prose(wanted) or is_prose(found):
        return _squeezed(found).casefold() == _squeezed(wanted).casefold()
    right, left = listed(wanted), listed(found)
    if right is None or left is None or depth == MAX_DEPTH:
        return leaf(found, wanted)
    if len(left.parts) != len(right.parts):
        counted = all(number(part) for part in left.parts + right.parts)
        return not counted and leaf(found, wanted)
    return _same_lists(left, right, leaf, depth=depth)


def number(plain: str) -> Number | None:
    """The number that a normalised answer is, its unit left out; None for all else, and for x/0."""
    if len(plain) > MAX_DIGITS:
        return None
    power = _POWER.fullmatch(plain)
    if power:
        value = Fraction(10) ** int(power[2] or power[3])
        return Number(-value if power[1] == "-" else value, False, 0, 0)
    match = _NUMBER.fullmatch(plain)
    factor = _unit(match[11]) if match else None
    return None if match is None or factor is None else _number(match, factor)


def is_prose(plain: str) -> bool:
    """Whether an answer is words, numbers among them or not: "July 5", but not "2 sin x"."""
    if not _PROSE.fullmatch(plain):
        return False
    words = [word.lower() for word in _WORDS.findall(plain)]
    worded = any(len(word) > 2 or word in ("am", "pm") for word in words)
    return worded and _FUNCTIONS.isdisjoint(words)


def equal(found: Number, wanted: Number) -> bool:
    """By value, by rounding of a long decimal, or by percent."""
    if _rounds(found, wanted) or _rounds(wanted, found):
        return True
    if found.percent == wanted.percent:
        return found.value == wanted.value
    ratio = 100 if wanted.percent else Fraction(1, 100)
    return found.value in (wanted.value, wanted.value / ratio)


def divides_by_zero(plain: str) -> bool:
    """Whether a normalised answer is a fraction over 0."""
    return bool(_ZERO.fullmatch(plain))


def listed(plain: str) -> List | None:
    """The parts of a list, by its commas outside of brackets; None if it is none."""
    ends, inner = "", plain
    if plain.startswith("\\{") and plain.endswith("\\}"):
        ends, inner = "{}", plain[2:-2]
    elif plain[:1] in ("(", "[") and plain[-1:] in (")", "]"):
        ends, inner = plain[0] + plain[-1], plain[1:-1]
    parts = _split(inner)
    if parts is None and ends:
        ends, parts = "", _split(plain)  # "(1,2),(3,4)" is a bare list of pairs
    if parts is None or len(parts) > MAX_PARTS or (len(parts) < 2 and ends != "{}"):
        return None
    return List(ends, tuple(parts))


def _last_number(plain: str) -> Number | None:
    """After the last "="; there, of "exact \\approx rounded", the first that is a number."""
    for part in _ABOUT.split(_EQUALS.split(plain)[-1], maxsplit=1):
        value = number(normalise.spell(part.strip()))
        if value is not None:
            return value
    return None


def _number(match: re.Match, factor: int) -> Number | None:
    try:
        if match[2]:
            value = int(match[2]) + Fraction(int(match[3]), int(match[4]))
        elif match[5]:
            value = Fraction(int(match[5]), int(match[6]))
        else:
            value = Fraction(match[7])
    except ZeroDivisionError:
        return None
    value *= factor * Fraction(10) ** int(match[8] or match[9] or 0)
    decimal = match[7] if match[7] and "." in match[7] and "e" not in match[7].lower() else ""
    places = len(decimal.partition(".")[2]) if not (match[8] or match[9]) else 0
    digits = len(decimal.replace(".", "").lstrip("0")) if places else 0
    return Number(-value if match[1] == "-" else value, bool(match[10]), digits, places)


def _unit(rest: str) -> int | None:
    """What a number is multiplied by for the words after it; None if they are no unit."""
    factor, at = 1, 0
    while at < len(rest):
        match = _UNIT.match(rest, at)
        if not match or (match[1] and at == 0):
            return None
        word = match[3]
        if word in _TIMES and at == 0:
            factor = _TIMES[word]
        elif not _is_unit(word, spaced=bool(match[2]), first=at == 0):
            return None
        at = match.end()
    return factor


def _is_unit(word: str, *, spaced: bool, first: bool) -> bool:
    if not first:
        return word.lower() not in _NO_UNITS
    if len(word) == 1:
        return spaced and word in _LETTERS
    return word.lower() in _UNITS or (spaced and word.lower() not in _NO_UNITS)


def _rounds(decimal: Number, other: Number) -> bool:
    """Whether `decimal` is `other`, which is written as none, to its last digit."""
    if decimal.digits < 6 or other.places or decimal.percent != other.percent:
        return False
    return abs(decimal.value - other.value) * 2 * 10**decimal.places <= 1


def _same_lists(left: List, right: List, leaf: Leaf, *, depth: int) -> bool:
    bare = not left.ends or not right.ends
    if not bare and left.ends != right.ends:
        return False
    unordered = {left.ends, right.ends} <= {"{}", ""}
    # A bare list stands for a tuple, but not for an interval.
    if bare and not unordered and (left.ends or right.ends) != "()":
        return False
    if not unordered:
        return all(same(a, b, leaf, depth=depth + 1)
                   for a, b in zip(left.parts, right.parts, strict=True))
    return _same_sets(list(left.parts), right.parts, leaf, depth=depth)


def _same_sets(rest: list[str], wanted: tuple[str, ...], leaf: Leaf, *, depth: int) -> bool:
    for part in wanted:
        # Equal spelling first: it decides most parts without asking `leaf`.
        order = sorted(range(len(rest)), key=lambda at: rest[at] != part)
        at = next((at for at in order if same(rest[at], part, leaf, depth=depth + 1)), None)
        if at is None:
            return False
        del rest[at]
    return True


def _split(inner: str) -> list[str] | None:
    """Parts between the commas outside of brackets; None if brackets do not match or one is empty.

    Brackets of any kind may close each other, as those of an interval do.
    """
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character == "," and depth == 0:
            parts.append(inner[start:at])
            start = at + 1
    parts.append(inner[start:])
    spelled = [normalise.normalise(part) for part in parts]
    return spelled if depth == 0 and all(spelled) else None


def _squeezed(answer: str) -> str:
    return _NEEDLESS.sub("", answer)
