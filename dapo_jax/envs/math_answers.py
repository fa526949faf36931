r"""The final answer of a worked solution, and whether it equals the right one.

Usable from any thread: nothing here needs a time limit, because texts are cut to their last
`TAIL` characters, every pattern is linear, and numbers over `MAX_DIGITS` compare as text.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

TAIL = 20_000  # characters of a text that are looked at
MAX_DIGITS = 400  # characters of a number that is compared by value

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?+(?:[eE][-+]?\d{1,2}(?!\w))?+|\.\d++"
_VALUE = rf"(?:\d++ \d++/\d++|\d++/\d++|{_UNSIGNED})"
# A sign after a digit, letter or bracket is an operator: "10-3" ends in 3.
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![\w)\]}}])[-+])?\$?{_VALUE}")
_WHOLE = re.compile(rf"([-+]?) ?({_VALUE})")
_WITH_UNIT = re.compile(rf"([-+]? ?{_VALUE})(?: ?[^\W\d]++)++")
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*+\{)|\\\\(?!boxed|fbox)|\\[{}]|([{}])")
_ANSWER = re.compile(r"answer[ \t*]*+:[ \t*]*+(\S[^\n]*+)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*+(\S[^\n]*+)")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*+\{([^{}]*+)\}")
_FRACTION = re.compile(r"\\frac\s*+\{\s*+(-?)(\d++)\s*+\}\s*+\{\s*+(\d++)\s*+\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*+(\d)\s*+(\d)")
_SPACING = re.compile(r"\\[,;!: ]|\\left\b|\\right\b|~")
_DEGREES = re.compile(r"\^\{?\\circ\}?")
_ASSIGNED = re.compile(r"[A-Za-z] ?= ?(?=\S)")
_CHOICE = re.compile(r"\(([A-Za-z])\)")


def extract(text: str) -> str | None:
    r"""The answer a text ends in, normalised; None if there is none.

    The last balanced `\boxed{}` or `\fbox{}`, else the last "Answer:" line, else the last
    "#### x", else the last number.
    """
    tail = text[-TAIL:]
    found = _marked(tail)
    if found is None:
        numbers = _NUMBER.findall(_simplify(tail))
        found = numbers[-1] if numbers else None
    return None if found is None else normalise(found)


def score(text: str, gold: str) -> float:
    r"""1.0 if the answer `text` ends in equals `gold`, else 0.0.

    Equal by value if both are numbers, else by normalised text. `gold` may itself be a worked
    solution with a `\boxed{}`, "Answer:" or "####". ValueError if it holds no answer.
    """
    if not isinstance(gold, str):
        raise ValueError(f"the right answer {gold!r} is a {type(gold).__name__}, not a text")
    marked = _marked(gold[-TAIL:])
    wanted = normalise(gold if marked is None else marked)
    if not wanted:
        raise ValueError(f"the right answer {gold!r} is empty")
    found = extract(text)
    return float(found is not None and _same(found, wanted))


def last_number(text: str, record: Mapping[str, Any]) -> float:
    """The reward of question-and-answer data: `score`, or the very text of the answer."""
    return float(text.strip() == record["answer"].strip()) or score(text, record["answer"])


def normalise(answer: str) -> str:
    """One spelling of an answer: no markup, units of money, trailing full stop or zeros."""
    plain = _simplify(answer).replace("$", "").replace("**", "").strip().rstrip(".").strip()
    plain = _ASSIGNED.sub("", plain) if _ASSIGNED.match(plain) else plain
    choice = _CHOICE.fullmatch(plain)
    return choice[1] if choice else _spell(plain)


def _marked(text: str) -> str | None:
    """What a box, an "Answer:" line or hashes hold."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    for pattern in (_ANSWER, _HASHES):
        found = pattern.findall(text)
        if found:
            return found[-1]
    return None


def _last_box(text: str) -> str | None:
    """Content of the box that starts last, of those that are closed and not blank."""
    opened: list[re.Match] = []
    best: tuple[int, str] | None = None
    for brace in _BRACES.finditer(text):
        if brace[1] or brace[2] == "{":
            opened.append(brace)
        elif brace[2] and opened:
            start = opened.pop()
            content = text[start.end():brace.start()] if start[1] else ""
            if content.strip() and (best is None or start.start() > best[0]):
                best = (start.start(), content)
    return best[1] if best else None


def _simplify(text: str) -> str:
    """LaTeX that only dresses an answer taken off; fractions as a/b."""
    text = text.replace("\u2212", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\$", "$").replace("\\%", "").replace("%", "")
    text = _DEGREES.sub("", _SPACING.sub(" ", _WORDS.sub(r"\1", text)))
    # "3\frac{1}{2}" is a mixed number, not 31/2.
    text = re.sub(r"(?<=\d)\\frac", r" \\frac", text)
    text = _SHORT_FRACTION.sub(r"\1/\2", _FRACTION.sub(r"\1\2/\3", text))
    return re.sub(r"[^\S\n]+", " ", text)


def _spell(plain: str) -> str:
    """A number without thousands commas, needless zeros and plus; other text unchanged."""
    match = _WHOLE.fullmatch(plain)
    if not match:
        return plain
    sign, digits = match[1].replace("+", ""), match[2].replace(",", "")
    if "." in digits and "e" not in digits.lower():
        digits = digits.rstrip("0").rstrip(".")
    digits = re.sub(r"^0+(?=\d)", "", digits)
    digits = "0" + digits if digits.startswith(".") else digits or "0"
    return digits if digits == "0" else sign + digits


def _same(found: str, wanted: str) -> bool:
    target = _value(wanted)
    if target is not None:
        with_unit = _WITH_UNIT.fullmatch(found)
        value = _value(_spell(with_unit[1]) if with_unit else found)
        return value == target
    return _letters(found) == _letters(wanted)


def _letters(answer: str) -> str:
    return "".join(answer.split()).casefold()


def _value(spelled: str) -> Fraction | None:
    """The exact value of a spelled number; None for other text, too many digits, or x/0."""
    match = _WHOLE.fullmatch(spelled)
    if not match or len(spelled) > MAX_DIGITS:
        return None
    try:
        value = sum(Fraction(part) for part in match[2].split(" "))
    except ZeroDivisionError:
        return None
    return -value if match[1] == "-" else value
