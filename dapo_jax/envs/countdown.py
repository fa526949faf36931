"""Countdown: reach a target from given numbers with + - * /, each number used at most once.

Settings (config.task.options, pairs of name and value): numbers (fewest, most), largest (of a
number), target (least, most), operators, short (a prompt for small models: "3 5 8=23 ").
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.envs import base, options, templates

LONGEST = 400  # characters of an expression that is parsed
DEEPEST = 20  # brackets inside each other
DRAWS = 50  # per problem that is wanted, before the split counts as used up

APPLY = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__,
         "/": Fraction.__truediv__}
SPLITS = ("train", "eval")
_SIGNS = str.maketrans("×·−÷", "**-/")
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""),
          ("$", ""))
_TOKEN = re.compile(r"\s*(?:([0-9]{1,18})(?!\d)|([-+*/()]))")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What problems are drawn; ranges are inclusive."""

    numbers: tuple = (3, 4)
    largest: int = 20
    target: tuple = (1, 100)
    operators: str = "+-*/"
    short: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """Numbers in the order shown, and one way to the target."""

    numbers: tuple[int, ...]
    target: int
    solution: str


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split` and how many fewer there are than the configuration asks for.

    A fifth of all problems, by a hash of numbers and target, belongs to "eval" whatever the seed.
    """
    settings = options.read(Settings, cfg.task.options, where="the task countdown")
    _check(settings)
    count = cfg.task.train_size if split == "train" else cfg.eval.prompts
    found = _draw(settings, seed=cfg.seed, split=split, count=count + cfg.task.shots)
    shots, rest = found[:cfg.task.shots], found[cfg.task.shots:]
    if split == "eval":
        shots, rest = _draw(settings, seed=cfg.seed, split="train", count=cfg.task.shots), found
    records = [_record(cfg.task, problem, shots, short=settings.short) for problem in rest[:count]]
    return records, {"missing": count - len(records)}


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the text's final answer is an expression that uses only the record's `numbers`, each
    at most once, and has the value `target`; else 0.0. Exact, and nothing is evaluated as code."""
    try:
        value, used = evaluate(extract(text, record))
    except ValueError:
        return 0.0
    allowed = not Counter(used) - Counter(record["numbers"])
    return float(allowed and value == record["target"])


def extract(text: str, record: Mapping[str, Any]) -> str:
    """The expression: the final answer's first line, without "= target" at its end."""
    answer = templates.final_answer(text).split("\n", 1)[0]
    for sign, plain in _LATEX:
        answer = answer.replace(sign, plain)
    left, equals, right = answer.translate(_SIGNS).partition("=")
    return left.strip() if not equals or right.strip() == str(record["target"]) else answer.strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Value of an expression of whole numbers, + - * / and brackets, and the numbers in it.

    Signs before a number are no operators here. ValueError: another text, a division by 0, over
    `LONGEST` characters or `DEEPEST` brackets.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters")
    tokens = _tokens(expression)
    try:
        value = _sum(tokens, 0)
    except (ZeroDivisionError, IndexError) as error:
        raise ValueError(f"{expression!r} has no value") from error
    if tokens != ["end"]:
        raise ValueError(f"{expression!r} goes on where it should end")
    return value, [int(number) for number in re.findall(r"\d+", expression)]


def _tokens(expression: str) -> list[str]:
    """Tokens in reverse, so that the next one is popped; "end" comes last."""
    found, place = [], 0
    expression = expression.rstrip()
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"{expression[place:place + 10]!r} is no number, sign or bracket")
        found.append(match[1] or match[2])
        place = match.end()
    return ["end", *found[::-1]]


def _sum(tokens: list[str], depth: int) -> Fraction:
    value = _product(tokens, depth)
    while tokens[-1] in ("+", "-"):
        value = APPLY[tokens.pop()](value, _product(tokens, depth))
    return value


def _product(tokens: list[str], depth: int) -> Fraction:
    value = _atom(tokens, depth)
    while tokens[-1] in ("*", "/"):
        value = APPLY[tokens.pop()](value, _atom(tokens, depth))
    return value


def _atom(tokens: list[str], depth: int) -> Fraction:
    token = tokens.pop()
    if token.isdigit():
        return Fraction(int(token))
    if token != "(" or depth == DEEPEST:
        raise ValueError(f"{token!r} where a number should stand")
    value = _sum(tokens, depth + 1)
    if tokens.pop() != ")":
        raise ValueError("a bracket is not closed")
    return value


def _check(settings: Settings) -> None:
    for name, (least, limit) in {"numbers": (2, 8), "target": (0, 10**6)}.items():
        pair = getattr(settings, name)
        if not (len(pair) == 2 and all(isinstance(end, int) for end in pair)
                and least <= pair[0] <= pair[1] <= limit):
            raise config.ConfigError(f"config.task.options: {name} = {pair!r} must be (fewest, "
                                     f"most) whole numbers from {least} to {limit}")
    if not 1 <= settings.largest <= 10**6:
        raise config.ConfigError(f"config.task.options: largest = {settings.largest} must lie in "
                                 "1..1000000")
    if not settings.operators or set(settings.operators) - set(APPLY):
        raise config.ConfigError(f"config.task.options: operators = {settings.operators!r}: name "
                                 f"at least one of {''.join(APPLY)!r} and nothing else")


def _draw(settings: Settings, *, seed: int, split: str, count: int) -> list[Problem]:
    """Up to `count` different problems of the split, in a seeded order."""
    rng = np.random.default_rng([seed, SPLITS.index(split), 7])
    found: dict[str, Problem] = {}
    for _ in range(DRAWS * (count + 20)):
        if len(found) >= count:
            break
        problem = _problem(settings, rng)
        if problem is not None and base.held_out(_key(problem)) == (split == "eval"):
            found.setdefault(_key(problem), problem)
    return list(found.values())


def _problem(settings: Settings, rng: np.random.Generator) -> Problem | None:
    """Numbers joined at random; None where that leaves whole numbers or the target's range."""
    size = int(rng.integers(settings.numbers[0], settings.numbers[1] + 1))
    numbers = rng.integers(1, settings.largest + 1, size).tolist()
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        right, left = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
        sign = settings.operators[int(rng.integers(len(settings.operators)))]
        if sign == "/" and not right[0]:
            return None
        value = APPLY[sign](left[0], right[0])
        if value.denominator > 1 or value < 0:
            return None
        parts.append((value, f"({left[1]}{sign}{right[1]})"))
    value, text = parts[0]
    least, most = settings.target
    return Problem(tuple(numbers), int(value), text[1:-1]) if least <= value <= most else None


def _key(problem: Problem) -> str:
    """One text for a problem, whatever the order of its numbers."""
    return f"{sorted(problem.numbers)}={problem.target}"


def _record(task: config.Task, problem: Problem, shots: list[Problem], *, short: bool
            ) -> base.Record:
    solved = [(_question(shot, short), shot.solution) for shot in shots]
    return {"prompt": templates.few_shot(task.template, solved, _question(problem, short)),
            "answer": problem.solution, "numbers": problem.numbers, "target": problem.target,
            "demonstration": templates.answered(task.template, problem.solution),
            "level": str(len(problem.numbers))}


def _question(problem: Problem, short: bool) -> str:
    if short:
        return f"{' '.join(map(str, problem.numbers))}={problem.target}"
    return (f"Use the numbers {', '.join(map(str, problem.numbers))} to make {problem.target}. Use "
            "each number at most once, and only + - * / and brackets. Give the expression.")


TASK = base.Task(
    "countdown", build, "dapo_jax.envs.countdown:score", "dapo_jax.envs.countdown:extract",
    purpose="reach a target from given numbers; any right expression counts")
