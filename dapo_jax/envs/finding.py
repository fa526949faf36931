r"""Where in a text its final answer stands.

In this order: the last balanced box (boxes joined by nothing but commas, "and" or "or" are one
answer); the last "Answer:" line; the last "#### x"; the last "answer is x"; then whichever comes
last of a formula and a number. For a right answer that is an option's letter: the last letter in
brackets, or capital letter of its own, instead of formulas and numbers.
"""

import re

from dapo_jax.envs import normalise

TAIL = 20_000  # characters of a text that are looked at
MAX_FORMULA = 400  # characters of a formula without a box

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?+(?:[eE][-+]?\d{1,2}(?!\w))?+|\.\d++"
_VALUE = rf"(?:\d++ \d++/\d++|\d++/\d++|{_UNSIGNED})"
# A sign after a digit, letter or bracket is an operator: "10-3" ends in 3.
_NUMBER = re.compile(rf"(?<![\w.^])(?<![\^_]\{{)(?:(?<![\w)\]}}])[-+])?\$?{_VALUE}(?: ?%)?")
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*+\{)|\\\\(?!boxed|fbox)|\\[{}]|([{}])")
_JOINT = re.compile(r"(?:[\s,;.$&]|\\\\|\\[,;:!() ]|\\\[|\\\]|\\q?quad|\\text\s*\{[\s,]*(?:and|or)"
                    r"[\s,]*\}|\band\b|\bor\b)*+")
_ANSWER = re.compile(r"answer[ \t*]*+:[ \t*]*+(\S[^\n]*+)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*+(\S[^\n]*+)")
_SAID = re.compile(r"\banswer[ \t]++is:?[ \t*]++(\S[^\n]*+)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$\$|\$|\\\(|\\\)|\\\[|\\\]")
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}[ \n]++[A-Za-z]{2,}")
_TEXTS = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*+\{[^{}]*+\}")
_SENTENCE_END = re.compile(r"\.(?=\s+[A-Z\[(<]|\s*$)")
_MANY_WORDS = re.compile(r"(?:[A-Za-z][a-z']*[ ,]++){2}")
# "3 5", but neither the thousands of "3 500" nor the mixed number "3 1/2"
_SEVERAL = re.compile(r"(?!-?\d{1,3}(?: \d{3})+(?:\.\d+)?$)(?:-?[\d.,]+ )+(-?[\d.,]+)")
_LETTER = re.compile(r"(?:option|choice)?\s*+\(?([A-Z])(?![A-Za-z'^_=+*/-])\)?", re.IGNORECASE)
_LETTERS = re.compile(r"\(([A-Za-z])\)|(?<![\w'\\])([B-HJ-Z]|A(?=[.,;:)*\s]*$))(?![\w'])")


def answer(text: str, *, option: bool = False) -> str | None:
    """The final answer as it stands in the text, or None; `option`: it is an option's letter."""
    tail = text[-TAIL:]
    found = marked(tail)
    if found is None:
        found = _last_letter(tail) if option else _last_formula_or_number(tail)
    if found is None or not option:
        return found
    letter = _LETTER.match(normalise.normalise(found))
    return letter[1].upper() if letter else found


def marked(text: str) -> str | None:
    """What a box, an "Answer:" line, hashes or "answer is" hold, in this order; None if none."""
    if "boxed" in text or "fbox" in text:
        boxed = _last_boxes(text)
        if boxed is not None:
            return boxed
    for pattern in (_ANSWER, _HASHES, _SAID):
        found = pattern.findall(text)
        if found:
            return _core(found[-1])
    return None


def _last_boxes(text: str) -> str | None:
    """Content of the last box that is closed and not blank, and of those it is joined with."""
    opened: list[re.Match] = []
    boxes: list[tuple[int, int, str]] = []
    for brace in _BRACES.finditer(text):
        if brace[1] or brace[2] == "{":
            opened.append(brace)
        elif brace[2] and opened:
            start = opened.pop()
            content = text[start.end():brace.start()] if start[1] else ""
            if content.strip():
                boxes.append((start.start(), brace.end(), content))
    if not boxes:
        return None
    boxes.sort()
    joined = [boxes.pop()]
    while boxes and boxes[-1][1] <= joined[-1][0] and _JOINT.fullmatch(
            text, boxes[-1][1], joined[-1][0]):
        joined.append(boxes.pop())
    return ",".join(dict.fromkeys(content.strip() for _, _, content in reversed(joined)))


def _core(line: str) -> str:
    """The answer within a line that may be a sentence about it."""
    said = _SAID.search(line)
    line = said[1] if said else line
    ended = _SENTENCE_END.search(line)
    line = line[:ended.start()] if ended else line
    several = _SEVERAL.fullmatch(line.strip(" *$."))
    if several:
        return several[1]
    if not _MANY_WORDS.search(_TEXTS.sub("", line)):
        return line
    return _last_formula_or_number(line) or line


def _last_formula_or_number(text: str) -> str | None:
    formula = _last_formula(text)
    begin, content = formula if formula else (-1, None)
    simple = normalise.simplify(text[max(begin, 0):])
    numbers = _NUMBER.findall(simple)
    if content is None:
        return numbers[-1] if numbers else None
    inside = _NUMBER.findall(normalise.simplify(content))
    return content if len(numbers) <= len(inside) else numbers[-1]


def _last_formula(text: str) -> tuple[int, str] | None:
    """Start and content of the last formula in dollars or LaTeX brackets that is no prose."""
    marks = list(_DOLLARS.finditer(text))
    last, at = None, 0
    while at + 1 < len(marks):
        start, end = marks[at], marks[at + 1]
        content = text[start.end():end.start()]
        if _CLOSING.get(start[0]) == end[0] and _is_formula(content):
            last, at = (start.start(), content), at + 2
        else:
            at += 1
    return last


def _is_formula(content: str) -> bool:
    return (bool(content.strip()) and len(content) <= MAX_FORMULA
            and not _PROSE.search(_TEXTS.sub("", content)))


def _last_letter(text: str) -> str | None:
    found = _LETTERS.findall(text)
    return found[-1][0] or found[-1][1] if found else None
