"""The worker processes of a pool, and the conversation with them.

A nursery imports what is served and forks the workers, so that one which is lost is replaced in
milliseconds; where forking is not safe, each is a fresh interpreter. A pool hands out work and acts
on replies; here is what scoring pools and pools of environments have in common: waiting for all
workers at once, sending and receiving without blocking, and replacing what ended or is late.
"""

import dataclasses
import itertools
import json
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from dapo_jax import config
from dapo_jax.envs import nursery as nurseries
from dapo_jax.envs import processes

START_SECONDS = 120.0  # from starting a process to its first word
LONGEST_REPLY = 1 << 20  # bytes of a line; a longer one is no reply
BIRTHS = 8  # nurseries that may be lost without an answer between
NOTHING = memoryview(b"")

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Worker:
    """One process and where the conversation with it stands."""

    process: processes.Process | nurseries.Forked
    mark: str  # the token of the process and of all it starts
    deadline: float  # monotonic seconds; infinite while idle
    ready: bool = False
    unsent: memoryview = NOTHING
    unread: bytes = b""
    work: Any = None  # what the pool has given it
    begun: bool = False  # at its work, where it says so


Take = Callable[[Worker, str, Any], bool]  # act on a reply; false: the worker is to be replaced
Lose = Callable[[Worker, str, int | str], None]  # ended: "ended" or "timeout", and its status


@dataclasses.dataclass
class Crew:
    """The processes of one pool."""

    name: str  # what they serve, for messages: "reward 'a:b'"
    able: str  # what a worker that is ready can do: "score"
    program: Callable[[bool], str]  # of serving.py, for a worker or a nursery
    count: int  # workers that are wanted
    mark: str  # begins the token of each process
    numbers: Iterator[int]
    workers: list[Worker]
    nursery: nurseries.Nursery | None = None
    born: float = 0.0  # monotonic seconds, of the nursery
    births: int = BIRTHS  # left
    forks: bool = True
    spares: int = 0  # workers beyond `count` that are kept ready, where they are forked
    closed: bool = False


def open(name: str, program: Callable[[bool], str], *, count: int, able: str, spares: int = 0
         ) -> Crew:
    """Start the processes without waiting for them."""
    crew = Crew(name, able, program, count, processes.token(), itertools.count(), [],
                forks=nurseries.possible(), spares=spares)
    try:
        _fill(crew)
    except BaseException:
        close(crew)
        raise
    return crew


def close(crew: Crew) -> None:
    """Kill the processes and what they started; nothing happens to a crew that is closed."""
    if crew.closed:
        return
    crew.closed = True
    while crew.workers:
        _end(crew.workers.pop())
    if crew.nursery:
        nurseries.close(crew.nursery)
    processes.sweep(crew.mark)


def complete(crew: Crew) -> bool:
    """Whether all workers that are wanted are ready."""
    return len(crew.workers) >= crew.count and all(worker.ready for worker in crew.workers)


def more(crew: Crew, count: int) -> None:
    """Have so many workers from now on."""
    if count > crew.count:
        crew.count = count
        _fill(crew)


def answered(crew: Crew) -> None:
    """A worker has answered: its nursery was of use."""
    crew.births = BIRTHS


def give(worker: Worker, work: Any, data: bytes, *, seconds: float) -> None:
    """Send a worker its request, which it has to answer within so many seconds."""
    worker.work, worker.begun, worker.unsent = work, False, memoryview(data)
    worker.deadline = time.monotonic() + seconds


def advance(crew: Crew, seconds: float, *, take: Take, lose: Lose) -> None:
    """Wait for the next event, up to so many seconds, and act on it.

    ConfigError: what is served cannot be imported. RuntimeError: its nurseries keep ending.
    """
    events = _wait(crew, seconds)
    for worker in list(crew.workers):
        if worker.process.stdin.fileno() in events:
            _send(worker)
        if worker.process.stdout.fileno() in events:
            if not _receive(crew, worker, take):
                _replace(crew, worker, "ended", lose)
        elif time.monotonic() > worker.deadline:
            _replace(crew, worker, "timeout", lose)
    if crew.nursery:
        _hear(crew, crew.nursery, take, lose)


# ----------------------------------------------------------------------------------------- talking


def _wait(crew: Crew, seconds: float) -> set[int]:
    """File descriptors that can be read or written, after at most a second."""
    poller, due = select.poll(), [time.monotonic() + min(seconds, 1.0)]
    for worker in crew.workers:
        poller.register(worker.process.stdout, select.POLLIN)
        if worker.unsent:
            poller.register(worker.process.stdin, select.POLLOUT)
        due.append(worker.deadline)
    if crew.nursery:
        poller.register(crew.nursery.control, select.POLLIN)
    left = min(due) - time.monotonic()
    return {descriptor for descriptor, _ in poller.poll(math.ceil(1000 * max(0.0, left)))}


