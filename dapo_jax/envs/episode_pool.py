"""An environment in worker processes that are killed at the time limit.

Calls are submitted and answered in any order, so that a slow one holds up nobody. The state of an
episode is in its answer, not in a worker: a worker that hangs, exits or is killed costs the call it
was at, and is replaced. A failed call is made again, after a growing pause, only where the
environment says that this changes nothing outside. Bounded: each call costs at most `retries` + 1
times `timeout`, and the pauses.
"""

import collections
import dataclasses
import heapq
import itertools
import json
import math
import os
import pickle
import select
import signal
import time
from typing import Any

from dapo_jax import config
from dapo_jax.envs import breaker as breakers
from dapo_jax.envs import environments, episode_worker, episodes, processes
from dapo_jax.envs import pool as scoring

AGAIN = frozenset({"error", "timeout", "memory", "ended"})  # kinds that another try may mend
LONGEST_PAUSE = 10.0  # seconds between two tries
SPARE_RESTARTS = 8  # of workers that die without a call in a row


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one environment."""

    workers: int = 1  # processes: calls that are made at once
    timeout: float = 10.0  # seconds for one call, then its process is killed
    memory_mb: int = 4096  # that a process may allocate; 0: no limit
    retries: int = 2  # of a failed call, where the environment is idempotent
    backoff: float = 0.1  # seconds before the first of them, doubled for each further one
    bound: int = 16  # failures in a row after which the environment is left alone
    pause: float = 30.0  # seconds until it is tried again


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one call."""

    ticket: Any  # as submitted; it can be hashed
    kind: str  # "done", or a kind of episodes.FAILURES
    value: Any  # "done": the dict of episode_worker.py; else a message
    seconds: float  # from submitting to the answer, pauses included
    tries: int  # 0: the call was never made


@dataclasses.dataclass
class _Call:
    ticket: Any
    body: bytes
    born: float
    tries: int = 0


@dataclasses.dataclass
class Worker:
    """One process and where the conversation with it stands."""

    process: processes.Process
    mark: str  # the token of the process and of all it starts
    deadline: float  # monotonic seconds; infinite while idle
    ready: bool = False
    unsent: memoryview = scoring.NOTHING
    unread: bytes = b""
    call: _Call | None = None


@dataclasses.dataclass
class Pool:
    """Worker processes of one environment; leaving its `with` block ends them."""

    name: str
    idempotent: bool
    limits: Limits
    mark: str
    numbers: itertools.count
    workers: list[Worker]
    breaker: breakers.Breaker = breakers.Breaker()
    pending: collections.deque = dataclasses.field(default_factory=collections.deque)
    paused: list = dataclasses.field(default_factory=list)  # heap of (due, number, call)
    finished: list[Answer] = dataclasses.field(default_factory=list)
    failures: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # tries that failed by kind, "refused" calls, and "retries" made
    spare: int = SPARE_RESTARTS

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        close(self)


def open(name: str, limits: Limits = Limits()) -> Pool:
    """Start the workers of an environment without waiting for them; ConfigError: no such one.

    ConfigError too if it cannot be run on this machine, which its `ready` tells here already.
    """
    environment = environments.environment(name)
    environment.ready()
    pool = Pool(name, environment.idempotent, limits, processes.token(), itertools.count(), [])
    try:
        pool.workers.extend(_start(pool) for _ in range(limits.workers))
    except BaseException:
        close(pool)
        raise
    return pool


def start(pool: Pool, ticket: Any, *, record: dict, seed: int) -> None:
    """Submit the start of an episode."""
    _submit(pool, ticket, ("start", record, seed))


def step(pool: Pool, ticket: Any, *, state: bytes, text: str) -> None:
    """Submit a turn: the state that the last answer held, and what the model wrote."""
    _submit(pool, ticket, ("step", state, text))


def unanswered(pool: Pool) -> int:
    """Calls whose answers `poll` has not given yet."""
    at_work = sum(worker.call is not None for worker in pool.workers)
    return at_work + len(pool.pending) + len(pool.paused) + len(pool.finished)


def poll(pool: Pool, *, seconds: float = 0.0) -> list[Answer]:
    """Answers since the last call; waits up to `seconds` for a first one.

    ConfigError: a worker cannot import the environment. RuntimeError: workers keep ending without
    a call. The pool is closed then.
    """
    if not pool.workers:
        raise RuntimeError("the pool of environments is closed")
    limit = time.monotonic() + seconds
    try:
        while True:
            _advance(pool, max(0.0, limit - time.monotonic()))
            if pool.finished or not unanswered(pool) or time.monotonic() >= limit:
                found, pool.finished = pool.finished, []
                return found
    except BaseException:
        close(pool)  # what is on its way would be taken for another call's answer
        raise


def close(pool: Pool) -> None:
    """Kill the workers and what they started; nothing happens to a pool that is closed."""
    if not pool.workers:
        return
    while pool.workers:
        processes.end(pool.workers.pop().process)
    processes.sweep(pool.mark)


def _submit(pool: Pool, ticket: Any, request: tuple) -> None:
    if not pool.workers:
        raise RuntimeError("the pool of environments is closed")
    pool.pending.append(_Call(ticket, pickle.dumps(request), time.monotonic()))


