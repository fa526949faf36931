"""Scoring in worker processes that are killed at the time limit, as a thread cannot be.

Workers are fresh interpreters: neither the parent's `__main__` nor jax is imported in them. They
get chunks of items and answer item by item, so a worker that hangs, exits or is killed costs the
item it was at; it is replaced, and its other items go to the next idle worker. What it started goes
with it. Bounded: an item costs at most one restart, `timeout` seconds and `memory_mb`.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dapo_jax import config
from dapo_jax.envs import faults, parts, processes
from dapo_jax.envs import worker as serving

START_SECONDS = 120.0  # from starting a worker to its first word
CHUNK = 64  # items sent at once
SPARE_RESTARTS = 8  # of workers that die between items, per call and beyond one a worker
LONGEST_REPLY = 1 << 20  # bytes of a line; a longer one is no reply

NOTHING = memoryview(b"")

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
class Worker:
    """One process and where the conversation with it stands."""

    process: processes.Process
    mark: str  # the token of the process and of all it starts
    deadline: float  # monotonic seconds; infinite while idle
    ready: bool = False
    begun: bool = False  # whether it is at the first of `items`
    unsent: memoryview = NOTHING
    unread: bytes = b""
    items: collections.deque = dataclasses.field(default_factory=collections.deque)  # not answered


@dataclasses.dataclass
class Pool:
    """Worker processes of one reward function; leaving its `with` block ends them."""

    reward: str
    cfg: config.Scoring
    given: tuple  # task.reward_weights
    weights: parts.Weights
    marks: Iterator[str]
    mark: str  # begins the token of each worker
    workers: list[Worker]
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
    mark = processes.token()
    pool = Pool(reward, cfg, weights, parts.weights(weights),
                (f"{mark}.{number}." for number in itertools.count()), mark, [])
    try:
        for _ in range(cfg.workers):
            pool.workers.append(_start(pool))
    except BaseException:
        close(pool)
        raise
    return pool


def ready(pool: Pool) -> None:
    """Wait until every worker can score; ConfigError with the worker's message if one cannot."""
    _run(pool, _call(pool, [], []), lambda: all(worker.ready for worker in pool.workers))


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
    ended = len(pool.workers)
    while pool.workers:
        processes.end(pool.workers.pop().process)
    if ended:
        processes.sweep(pool.mark)


def _call(pool: Pool, texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> _Call:
    if not pool.workers:
        raise RuntimeError("the scoring pool is closed")
    items = [(text, dict(record)) for text, record in zip(texts, records, strict=True)]
    return _Call(items, [None] * len(items), collections.deque(range(len(items))), len(items),
                 len(pool.workers) + SPARE_RESTARTS)


def _run(pool: Pool, call: _Call, done: Callable[[], bool]) -> None:
    try:
        while not done():
            _advance(pool, call)
    except BaseException:
        close(pool)  # answers still on their way would be taken for the next call's
        raise


def _advance(pool: Pool, call: _Call) -> None:
    """Give idle workers items, wait for the next event, and act on it."""
    for worker in pool.workers:
        if call.pending and worker.ready and not worker.items:
            _feed(worker, call, share=2 * len(pool.workers), timeout=pool.cfg.timeout)
    events = _wait(pool.workers)
    for slot, worker in enumerate(pool.workers):
        if worker.process.stdin.fileno() in events:
            _send(worker)
        if worker.process.stdout.fileno() in events:
            if not _receive(pool, worker, call):
                _replace(pool, slot, call, "ended")
        elif time.monotonic() > worker.deadline:
            _replace(pool, slot, call, "timeout")


def _feed(worker: Worker, call: _Call, *, share: int, timeout: float) -> None:
    # Ever smaller chunks: no worker is left with a long queue while others are idle.
    size = min(CHUNK, max(1, len(call.pending) // share))
    worker.begun = False
    worker.items.extend(call.pending.popleft() for _ in range(size))
    worker.unsent = memoryview(pickle.dumps([call.items[i] for i in worker.items]))
    worker.deadline = time.monotonic() + timeout


def _wait(workers: list[Worker]) -> set[int]:
    """File descriptors that can be read or written, after at most a second."""
    poller = select.poll()
    for worker in workers:
        poller.register(worker.process.stdout, select.POLLIN)
        if worker.unsent:
            poller.register(worker.process.stdin, select.POLLOUT)
    left = min(worker.deadline for worker in workers) - time.monotonic()
    return {descriptor for descriptor, _ in poller.poll(1000 * min(1.0, max(0.0, left)))}


def _send(worker: Worker) -> None:
    try:
        worker.unsent = worker.unsent[os.write(worker.process.stdin.fileno(), worker.unsent):]
    except BrokenPipeError:  # the worker is dead: reading from it says so next
        worker.unsent = NOTHING


def _receive(pool: Pool, worker: Worker, call: _Call) -> bool:
    """Take the replies that have come; false at the end of the pipe, or if one is no reply."""
    data = os.read(worker.process.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        try:
            kind, value = json.loads(line)
        except ValueError:  # the reward found the pipe and wrote into it
            return False
        if not _take(pool, worker, call, kind, value):
            return False
    if lines:
        worker.deadline = time.monotonic() + pool.cfg.timeout if worker.items else math.inf
    return bool(data) and len(worker.unread) < LONGEST_REPLY


def _take(pool: Pool, worker: Worker, call: _Call, kind: str, value: Any) -> bool:
    """Act on one reply; false if it is the worker's last."""
    if kind == "failed":
        raise config.ConfigError(f"reward {pool.reward!r} cannot be used: {value}")
    if kind == "ready":
        worker.ready = True
    elif kind == "begin":
        worker.begun = True
    elif kind == "leaving":
        worker.begun = False
    elif worker.items and (kind == "score" or kind in faults.KINDS):
        _settle(call, worker.items.popleft(), (kind, value))
        if kind == "memory":  # it is replaced, and has cost its item already
            worker.begun = False
            call.spare += 1
    else:
        return False
    return kind not in ("leaving", "memory")


def _settle(call: _Call, index: int, reply: Reply) -> None:
    call.replies[index] = reply
    call.left -= 1


def _replace(pool: Pool, slot: int, call: _Call, kind: str) -> None:
    """Start a worker in place of one that ended or is late; the item it was at is lost."""
    worker = pool.workers[slot]
    processes.end(worker.process)
    processes.sweep(worker.mark)
    status = worker.process.returncode
    if not worker.ready:
        raise config.ConfigError(f"a worker for reward {pool.reward!r} ended with status {status} "
                                 f"before it could score, or took over {START_SECONDS:g} s")
    if worker.begun and worker.items:
        if status == -signal.SIGALRM:  # its own alarm, since this process did not get to run
            kind = "timeout"
        message = (f"{pool.reward}: no answer within {pool.cfg.timeout:g} s" if kind == "timeout"
                   else f"{pool.reward}: its worker ended with status {status}")
        _settle(call, worker.items.popleft(), (kind, message))
    elif call.spare:
        call.spare -= 1
    else:
        raise RuntimeError(f"workers for reward {pool.reward!r} keep ending between items, the "
                           f"last with status {status}")
    call.pending.extendleft(reversed(worker.items))
    pool.workers[slot] = _start(pool)


def _start(pool: Pool) -> Worker:
    program, mark = serving.program(pool.reward, pool.given, pool.cfg), next(pool.marks)
    return Worker(processes.start(program, mark), mark, time.monotonic() + START_SECONDS)


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