def _send(worker: Worker) -> None:
    try:
        worker.unsent = worker.unsent[os.write(worker.process.stdin.fileno(), worker.unsent):]
    except BrokenPipeError:  # the worker is dead: reading from it says so next
        worker.unsent = NOTHING


def _receive(crew: Crew, worker: Worker, take: Take) -> bool:
    """Take the replies that have come; false at the end of the pipe, or if one is no reply."""
    data = os.read(worker.process.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        try:
            kind, value = json.loads(line)
        except ValueError:  # what is served found the pipe and wrote into it
            return False
        if not _take(crew, worker, kind, value, take):
            return False
    return bool(data) and len(worker.unread) < LONGEST_REPLY


def _take(crew: Crew, worker: Worker, kind: str, value: Any, take: Take) -> bool:
    if kind == "failed":
        raise config.ConfigError(f"{crew.name} cannot be used: {value}")
    if kind == "ready":
        worker.ready, worker.deadline, worker.process.pid = True, math.inf, value
        return True
    return take(worker, kind, value)


# --------------------------------------------------------------------------------- births and ends


def _fill(crew: Crew) -> None:
    """Start the workers that are missing, or first the nursery that forks them."""
    if crew.forks and crew.nursery is None:
        mark = processes.numbered(crew.mark, next(crew.numbers))
        crew.nursery = nurseries.open(crew.program(True), mark)
        crew.born = time.monotonic()
    wanted = crew.count + (crew.spares if crew.nursery else 0)
    while len(crew.workers) < wanted and not (crew.nursery and not crew.nursery.ready):
        number = next(crew.numbers)
        mark = processes.numbered(crew.mark, number)
        process = (nurseries.fork(crew.nursery, number, mark) if crew.nursery
                   else processes.start(crew.program(False), mark))
        crew.workers.append(Worker(process, mark, time.monotonic() + START_SECONDS))


def _end(worker: Worker) -> None:
    if isinstance(worker.process, nurseries.Forked):
        nurseries.end(worker.process)
    else:
        processes.end(worker.process)
    processes.sweep(worker.mark)


def _replace(crew: Crew, worker: Worker, kind: str, lose: Lose) -> None:
    """Start a worker in place of one that ended or is late."""
    crew.workers.remove(worker)
    _end(worker)
    status = worker.process.returncode
    assert status is not None, "it has ended"
    if not (worker.ready or crew.nursery):
        raise _unready(crew, status)
    if status == -signal.SIGALRM:  # its own alarm, since this process did not get to run
        kind = "timeout"
    lose(worker, kind, status)
    _fill(crew)


def _unready(crew: Crew, status: int | str) -> config.ConfigError:
    return config.ConfigError(f"a worker for {crew.name} ended with status {status} before it "
                              f"could {crew.able}, or took over {START_SECONDS:g} s")


def _hear(crew: Crew, nursery: nurseries.Nursery, take: Take, lose: Lose) -> None:
    """What the nursery says: that it is ready, or why it is none; or that it has ended."""
    late = not nursery.ready and time.monotonic() > crew.born + START_SECONDS
    if not (late or nurseries.readable(nursery.control)):
        return
    kind, value = ("gone", None) if late else nurseries.told(nursery)
    if kind == "failed":
        raise config.ConfigError(f"{crew.name} cannot be used: {value}")
    nursery.ready = nursery.ready or kind == "ready"
    if kind == "unsafe":
        _log.warning("%s: %s; so its workers are not forked, and each takes as long to start as "
                     "its import does", crew.name, value)
        crew.forks = False
    if kind in ("gone", "unsafe"):
        _bereave(crew, nursery, take, lose, lost=kind == "gone")
    _fill(crew)


def _bereave(
    crew: Crew, nursery: nurseries.Nursery, take: Take, lose: Lose, *, lost: bool
) -> None:
    """Do without a nursery; its workers end with it, but what they have answered counts."""
    status, crew.nursery = nurseries.close(nursery), None
    if lost and not nursery.ready:
        raise _unready(crew, status)
    for worker in crew.workers:  # an answer may have come since `_wait` looked
        while nurseries.readable(worker.process.stdout) and _receive(crew, worker, take):
            pass
    if lost and not crew.births:
        raise RuntimeError(f"the process that forks workers for {crew.name} keeps ending, the last "
                           f"time with status {status}")
    crew.births -= lost
    orphans, crew.workers = crew.workers, []
    for worker in orphans:
        _end(worker)
        if worker.work:
            lose(worker, "ended", f"of the process that forked it, {status}")
