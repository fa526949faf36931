"""An environment in worker processes that are killed at the time limit.

Calls are submitted and answered in any order, so that a slow one holds up nobody. The state of an
episode is in its answer, not in a worker: a worker that hangs, exits or is killed costs the call it
was at, and is replaced. A failed call is made again, after a growing pause, only where the
environment says that this changes nothing outside. A call that takes long gives its seat up: then
one more worker serves the others, so that a few that hang hold up nobody. Bounded: each call costs
at most `retries` + 1 times `timeout`, and the pauses; there are at most twice `workers` processes,
and the spare ones.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
import pickle
import time
from collections.abc import Mapping
from typing import Any

from dapo_jax.envs import breaker as breakers
from dapo_jax.envs import crew as crews
from dapo_jax.envs import environments, episode_worker, episodes

AGAIN = frozenset({"error", "timeout", "memory", "ended"})  # kinds that another try may mend
LONGEST_PAUSE = 10.0  # seconds between two tries
SPARE_RESTARTS = 8  # of workers that die without a call in a row
SPARES = 4  # one process is kept ready for so many workers, so that a lost one is not waited for
LATE = 0.25  # of `timeout`: a call that has taken longer gives its seat up


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one environment."""

    workers: int = 1  # calls that are made at once, but for late ones
    timeout: float = 10.0  # seconds for one call, then its process is killed
    memory_mb: int = 4096  # that a process may allocate; 0: no limit
    retries: int = 2  # of a failed call, where the environment is idempotent
    backoff: float = 0.1  # seconds before the first of them, doubled for each further one
    bound: int = 16  # failures in a row after which the environment is left alone
    pause: float = 30.0  # seconds until it is tried again


def limits(settings: Mapping[str, Any]) -> Limits:
    """Those of config.environment as a mapping; a field that is absent has its default."""
    names = {field.name for field in dataclasses.fields(Limits)}
    return Limits(**{name: value for name, value in settings.items() if name in names})


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
    made: float = 0.0  # monotonic seconds, of this try


