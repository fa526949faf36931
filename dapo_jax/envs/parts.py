"""The parts of a reward: which there are, what each weighs, and the functions that give them.

A reward function takes (text, record) and returns a number, or a dict with the raw task reward
under "task" (or "score") and, beside it, parts of its own. The raw task reward decides what is
filtered, evaluated and logged; parts only shape what advantages are made of.
"""

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.envs import base

Reward = Callable[[str, Mapping[str, Any]], Any]

READY = ("format", "length", "repetition")  # see shaping.py; the system's own
TASK = ("task", "score")  # keys of the raw task reward
MOST = 1e6  # of a weight
F32_MAX = 3.4028234e38  # a reward beyond it would be infinite in f32


@dataclasses.dataclass(frozen=True)
class Weights:
    """What the shaped reward is the sum of, besides the overlong penalty."""

    task: float = 1.0
    ready: tuple[tuple[str, float], ...] = ()  # names in READY
    named: tuple[tuple[str, float], ...] = ()  # keys of the dict that the reward returns
    functions: tuple[tuple[str, float], ...] = ()  # "module:function"

    @property
    def scored(self) -> tuple[tuple[str, float], ...]:
        """The parts that the worker processes give, in the order of their reply."""
        return self.named + self.functions


@dataclasses.dataclass(frozen=True)
class Scorer:
    """The functions of a reward, found and checked."""

    name: str  # "module:function" of the task's reward
    reward: Reward
    named: tuple[str, ...]
    functions: tuple[tuple[str, Reward], ...]


class NoScore(Exception):
    """A reward gave nothing that can be used: `kind` is one of faults.KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def weights(pairs: tuple) -> Weights:
    """Config.task.reward_weights, checked; ConfigError says what is wrong with it."""
    found: dict[str, float] = {}
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
                and pair[0] and is_number(pair[1]) and abs(pair[1]) <= MOST):
            raise config.ConfigError(f"config.task.reward_weights: {pair!r} is no pair of a part's "
                                     f"name and a weight from {-MOST:g} to {MOST:g}, such as "
                                     "('format', 0.1)")
        if pair[0] in found:
            raise config.ConfigError(f"config.task.reward_weights names {pair[0]!r} twice")
        found[pair[0]] = float(pair[1])
    task = found.pop("task", 1.0)
    rest = tuple(found.items())
    return Weights(task, tuple(pair for pair in rest if pair[0] in READY),
                   tuple(pair for pair in rest if pair[0] not in READY and ":" not in pair[0]),
                   tuple(pair for pair in rest if ":" in pair[0]))


def scorer(reward: str, parts: Weights) -> Scorer:
    """The functions by their names; ConfigError for one that cannot be called as a reward is."""
    return Scorer(reward, function(reward), tuple(name for name, _ in parts.named),
                  tuple((name, function(name)) for name, _ in parts.functions))


def function(dotted: str) -> Reward:
    """The function named "module:function", its signature checked."""
    found = base.resolve_reward(dotted)
    if inspect.iscoroutinefunction(found):
        raise config.ConfigError(f"reward {dotted!r} is a coroutine; it must be a plain function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C: it does not tell
        return found
    try:
        signature.bind("", {})
    except TypeError as error:
        raise config.ConfigError(f"reward {dotted!r} takes {signature}; it is called with (text, "
                                 f"record): {error}") from error
    return found


def numbers(functions: Scorer, text: str, record: Mapping[str, Any]) -> list[float]:
    """The raw task reward, then each scored part; NoScore or what a function raises."""
    given = functions.reward(text, record)
    values = given if isinstance(given, dict) else {"task": given}
    key = next((key for key in TASK if key in values), None)
    if key is None:
        raise NoScore("type", f"{functions.name} returned a dict without 'task'")
    found = [_number(functions.name, values[key])]
    for name in functions.named:
        if name not in values:
            raise NoScore("type", f"{functions.name} returned no part {name!r}")
        found.append(_number(f"{functions.name}, part {name!r},", values[name]))
    return found + [_number(name, _part(part(text, record))) for name, part in functions.functions]


def _part(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return next((given[key] for key in TASK if key in given), given)


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise NoScore("type", f"{name} returned a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= F32_MAX:
        raise NoScore("value", f"{name} returned {number}")
    return number


def is_number(value: Any) -> bool:
    """Whether it is a number of Python or numpy, finite or not."""
    if isinstance(value, (bool, int, float)):
        return True
    numpy = sys.modules.get("numpy")  # not imported: then it is no numpy scalar
    return numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating))
