r"""One spelling of an answer.

The rules, in order:

1. Unicode signs become ASCII or LaTeX: minus and dashes, times, degrees, fractions of a slash,
   infinity, pi, comparisons, unions.
2. What only dresses goes: `$`, `\(`, `\[`, `**`, `\left`, `\text{...}` around a text, spacing
   commands, degrees, a closing full stop, braces, and round brackets without a comma, around the
   whole.
3. `\dfrac`, `\tfrac` and `\cfrac` are `\frac`; fractions of whole numbers are a/b; `\frac12` is
   1/2; `3\frac{1}{2}` is the mixed number 3 1/2.
4. `(E)` is E.
5. "or", "and" and ";" between the parts of a list are commas.
6. A name before an answer without variables goes: `x =`, `f(x) =`, `(p,q) =`, `|AB| =`, `x \in`.
   Of a chain of numbers the last counts: 3 + 4 = 7 is 7.
7. A number has no thousands commas, no plus, no needless zeros: 007, 1,000.50 and .5 become 7,
   1000.5 and 0.5. Thousands may be set off by `,`, `{,}`, `,\!`, or by single spaces.
"""

import re

MAX_WRAPPERS = 4  # pairs of brackets around the whole that are taken off

_SIGNS = str.maketrans({
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\uff0d": "-",
    "\u00d7": r"\times ", "\u22c5": r"\cdot ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u2044": "/",
    "\u00b0": "", "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\uff05": "%", "\u00b1": r"\pm ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\uff0c": ",",
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
    "\u00b2": "^2", "\u00b3": "^3", "\u20ac": "$", "\u00a3": "$"})
_PLAIN_WORD = re.compile(r"[ \w]*+")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)\s*+"
    r"\{([^{}]*+)\}")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRACTION = re.compile(r"\\frac\s*+\{\s*+(-?)(\d++)\s*+\}\s*+\{\s*+(\d++)\s*+\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*+(?:(\d)\s*+(?:(\d)|\{(\d++)\})|\{(\d++)\}\s*+(\d))")
_MIXED = re.compile(r"(?<=\d)\s*+\\frac")
_SET_OFF = re.compile(r"(?<=\d)\s*+(?:\{, ?\}|,\\!)\s*+(?=\d)")
_ESCAPED_TWICE = re.compile(
    r"(?<!\\)\\\\(?=(?:left|right|[dtc]?frac|sqrt|text|pi|infty|cup|cdot|times|leq?|geq?|boxed)"
    r"(?![a-z]))")
_NOTHING = re.compile(r"(?<!\\)\\(?:[!()\[\]]|(?:left|right|displaystyle|degrees?)(?![a-z]))"
                      r"|\$|\*\*|\^\{?\\circ\}?")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad)|~|[^\S\n]")
_RUNS = re.compile(r" {2,}")
_NAME = r"(?:\\angle ?)?[A-Za-z]{1,12}(?:_(?:\w|\{[^{}]{1,8}\}))?(?:\([A-Za-z]\))?"
_NAMED = re.compile(rf"(?:{_NAME}(?: ?: ?{_NAME})?|\( ?{_NAME}(?: ?, ?{_NAME}){{1,5}} ?\)"
                    rf"|\| ?{_NAME} ?\||\\frac\{{{_NAME}\}}\{{{_NAME}\}})"
                    r" ?(?:=|\\in(?![a-z])) ?(?=\S)")
_COMMANDS = re.compile(r"\\[A-Za-z]++")
_VARIABLE = re.compile(r"[A-Za-z]")
_LAST_EQUALS = re.compile(r"(?s:.*)(?<![<>!:])= ?(?=\S)")
_JOINTS = re.compile(r" ?, ?(?:or|and)(?![a-z]) ?| (?:or|and) | ?; ?"
                     r"|(?<=[)\]}\d]) ?(?:or|and) ?(?=[(\[\\\d-])")
_WRAPPED = {"{": "}", "(": ")"}
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_NUMBER = re.compile(r"([-+]?) ?(\d{1,3}(?:,\d{3})++(?!\d)|\d{1,3}(?: \d{3})++(?![\d/])|\d++)?+"
                     r"(\.\d*+)?+(?![\d.,])")


def simplify(text: str) -> str:
    """A text or answer with rules 1 to 3 applied, its lines kept."""
    text = text.translate(_SIGNS)
    if "\\" in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
        text = _SET_OFF.sub(",", text.replace(r"\$", "").replace(r"\%", "%"))
        text = _WORDS.sub(_undressed, text)
        if "frac" in text:
            text = _MIXED.sub(r" \\frac", _FRACTIONS.sub(r"\\frac", text))
            text = _SHORT_FRACTION.sub(_short, _FRACTION.sub(r"\1\2/\3", text))
    elif "{,}" in text:
        text = _SET_OFF.sub(",", text)
    return _RUNS.sub(" ", _SPACES.sub(" ", _NOTHING.sub("", text)))


def normalise(answer: str) -> str:
    """The answer by all the rules above."""
    plain = simplify(answer).strip().rstrip(".").strip()
    for _ in range(MAX_WRAPPERS):
        if plain[:1] in _WRAPPED and _wrapped(plain):
            plain = plain[1:-1].strip()
    choice = _CHOICE.fullmatch(plain)
    if choice:
        return choice[1]
    plain = _unnamed(_JOINTS.sub(",", plain)) if len(plain) > 2 else plain
    return spell(plain)


def spell(plain: str) -> str:
    """Rule 7 for a number at the start of an answer; other text unchanged."""
    match = _NUMBER.match(plain)
    if not match or not (match[2] or (match[3] and len(match[3]) > 1)):
        return plain
    whole = (match[2] or "0").replace(",", "").replace(" ", "").lstrip("0") or "0"
    after, rest = (match[3] or "").rstrip("0").rstrip("."), plain[match.end():]
    sign = "-" if match[1] == "-" and (whole + after != "0" or rest[:1] not in ("", " ")) else ""
    return sign + whole + after + rest


def _undressed(match: re.Match) -> str:
    # A word next to a number must not grow together with it: 5\text{cm} is "5 cm".
    inner = match[1].strip()
    return f" {inner} " if _PLAIN_WORD.fullmatch(inner) and len(inner) > 1 else match[1]


def _short(match: re.Match) -> str:
    return f"{match[1] or match[4]}/{match[2] or match[3] or match[5]}"


def _unnamed(plain: str) -> str:
    """What comes after a name and "=", and after the last "=" of numbers alone."""
    named = _NAMED.match(plain)
    rest = plain[named.end():] if named else plain
    if _VARIABLE.search(_COMMANDS.sub("", rest)):
        return plain  # an equation: y = 2x + 1
    chained = _LAST_EQUALS.match(rest)
    return rest[chained.end():] if chained else rest


def _wrapped(text: str) -> bool:
    """Whether one pair of brackets holds the whole text, and no list if they are round."""
    depth, (opening, closing) = 0, (text[0], _WRAPPED[text[0]])
    if text[-1] != closing or (opening == "(" and ("," in text or ";" in text)):
        return False
    for character in text[:-1]:
        depth += (character == opening) - (character == closing)
        if depth == 0:
            return False
    return True
