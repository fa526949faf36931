"""Procedural arithmetic: seeded problems with an exact answer, a fifth of them held out."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.envs import base

Problem = tuple[int, str, int]  # left operand, operator, right operand
Digits = int | tuple[int, int]  # of both operands, or of the left and the right one

APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
SPLITS = ("train", "eval")
LISTED = 2**22  # problems of a level that are permuted; of more, repeats are drawn again
MAX_DIGITS = 18  # operands are drawn as int64
SHOT_POOL = 256  # training problems from which shots are drawn


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split` and how many fewer there are than the configuration asks for."""
    count = cfg.task.train_size if split == "train" else cfg.eval.prompts
    found = records(cfg.task, seed=cfg.seed, split=split, count=count)
    return found, {"missing": count - len(found)}


def records(task: config.Task, *, seed: int, split: str, count: int) -> list[base.Record]:
    """`count` distinct problems in a seeded order, their levels mixed by share.

    A level with too few problems gives all of them and leaves the rest to the others; if all
    levels run out, fewer records are returned. A fifth of all problems belongs to "eval", the
    rest to "train", whatever the seed; a commuted problem is on the side of its twin.
    """
    drawn = problems(task, seed=seed, split=split, count=count)
    pool = _shot_pool(task, seed=seed) if task.shots else []
    return [_record(task, problem, shots=_shots(pool, problem, count=task.shots, seed=seed))
            for problem in drawn]