def _advance(pool: Pool, seconds: float) -> None:
    """Give idle workers calls, wait for the next event, and act on it."""
    while pool.paused and pool.paused[0][0] <= time.monotonic():
        pool.pending.append(heapq.heappop(pool.paused)[2])
    for worker in pool.workers:
        if worker.ready and worker.call is None and _allowed(pool):
            _feed(pool, worker)
    events = _wait(pool, 0.0 if pool.finished else seconds)
    for slot, worker in enumerate(pool.workers):
        if worker.process.stdin.fileno() in events:
            _send(worker)
        if worker.process.stdout.fileno() in events:
            if not _receive(pool, worker):
                _replace(pool, slot, "ended")
        elif time.monotonic() > worker.deadline:
            _replace(pool, slot, "timeout")


def _allowed(pool: Pool) -> bool:
    """Whether a call may be made; while the environment is left alone, all calls are refused."""
    bound, now = pool.limits.bound, time.monotonic()
    if not breakers.allows(pool.breaker, now, bound=bound):
        for call in pool.pending:
            pool.failures["refused"] += 1
            pool.finished.append(Answer(
                call.ticket, "refused", f"environment {pool.name!r} failed {pool.breaker.failed} "
                "times in a row and is left alone", now - call.born, call.tries))
        pool.pending.clear()
    return bool(pool.pending)


def _feed(pool: Pool, worker: Worker) -> None:
    pool.breaker = breakers.asked(pool.breaker, bound=pool.limits.bound)
    worker.call = pool.pending.popleft()
    worker.call.tries += 1
    worker.unsent = memoryview(worker.call.body)
    worker.deadline = time.monotonic() + pool.limits.timeout


def _wait(pool: Pool, seconds: float) -> set[int]:
    """File descriptors that can be read or written, after at most `seconds`."""
    poller = select.poll()
    for worker in pool.workers:
        poller.register(worker.process.stdout, select.POLLIN)
        if worker.unsent:
            poller.register(worker.process.stdin, select.POLLOUT)
    due = [worker.deadline for worker in pool.workers] + [pause[0] for pause in pool.paused[:1]]
    left = min(seconds, min(due) - time.monotonic(), 1.0)
    return {descriptor for descriptor, _ in poller.poll(math.ceil(1000 * max(0.0, left)))}


def _send(worker: Worker) -> None:
    try:
        worker.unsent = worker.unsent[os.write(worker.process.stdin.fileno(), worker.unsent):]
    except BrokenPipeError:  # the worker is dead: reading from it says so next
        worker.unsent = scoring.NOTHING


def _receive(pool: Pool, worker: Worker) -> bool:
    """Take what has come; false at the end of the pipe, or if it is no reply."""
    data = os.read(worker.process.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        try:
            kind, value = json.loads(line)
        except ValueError:  # the environment found the pipe and wrote into it
            return False
        if not _take(pool, worker, kind, value):
            return False
    return bool(data) and len(worker.unread) < scoring.LONGEST_REPLY


def _take(pool: Pool, worker: Worker, kind: str, value: Any) -> bool:
    """Act on one reply; false if the worker is to be replaced."""
    if kind == "failed":
        raise config.ConfigError(f"environment {pool.name!r} cannot be used: {value}")
    if kind == "ready":
        worker.ready, worker.deadline = True, math.inf
        return True
    if worker.call is None or not (kind == "done" or kind in episodes.FAILURES):
        return False
    _settle(pool, worker, worker.call, kind, value)
    return kind != "memory"  # what it holds on to could fail the next call


def _settle(pool: Pool, worker: Worker, call: _Call, kind: str, value: Any) -> None:
    """Finish the call that a worker was at, or have it made again later."""
    worker.call, worker.deadline, now = None, math.inf, time.monotonic()
    limits, pool.spare = pool.limits, SPARE_RESTARTS
    pool.breaker = breakers.told(pool.breaker, kind not in AGAIN, now, bound=limits.bound,
                                 pause=limits.pause)
    if kind != "done":
        pool.failures[kind] += 1
    if kind in AGAIN and pool.idempotent and call.tries <= limits.retries:
        pool.failures["retries"] += 1
        pause = min(LONGEST_PAUSE, limits.backoff * 2 ** (call.tries - 1))
        heapq.heappush(pool.paused, (now + pause, next(pool.numbers), call))
    else:
        pool.finished.append(Answer(call.ticket, kind, value, now - call.born, call.tries))


def _replace(pool: Pool, slot: int, kind: str) -> None:
    """Start a worker in place of one that ended or is late; the call it was at has failed."""
    worker = pool.workers[slot]
    processes.end(worker.process)
    processes.sweep(worker.mark)
    status = worker.process.returncode
    if not worker.ready:
        raise config.ConfigError(
            f"a worker for environment {pool.name!r} ended with status {status} before it was "
            f"ready, or took over {scoring.START_SECONDS:g} s")
    if worker.call:
        if status == -signal.SIGALRM:  # its own alarm, since this process did not get to run
            kind = "timeout"
        _settle(pool, worker, worker.call, kind, f"{pool.name}: " + (
            f"no answer within {pool.limits.timeout:g} s" if kind == "timeout"
            else f"its worker ended with status {status}"))
    elif pool.spare:
        pool.spare -= 1
    else:
        raise RuntimeError(f"workers for environment {pool.name!r} keep ending without a call, "
                           f"the last with status {status}")
    pool.workers[slot] = _start(pool)


def _start(pool: Pool) -> Worker:
    mark = f"{pool.mark}.{next(pool.numbers)}."
    program = episode_worker.program(pool.name, timeout=pool.limits.timeout,
                                     memory_mb=pool.limits.memory_mb)
    return Worker(processes.start(program, mark), mark, time.monotonic() + scoring.START_SECONDS)
