"""Scoring in worker processes that are killed at the time limit, as a thread cannot be.

Neither the parent's `__main__` nor jax is imported in the workers. They get chunks of items and
answer item by item, so a worker that hangs, exits or is killed costs the item it was at; it is
replaced, and its other items go to the next idle worker. What it started goes with it. Bounded: an
item costs at most one restart, `timeout` seconds and `memory_mb`.
"""

import collections
import dataclasses
import functools
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dapo_jax import config
from dapo_jax.envs import crew as crews
from dapo_jax.envs import faults, parts
from dapo_jax.envs import worker as serving

CHUNK = 64  # items sent at once
SPARE_RESTARTS = 8  # of workers that die between items, per call and beyond one a worker

Reply = tuple[str, Any]


class RewardTypeError(config.ConfigError):
    """A reward function has not returned a number once."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of one call, in the order of its items."""

    reward: np.ndarray  # f32[n] raw task reward; of a failed item 0, or failure_reward
    valid: np.ndarray  # bool[n] false: scoring failed and on_failure is "mask"
    errors: int  # failures of all kinds but time-outs
    timeouts: int
    first_failure: str  # what went wrong first; empty if nothing did
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by kind
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # f32[n]; 0 if failed


@dataclasses.dataclass
class Pool:
    """Worker processes of one reward function; leaving its `with` block ends them."""

    reward: str
    cfg: config.Scoring
    weights: parts.Weights
    crew: crews.Crew
    proved: bool = False  # whether the function has returned a number

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        close(self)


@dataclasses.dataclass
class _Call:
    items: list[tuple[str, dict]]
    replies: list[Reply | None]  # kind and value, as in worker.py; None: not answered
    pending: collections.deque  # indices of items that no worker has
    left: int  # items not answered
    spare: int  # restarts left for workers that end between items


def open(reward: str, cfg: config.Scoring, *, weights: tuple = ()) -> Pool:
    """Start `cfg.workers` processes for "module:function" without waiting for them.

    `weights` is config.task.reward_weights; the parts that functions give are scored with it.
    """
    program = functools.partial(_program, reward, weights, cfg)
    found = parts.weights(weights)
    return Pool(reward, cfg, found, crews.open(f"reward {reward!r}", program, count=cfg.workers,
                                               able="score"))


def _program(reward: str, weights: tuple, cfg: config.Scoring, nursery: bool) -> str:
    return serving.program(reward, weights, cfg, nursery=nursery)


def ready(pool: Pool) -> None:
    """Wait until every worker can score; ConfigError with the worker's message if one cannot."""
    _run(pool, _call(pool, [], []), lambda: crews.complete(pool.crew))