def problems(task: config.Task, *, seed: int, split: str, count: int) -> list[Problem]:
    """The problems that `records` are made of; ConfigError for levels or operators that none
    have."""
    _check(task, split)
    return _draw(task, seed=seed, split=split, count=count)


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the first line of `text`, stripped, is the answer, else 0.0."""
    return float(extract(text, record) == record["answer"])


def extract(text: str, record: Mapping[str, Any]) -> str:
    """The first line, stripped."""
    return text.split("\n", 1)[0].strip()


def _check(task: config.Task, split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {SPLITS}")
    unknown = set(task.operators) - set(APPLY)
    if unknown or not task.operators:
        raise config.ConfigError(f"config.task.operators = {task.operators!r}: name at least one "
                                 f"of {''.join(APPLY)!r} and nothing else")
    sizes = {_pair(level[0]) for level in task.levels if _is_level(level)}
    if not sizes or len(sizes) < len(task.levels):
        raise config.ConfigError(
            f"config.task.levels = {task.levels!r} must be (digits, share) pairs: different "
            f"digits in 1..{MAX_DIGITS} or pairs of them (left, right), shares above 0")
    if not 0 <= task.shots <= SHOT_POOL // 8:
        raise config.ConfigError(
            f"config.task.shots = {task.shots} must lie in 0..{SHOT_POOL // 8}")


def _is_level(level: tuple) -> bool:
    if not (isinstance(level, tuple) and len(level) == 2 and isinstance(level[1], (int, float))):
        return False
    sizes = _pair(level[0])
    return (len(sizes) == 2 and 0 < level[1] < math.inf
            and all(isinstance(size, int) and 1 <= size <= MAX_DIGITS for size in sizes))


def _pair(digits: Digits) -> tuple[int, ...]:
    return tuple(digits) if isinstance(digits, (tuple, list)) else (digits, digits)


def _draw(task: config.Task, *, seed: int, split: str, count: int) -> list[Problem]:
    """Up to `count` distinct problems of the split, shuffled over the levels."""
    shares = {_pair(digits): share for digits, share in task.levels}
    streams = {digits: _stream(digits, task.operators, seed=seed, split=split)
               for digits in shares}
    found: list[Problem] = []
    while streams and len(found) < count:
        wanted = _apportion(count - len(found), [shares[digits] for digits in streams])
        for digits, number in zip(list(streams), wanted, strict=True):
            taken = list(itertools.islice(streams[digits], number))
            found += taken
            if len(taken) < number:
                del streams[digits]
    order = np.random.default_rng([seed, SPLITS.index(split)]).permutation(len(found))
    return [found[i] for i in order]


def _apportion(count: int, shares: list[float]) -> list[int]:
    """`count` divided by shares, rounded so that the sum is exact."""
    ends = np.rint(np.cumsum(shares) / np.sum(shares) * count).astype(int)
    return np.diff(ends, prepend=0).tolist()


def _stream(digits: tuple[int, ...], operators: str, *, seed: int, split: str
            ) -> Iterator[Problem]:
    """All problems of one level and split, each once, in a seeded order."""
    lows = [10 ** (count - 1) if count > 1 else 0 for count in digits]
    widths = [10**count - low for count, low in zip(digits, lows, strict=True)]
    rng = np.random.default_rng([seed, SPLITS.index(split), *digits])
    for left, kind, right in _cells(rng, widths[0], len(operators), widths[1]):
        problem = (lows[0] + left, operators[kind], lows[1] + right)
        if base.held_out(_key(problem)) == (split == "eval"):
            yield problem


def _cells(rng: np.random.Generator, rows: int, kinds: int, columns: int
           ) -> Iterator[tuple[int, int, int]]:
    """Distinct cells of a [rows, kinds, columns] grid in random order, endless for a huge grid."""
    if rows * kinds * columns <= LISTED:
        for cell in rng.permutation(rows * kinds * columns).tolist():
            yield cell // columns // kinds, cell // columns % kinds, cell % columns
        return
    seen = set()
    while True:
        cell = (int(rng.integers(rows)), int(rng.integers(kinds)), int(rng.integers(columns)))
        if cell not in seen:
            seen.add(cell)
            yield cell


def _key(problem: Problem) -> str:
    """One text for a problem and its commuted twin."""
    left, operator, right = problem
    if operator != "-":
        left, right = sorted((left, right))
    return f"{left}{operator}{right}"


def _shot_pool(task: config.Task, *, seed: int) -> list[Problem]:
    """Training problems for shots, twins left out."""
    drawn = _draw(task, seed=seed, split="train", count=SHOT_POOL)
    pool = list({_key(problem): problem for problem in drawn}.values())
    if len(pool) <= task.shots:
        raise config.ConfigError(f"config.task.shots = {task.shots}, but config.task.levels = "
                                 f"{task.levels!r} hold only {len(pool)} training problems")
    return pool


def _shots(pool: list[Problem], problem: Problem, *, count: int, seed: int) -> list[Problem]:
    """`count` of the pool, drawn by seed and problem alone; never the problem or its twin."""
    if not count:
        return []
    key = hashlib.blake2b(repr(problem).encode(), digest_size=8).digest()
    rng = np.random.default_rng([seed, int.from_bytes(key, "big")])
    drawn = [pool[i] for i in rng.choice(len(pool), count + 1, replace=False)]
    return [shot for shot in drawn if _key(shot) != _key(problem)][:count]


def _record(task: config.Task, problem: Problem, *, shots: list[Problem]) -> base.Record:
    solved = [question(shot, task) + _answer(shot, task) for shot in shots]
    prompt = "\n".join([*solved, question(problem, task)])
    answer = _answer(problem, task)
    return {"prompt": base.apply_template(task.template, prompt), "answer": answer,
            "demonstration": answer, "level": level(problem)}


def level(problem: Problem) -> str:
    """The digits of a problem's operands: "2", or "2+3" where they differ."""
    left, right = (len(str(abs(operand))) for operand in (problem[0], problem[2]))
    return str(left) if left == right else f"{left}+{right}"


def question(problem: Problem, task: config.Task) -> str:
    """The question; the spaced form ends with a space, where the answer begins."""
    operator = problem[1]
    left, right = (str(operand).zfill(task.digits) for operand in (problem[0], problem[2]))
    return f"{left} {operator} {right} = " if task.spaced else f"{left}{operator}{right}="


def _answer(problem: Problem, task: config.Task) -> str:
    left, operator, right = problem
    return str(APPLY[operator](left, right)).zfill(task.digits)


TASK = base.Task(
    "arithmetic", build, "dapo_jax.envs.arithmetic:score", "dapo_jax.envs.arithmetic:extract",
    purpose="sums, differences and products of a chosen number of digits")