@dataclasses.dataclass
class Pool:
    """Worker processes of one environment; leaving its `with` block ends them."""

    name: str
    idempotent: bool
    limits: Limits
    crew: crews.Crew
    numbers: itertools.count = dataclasses.field(default_factory=itertools.count)
    breaker: breakers.Breaker = breakers.Breaker()
    pending: collections.deque = dataclasses.field(default_factory=collections.deque)
    paused: list = dataclasses.field(default_factory=list)  # heap of (due, number, call)
    finished: list[Answer] = dataclasses.field(default_factory=list)
    failures: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # tries that failed by kind, "refused" calls, and "retries" made
    last_failure: str = ""
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
    program = functools.partial(_program, name, limits)
    return Pool(name, environment.idempotent, limits, crews.open(
        f"environment {name!r}", program, count=limits.workers, able="play an episode",
        spares=-(-limits.workers // SPARES)))


def _program(name: str, limits: Limits, nursery: bool) -> str:
    return episode_worker.program(name, timeout=limits.timeout, memory_mb=limits.memory_mb,
                                  nursery=nursery)


def start(pool: Pool, ticket: Any, *, record: dict, seed: int) -> None:
    """Submit the start of an episode."""
    _submit(pool, ticket, ("start", record, seed))


def step(pool: Pool, ticket: Any, *, state: bytes, text: str) -> None:
    """Submit a turn: the state that the last answer held, and what the model wrote."""
    _submit(pool, ticket, ("step", state, text))


def unanswered(pool: Pool) -> int:
    """Calls whose answers `poll` has not given yet."""
    at_work = sum(worker.work is not None for worker in pool.crew.workers)
    return at_work + len(pool.pending) + len(pool.paused) + len(pool.finished)


def poll(pool: Pool, *, seconds: float = 0.0) -> list[Answer]:
    """Answers since the last call; waits up to `seconds` for a first one.

    ConfigError: a worker cannot import the environment. RuntimeError: workers keep ending without
    a call. The pool is closed then.
    """
    if pool.crew.closed:
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
    crews.close(pool.crew)


def _submit(pool: Pool, ticket: Any, request: tuple) -> None:
    if pool.crew.closed:
        raise RuntimeError("the pool of environments is closed")
    pool.pending.append(_Call(ticket, pickle.dumps(request), time.monotonic()))


def _advance(pool: Pool, seconds: float) -> None:
    """Give idle workers calls, wait for the next event, and act on it."""
    while pool.paused and pool.paused[0][0] <= time.monotonic():
        pool.pending.append(heapq.heappop(pool.paused)[2])
    due = _seated(pool)
    if pool.paused:
        due = min(due, pool.paused[0][0])
    crews.advance(pool.crew, 0.0 if pool.finished else min(seconds, due - time.monotonic()),
                  take=functools.partial(_take, pool), lose=functools.partial(_lose, pool))


def _seated(pool: Pool) -> float:
    """Fill free seats with calls; when the next of those that are made will be late."""
    now, limits, late = time.monotonic(), pool.limits, LATE * pool.limits.timeout
    at_work = [worker.work.made + late for worker in pool.crew.workers if worker.work]
    made = [due for due in at_work if due > now]
    crews.more(pool.crew, limits.workers + min(limits.workers, len(at_work) - len(made)))
    for worker in pool.crew.workers:
        if len(made) < limits.workers and worker.ready and not worker.work and _allowed(pool):
            _feed(pool, worker)
            made.append(worker.work.made + late)
    return min(made, default=math.inf)


def _allowed(pool: Pool) -> bool:
    """Whether a call may be made; while the environment is left alone, all calls are refused."""
    bound, now = pool.limits.bound, time.monotonic()
    if not breakers.allows(pool.breaker, now, bound=bound):
        for call in pool.pending:
            pool.failures["refused"] += 1
            pool.finished.append(Answer(
                call.ticket, "refused", f"environment {pool.name!r} failed {pool.breaker.failed} "
                f"times in a row and is left alone; the last failure: {pool.last_failure}",
                now - call.born, call.tries))
        pool.pending.clear()
    return bool(pool.pending)


def _feed(pool: Pool, worker: crews.Worker) -> None:
    pool.breaker = breakers.asked(pool.breaker, bound=pool.limits.bound)
    call = pool.pending.popleft()
    call.tries, call.made = call.tries + 1, time.monotonic()
    crews.give(worker, call, call.body, seconds=pool.limits.timeout)


def _take(pool: Pool, worker: crews.Worker, kind: str, value: Any) -> bool:
    """Act on one reply; false if the worker is to be replaced."""
    if worker.work is None or not (kind == "done" or kind in episodes.FAILURES):
        return False
    crews.answered(pool.crew)
    _settle(pool, worker, kind, value)
    return kind != "memory"  # what it holds on to could fail the next call


def _settle(pool: Pool, worker: crews.Worker, kind: str, value: Any) -> None:
    """Finish the call that a worker was at, or have it made again later."""
    call, now = worker.work, time.monotonic()
    worker.work, worker.deadline = None, math.inf
    limits, pool.spare = pool.limits, SPARE_RESTARTS
    pool.breaker = breakers.told(pool.breaker, kind not in AGAIN, now, bound=limits.bound,
                                 pause=limits.pause)
    if kind != "done":
        pool.failures[kind] += 1
        pool.last_failure = str(value)
    if kind in AGAIN and pool.idempotent and call.tries <= limits.retries:
        pool.failures["retries"] += 1
        pause = min(LONGEST_PAUSE, limits.backoff * 2 ** (call.tries - 1))
        heapq.heappush(pool.paused, (now + pause, next(pool.numbers), call))
    else:
        pool.finished.append(Answer(call.ticket, kind, value, now - call.born, call.tries))


def _lose(pool: Pool, worker: crews.Worker, kind: str, status: int | str) -> None:
    """The call that a worker was at has failed with it."""
    if worker.work:
        _settle(pool, worker, kind, f"{pool.name}: " + (
            f"no answer within {pool.limits.timeout:g} s" if kind == "timeout"
            else f"its worker ended with status {status}"))
    elif pool.spare:
        pool.spare -= 1
    else:
        raise RuntimeError(f"workers for environment {pool.name!r} keep ending without a call, "
                           f"the last with status {status}")
