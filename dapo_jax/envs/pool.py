"""Scoring in worker processes that are killed at the time limit, as a thread cannot be.

Workers are fresh interpreters: neither the parent's `__main__` nor jax is imported in them. They
get chunks of items and answer item by item, so a worker that hangs, exits or is killed costs the
item it was at; it is replaced, and its other items go to the next idle worker. Bounded: an item
costs at most one restart and `timeout` seconds.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.envs import worker as serving

START_SECONDS = 120.0  # from starting a worker to its first word
CHUNK = 64  # items sent at once
SPARE_RESTARTS = 8  # of workers that die between items, per call and beyond one a worker

NOTHING = memoryview(b"")

Reply = tuple[str, Any]


class RewardTypeError(config.ConfigError):
    """A reward function returned something that is no number."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of one call, in the order of its items."""

    reward: np.ndarray  # f32[n] raw task reward; of a failed item 0, or failure_reward
    valid: np.ndarray  # bool[n] false: scoring failed and on_failure is "mask"
    errors: int  # items that raised, gave NaN or infinity, or ended their worker
    timeouts: int
    first_failure: str  # what went wrong first; empty if nothing did


@dataclasses.dataclass
class Worker:
    """One process and where the conversation with it stands."""

    process: subprocess.Popen
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
    workers: list[Worker]

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


def open(reward: str, cfg: config.Scoring) -> Pool:
    """Start `cfg.workers` processes for "module:function" without waiting for them."""
    return Pool(reward, cfg, [_start(reward, cfg) for _ in range(cfg.workers)])


def ready(pool: Pool) -> None:
    """Wait until every worker can score; ConfigError with the worker's message if one cannot."""
    _run(pool, _call(pool, [], []), lambda: all(worker.ready for worker in pool.workers))


def score(pool: Pool, texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Scores:
    """Reward of each text under its record, in order.

    A failing item is masked or given `failure_reward`, and counted. ConfigError if the reward
    function cannot be imported, RewardTypeError if it returns no number; the pool is closed then.
    """
    if len(texts) != len(records):
        raise ValueError(f"{len(texts)} texts but {len(records)} records")
    call = _call(pool, texts, records)
    _run(pool, call, lambda: not call.left)
    return _scores(call.replies, pool.cfg)


def close(pool: Pool) -> None:
    """Kill the workers and what they started; nothing happens to a pool that is closed."""
    while pool.workers:
        _kill(pool.workers.pop())


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
    """Take the replies that have come; false at the end of the pipe."""
    data = os.read(worker.process.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        kind, value = json.loads(line)
        if kind == "failed":
            raise config.ConfigError(f"reward {pool.reward!r} cannot be used: {value}")
        if kind == "type":
            raise RewardTypeError(f"reward {pool.reward!r} returned a {value}; it must return a "
                                  "number or a dict with a number under 'score'")
        if kind == "ready":
            worker.ready = True
        elif kind == "begin":
            worker.begun = True
        else:
            _settle(call, worker.items.popleft(), (kind, value))
    if lines:
        worker.deadline = time.monotonic() + pool.cfg.timeout if worker.items else math.inf
    return bool(data)


def _settle(call: _Call, index: int, reply: Reply) -> None:
    call.replies[index] = reply
    call.left -= 1


def _replace(pool: Pool, slot: int, call: _Call, kind: str) -> None:
    """Start a worker in place of one that ended or is late; the item it was at is lost."""
    worker = pool.workers[slot]
    _kill(worker)
    status = worker.process.returncode
    if not worker.ready:
        raise config.ConfigError(f"a worker for reward {pool.reward!r} ended with status {status} "
                                 f"before it could score, or took over {START_SECONDS:g} s")
    if worker.begun and worker.items:
        message = (f"no answer within {pool.cfg.timeout:g} s" if kind == "timeout"
                   else f"its worker ended with status {status}")
        _settle(call, worker.items.popleft(), (kind, message))
    elif call.spare:
        call.spare -= 1
    else:
        raise RuntimeError(f"workers for reward {pool.reward!r} keep ending between items, the "
                           f"last with status {status}")
    call.pending.extendleft(reversed(worker.items))
    pool.workers[slot] = _start(pool.reward, pool.cfg)


def _start(reward: str, cfg: config.Scoring) -> Worker:
    code = (f"import sys; sys.path[:] = {sys.path!r}; from {serving.__name__} import main; "
            f"main({reward!r}, {cfg.timeout!r})")
    # A reward that imports jax must not take the accelerator, nor its threads all cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, bufsize=0, env=environment,
                               start_new_session=True)
    os.set_blocking(process.stdin.fileno(), False)
    return Worker(process, time.monotonic() + START_SECONDS)


def _kill(worker: Worker) -> None:
    if worker.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended by itself
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    worker.process.stdin.close()
    worker.process.stdout.close()


def _scores(replies: list[Reply], cfg: config.Scoring) -> Scores:
    kinds = np.array([kind for kind, _ in replies], dtype=str)
    scored = kinds == "score"
    substitute = cfg.failure_reward if cfg.on_failure == "reward" else 0.0
    failures = [(i, value) for i, (kind, value) in enumerate(replies) if kind != "score"]
    return Scores(
        reward=np.array([value if kind == "score" else substitute for kind, value in replies],
                        dtype=np.float32),
        valid=scored | (cfg.on_failure == "reward"),
        errors=int(np.isin(kinds, ("error", "ended")).sum()),
        timeouts=int((kinds == "timeout").sum()),
        first_failure="item {}: {}".format(*failures[0]) if failures else "",
    )
