"""A process that forks a pool's workers in milliseconds, as its parent sees it; see serving.py.

It is asked over a socket and answers at once. A worker is its child, so it is the nursery that
kills the worker, waits for it and tells its status. What the nursery has imported is shared by its
workers' memory until one writes to it.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from dapo_jax.envs import processes

ANSWER_SECONDS = 10.0  # until a request is answered, else the nursery counts as gone
LONGEST = 1 << 14  # bytes of a message from it


@dataclasses.dataclass
class Nursery:
    """The process and the socket to it."""

    process: subprocess.Popen
    control: socket.socket
    mark: str  # the token of the process
    ready: bool = False


@dataclasses.dataclass
class Forked:
    """A worker that a nursery forks: a processes.Process, but for waiting."""

    number: int
    nursery: Nursery
    stdin: IO[bytes]
    stdout: IO[bytes]
    pid: int = 0  # once it is ready
    returncode: int | str | None = None


def possible() -> bool:
    """Whether processes can be forked safely here: it has to be seen that nothing forbids it."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/task")


def open(code: str, mark: str) -> Nursery:
    """Start a nursery, without waiting for it; `code` is a program of serving.py."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(ANSWER_SECONDS)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=its.fileno(), stdout=subprocess.DEVNULL,
            env=processes.surroundings(mark), start_new_session=True)
    return Nursery(process, own, mark)


def told(nursery: Nursery) -> tuple[str, Any]:
    """The message that has come; ("gone", None) if none will."""
    try:
        data = nursery.control.recv(LONGEST)
        kind, value = json.loads(data) if data else ("gone", None)
    except (OSError, ValueError):  # it is late, or what was imported wrote into the socket
        return "gone", None
    return kind, value


def fork(nursery: Nursery, number: int, mark: str) -> Forked:
    """Ask for a worker; where the nursery is gone, the worker's output is at its end at once."""
    theirs, stdin = os.pipe()
    stdout, other = os.pipe()
    try:
        with contextlib.suppress(OSError):
            _send(nursery, ["fork", number, mark], [theirs, other])
    finally:
        os.close(theirs)
        os.close(other)
    os.set_blocking(stdin, False)
    return Forked(number, nursery, os.fdopen(stdin, "wb", buffering=0),
                  os.fdopen(stdout, "rb", buffering=0))


def end(forked: Forked) -> None:
    """Kill a worker and its group, and learn its status; nothing happens to one that is gone."""
    if forked.returncode is None:
        kind, value = "gone", None
        with contextlib.suppress(OSError):
            _send(forked.nursery, ["end", forked.number], [])
            kind, value = told(forked.nursery)
        if kind != "ended":  # then its next answer would be taken for another
            forked.nursery.process.kill()
            value = "unknown, as the process that forked it is gone"
        forked.returncode = value
    forked.stdin.close()
    forked.stdout.close()


def close(nursery: Nursery) -> int:
    """End the nursery; its exit status. Its workers end by themselves, in a second at most."""
    if nursery.process.returncode is None:
        # While it is a zombie at most: then its number is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(nursery.process.pid, signal.SIGKILL)
    nursery.control.close()
    status = nursery.process.wait()
    processes.sweep(nursery.mark)
    return status


def readable(end: Any) -> bool:
    """Whether a message, or the end of all, has come to this end of a socket or pipe."""
    poller = select.poll()  # select knows no descriptors from 1024 on
    poller.register(end, select.POLLIN)
    return bool(poller.poll(0))


def _send(nursery: Nursery, message: list, descriptors: Sequence[int]) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(nursery.control, [data], descriptors) if descriptors else (
        nursery.control.send(data))
