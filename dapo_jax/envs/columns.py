"""Sums worked out digit by digit from the right, the answer in brackets at the end of the line.

"47+85=" is answered "7+5=12 4+8+1=13 (132)": a column is the two digits, the carry where there is
one, and what they make. So the length of an answer follows from the numbers, and an answer without
its brackets has lost the form. Problems are those of arithmetic.py, sums only.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.envs import arithmetic, base

_ANSWER = re.compile(r"\([0-9]+\)\Z")


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split` and how many fewer there are than the configuration asks for.

    ConfigError: operators other than "+", or numbers that are not written plainly.
    """
    task = cfg.task
    for name in ("digits", "spaced"):
        if getattr(task, name):
            raise config.ConfigError(f"config.task.{name} = {getattr(task, name)!r}: the task "
                                     "columns writes numbers plainly; leave it out")
    if task.operators != "+":
        raise config.ConfigError(f"config.task.operators = {task.operators!r}: the task columns "
                                 "has sums only, '+'")
    count = task.train_size if split == "train" else cfg.eval.prompts
    drawn = arithmetic.problems(task, seed=cfg.seed, split=split, count=count)
    return [_record(task, problem) for problem in drawn], {"missing": count - len(drawn)}


def worked(left: int, right: int) -> str:
    """The columns of left + right, then the sum in brackets."""
    return " ".join([*_columns(left, right), f"({left + right})"])


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the first line of `text` ends with the right sum in brackets, else 0.0; the columns
    are not looked at."""
    return float(extract(text, record) == record["answer"])


def extract(text: str, record: Mapping[str, Any]) -> str | None:
    """The number in brackets at the end of the first line, brackets included; None without one."""
    found = _ANSWER.search(text.split("\n", 1)[0].rstrip())
    return found and found[0]


def answered(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if there is an answer in its form, right or wrong: a part for `task.reward_weights`."""
    return float(extract(text, record) is not None)


def _columns(left: int, right: int) -> Iterator[str]:
    carry = 0
    for place in range(max(len(str(left)), len(str(right)))):
        digits = [left // 10**place % 10, right // 10**place % 10] + [1] * carry
        yield f"{'+'.join(map(str, digits))}={sum(digits)}"
        carry = sum(digits) // 10


def _record(task: config.Task, problem: arithmetic.Problem) -> base.Record:
    left, _, right = problem
    return {"prompt": base.apply_template(task.template, arithmetic.question(problem, task)),
            "answer": f"({left + right})", "demonstration": worked(left, right),
            "level": arithmetic.level(problem)}


TASK = base.Task(
    "columns", build, "dapo_jax.envs.columns:score", "dapo_jax.envs.columns:extract",
    purpose="sums worked out digit by digit, then the answer in brackets")
