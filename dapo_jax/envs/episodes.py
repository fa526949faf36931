"""What an environment of several turns is, and how tasks of one turn are environments and back.

An environment is a pair of functions over a state that it chooses itself: state in, state out, and
nothing kept between calls, so that any worker can serve any turn and a turn can be tried again.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.envs import base, faults, parts

Message = Mapping[str, str]  # role, content
State = Any  # picklable

# Kind -> what it means; why an episode is invalid.
FAILURES = faults.KINDS | {
    "turn": "start or step returned what the protocol does not allow",
    "refused": "the environment kept failing, and is left alone for a while",
}
LONGEST_TEXT = 1 << 19  # bytes, as JSON, of a turn's reply, or of the messages that a start tells
MOST = 1e25  # of a reward or a part: sums over turns, with any weight, stay finite in f32
MOST_PARTS = 64
LONGEST_NAME = 100  # characters of a part's name


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the environment makes of one text of the model."""

    reply: str  # what the model is told; no part of what it is scored by, nor trained on
    reward: float  # the task's own, of this turn
    done: bool  # nothing follows, and `reply` is not shown to the model
    state: State = None  # for the next step
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # counts and shaping,
    # apart from the reward: calls, tool_errors, ...


def _nothing() -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Environment:
    """The functions by which episodes are played.

    `start(record, seed)` gives the first state and the messages that the model is shown.
    `step(state, text)` gets the text of one turn as the model wrote it, without what it was told.
    Both are deterministic in what they are given, or a replay says that they are not.
    """

    name: str
    start: Callable[[Mapping[str, Any], int], tuple[State, list[Message]]]
    step: Callable[[State, str], Turn]
    purpose: str = ""  # a line that lists show
    idempotent: bool = False  # a failed call may be made again: it changes nothing outside
    ready: Callable[[], None] = _nothing  # ConfigError: the environment cannot be run here
    records: Callable[..., list[base.Record]] | None = None  # (*, seed, split, count) -> problems
    # of its own, "train" or "eval", which share none; fewer than `count` where there are no more
    parts: tuple[str, ...] = ()  # all names that Turn.parts may hold; (): not told
    shown: Callable[[Mapping[str, Any]], Sequence[str]] | None = None  # (record) -> the model's
    # texts, turn by turn, of an episode to learn from


def seed(root: int, *, step: int, group: int, sample: int) -> int:
    """The seed of one episode, 63 bits; equal for equal numbers in every process."""
    text = f"{root} {step} {group} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def single_turn(name: str, reward: str, *, weights: tuple = ()) -> Environment:
    """A task of one turn: its prompt is told, the answer is scored by "module:function".

    `weights` is config.task.reward_weights; the parts that functions give become parts of the turn.
    ConfigError for a function that cannot be called as a reward is.
    """
    known = parts.weights(weights)
    scorer = parts.scorer(reward, known)

    def start(record: Mapping[str, Any], seed: int) -> tuple[State, list[Message]]:
        return dict(record), told(record["prompt"])

    def step(state: State, text: str) -> Turn:
        task, *more = parts.numbers(scorer, text, state)
        named = {name: value for (name, _), value in zip(known.scored, more, strict=True)}
        return Turn("", task, True, parts=named)

    return Environment(name, start, step, purpose=f"one turn scored by {reward}", idempotent=True)


def reward_of(environment: Environment, *, seed: int = 0) -> Callable[[str, Mapping], float]:
    """A reward function (text, record) from an environment whose first turn ends the episode.

    The function raises ValueError if it does not.
    """
    def score(text: str, record: Mapping[str, Any]) -> float:
        state, _ = environment.start(record, seed)
        turn = environment.step(state, text)
        if not turn.done:
            raise ValueError(f"environment {environment.name!r} goes on after its first turn: it "
                             "cannot be scored as a task of one turn")
        return float(turn.reward)

    return score


def told(prompt: str | Sequence[Message]) -> list[Message]:
    """A prompt as messages: a text is one message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def fault_of_turn(turn: Any) -> str:
    """What the protocol does not allow in what a step returned; empty if nothing."""
    if not isinstance(turn, Turn):
        return (f"step returned a {type(turn).__name__}, not a Turn: let it return "
                "episodes.Turn(reply, reward, done, state)")
    if fault := _fault_of_text(turn.reply):
        return f"Turn.reply {fault}"
    if not _is_finite(turn.reward):
        return f"Turn.reward = {turn.reward!r:.80} is no finite number of at most {MOST:g}"
    if not isinstance(turn.done, bool):
        return (f"Turn.done = {turn.done!r:.80} is neither True nor False of Python itself: write "
                "bool(...)")
    if not isinstance(turn.parts, Mapping) or len(turn.parts) > MOST_PARTS or not all(
            isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME
            and _is_finite(value) for name, value in turn.parts.items()):
        return (f"Turn.parts must hold at most {MOST_PARTS} printable names of at most "
                f"{LONGEST_NAME} characters, with a finite number of at most {MOST:g} each")
    return ""


def fault_of_start(found: Any) -> str:
    """What the protocol does not allow in what a start returned; empty if nothing."""
    if not (isinstance(found, tuple) and len(found) == 2):
        return (f"start returned a {type(found).__name__}, not (state, messages): let it return "
                "state, episodes.told(record['prompt'])")
    if not are_messages(found[1]):
        return "start must return a list of messages with a role and a content, all of them texts"
    fault = _fault_of_text("".join(text for message in found[1] for text in message.values()))
    return f"what start tells {fault}" if fault else ""


def are_messages(value: Any) -> bool:
    """Whether it is a list of messages, one at least, that hold nothing but texts."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() and all(
            isinstance(text, str) for pair in message.items() for text in pair)
        for message in value)


def _fault_of_text(text: Any) -> str:
    """Why a text cannot be sent by a worker and kept in a log; empty if it can be."""
    if not isinstance(text, str):
        return f"is of type {type(text).__name__}, not a text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which no file can hold"
    size = len(json.dumps(text))
    return f"is of {size} bytes as JSON, more than {LONGEST_TEXT}" if size > LONGEST_TEXT else ""


def _is_finite(value: Any) -> bool:
    """NaN is not: no comparison with it holds. An int is compared as it is, however large."""
    return parts.is_number(value) and bool(abs(value) <= MOST)