def score(pool: Pool, texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Scores:
    """Reward of each text under its record, in order.

    A failing item is masked or given `failure_reward`, and counted by kind. ConfigError if the
    reward function cannot be imported; RewardTypeError if it returned nothing but what is no
    number since the pool was opened. The pool is closed then.
    """
    if len(texts) != len(records):
        raise ValueError(f"{len(texts)} texts but {len(records)} records")
    call = _call(pool, texts, records)
    _run(pool, call, lambda: not call.left)
    replies = cast(list[Reply], call.replies)  # all are there
    _refuse_types(pool, replies)
    return _scores(replies, pool)


def close(pool: Pool) -> None:
    """Kill the workers and what they started; nothing happens to a pool that is closed."""
    crews.close(pool.crew)


def _call(pool: Pool, texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> _Call:
    if pool.crew.closed:
        raise RuntimeError("the scoring pool is closed")
    items = [(text, dict(record)) for text, record in zip(texts, records, strict=True)]
    return _Call(items, [None] * len(items), collections.deque(range(len(items))), len(items),
                 pool.cfg.workers + SPARE_RESTARTS)


def _run(pool: Pool, call: _Call, done: Callable[[], bool]) -> None:
    try:
        while not done():
            _advance(pool, call)
    except BaseException:
        close(pool)  # answers still on their way would be taken for the next call's
        raise


def _advance(pool: Pool, call: _Call) -> None:
    """Give idle workers items, wait for the next event, and act on it."""
    for worker in pool.crew.workers:
        if call.pending and worker.ready and not worker.work:
            _feed(pool, worker, call)
    crews.advance(pool.crew, math.inf, take=functools.partial(_take, pool, call),
                  lose=functools.partial(_lose, pool, call))


def _feed(pool: Pool, worker: crews.Worker, call: _Call) -> None:
    # Ever smaller chunks: no worker is left with a long queue while others are idle.
    size = min(CHUNK, max(1, len(call.pending) // (2 * pool.cfg.workers)))
    items = collections.deque(call.pending.popleft() for _ in range(size))
    crews.give(worker, items, pickle.dumps([call.items[i] for i in items]),
               seconds=pool.cfg.timeout)


def _take(pool: Pool, call: _Call, worker: crews.Worker, kind: str, value: Any) -> bool:
    """Act on one reply; false if it is the worker's last."""
    if kind == "begin":
        worker.begun = True
    elif kind == "leaving":
        worker.begun = False
    elif worker.work and (kind == "score" or kind in faults.KINDS):
        _settle(call, worker.work.popleft(), (kind, value))
        crews.answered(pool.crew)
        if kind == "memory":  # it is replaced, and has cost its item already
            worker.begun = False
            call.spare += 1
    else:
        return False
    worker.deadline = time.monotonic() + pool.cfg.timeout if worker.work else math.inf
    return kind not in ("leaving", "memory")


def _settle(call: _Call, index: int, reply: Reply) -> None:
    call.replies[index] = reply
    call.left -= 1


def _lose(pool: Pool, call: _Call, worker: crews.Worker, kind: str, status: int | str) -> None:
    """The item that a worker was at is lost with it; its others go to the next idle one."""
    left = worker.work or collections.deque()
    if worker.begun and left:
        message = (f"{pool.reward}: no answer within {pool.cfg.timeout:g} s" if kind == "timeout"
                   else f"{pool.reward}: its worker ended with status {status}")
        _settle(call, left.popleft(), (kind, message))
    elif call.spare:
        call.spare -= 1
    else:
        raise RuntimeError(f"workers for reward {pool.reward!r} keep ending between items, the "
                           f"last with status {status}")
    call.pending.extendleft(reversed(left))


def _refuse_types(pool: Pool, replies: list[Reply]) -> None:
    """End a run whose reward function is wrong from the start, instead of masking all samples."""
    pool.proved = pool.proved or any(kind == "score" for kind, _ in replies)
    wrong = [message for kind, message in replies if kind == "type"]
    if wrong and not pool.proved:
        close(pool)
        raise RewardTypeError(f"{wrong[0]}; it must be a number, or a dict with a number under "
                              "'task' and the parts that config.task.reward_weights names")


def _scores(replies: list[Reply], pool: Pool) -> Scores:
    cfg = pool.cfg
    kinds = np.array([kind for kind, _ in replies], dtype=str)
    scored = kinds == "score"
    substitute = cfg.failure_reward if cfg.on_failure == "reward" else 0.0
    blank = [substitute, *[0.0] * len(pool.weights.scored)]
    table = np.array([value if kind == "score" else blank for kind, value in replies],
                     np.float32).reshape(-1, len(blank))
    failures = {kind: int((kinds == kind).sum()) for kind in faults.KINDS}
    first = next((at for at in range(len(replies)) if not scored[at]), None)
    return Scores(
        reward=table[:, 0], valid=scored | (cfg.on_failure == "reward"),
        errors=sum(failures.values()) - failures["timeout"], timeouts=failures["timeout"],
        first_failure="" if first is None else f"item {first}: {replies[first][1]}",
        failures=failures,
        parts={name: table[:, at] for at, (name, _) in enumerate(pool.weights.scored, start=1)})
