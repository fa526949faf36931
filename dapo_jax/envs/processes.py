"""Processes that are killed together with all that they started.

A process leads a session and a process group of its own. What leaves the group (setsid, a daemon)
is found by a token that it inherits in its environment.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from typing import IO, Protocol, cast

TOKEN = "DAPO_JAX_SCORER"  # noqa: S105 (a name in the environment, no secret)
ROUNDS = 5  # looks at the process list, should something be forking meanwhile


def token() -> str:
    """A name that no other process in this machine carries."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def numbered(mark: str, number: int) -> str:
    """The token of one process of several; all are equally long, as `rename` wants them."""
    return f"{mark}.{number:09d}."


def crew_of(mark: str) -> str:
    """What begins the tokens of all of several processes, from that of one."""
    return mark[:mark.rindex(".", 0, -1) + 1]


class Process(Protocol):
    """What is used of a subprocess.Popen whose input and output are pipes."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def piped(process: subprocess.Popen[bytes]) -> Process:
    """The same process: its pipes were asked for, which its type does not say."""
    return cast(Process, process)


def start(code: str, mark: str) -> Process:
    """A fresh interpreter that runs `code`, with unbuffered pipes to and from it."""
    process = piped(subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        env=surroundings(mark), start_new_session=True))
    os.set_blocking(process.stdin.fileno(), False)
    return process


def surroundings(mark: str) -> dict[str, str]:
    """The environment that a process of a pool gets."""
    # A reward that imports jax must not take the accelerator, nor its threads all cores.
    return {"OMP_NUM_THREADS": "1", **os.environ, "JAX_PLATFORMS": "cpu", TOKEN: mark}


def end(process: Process) -> None:
    """Kill a process and its group; nothing happens to one that is gone."""
    if process.returncode is None:
        # Before waiting for it, while nobody else can have its number. Its group may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdin.close()
    process.stdout.close()


def sweep(mark: str) -> None:
    """Kill every process whose token begins with `mark`, but for this one."""
    for _ in range(ROUNDS):
        found = [pid for pid in _marked(f"{TOKEN}={mark}".encode()) if pid != os.getpid()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _marked(entry: bytes) -> list[int]:
    """Processes with an entry in their environment that begins so; none where there is no /proc."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            # Of other users, or gone; that of a process that ended but was not waited for is empty.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if b"\0" + entry in b"\0" + file.read():
                    found.append(int(name))
    return found


def token_place() -> int:
    """Where in its memory this process's token stands, as it was when the process began.

    There the kernel reads what it shows of the environment, whatever is set later.
    """
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(TOKEN.encode())
    if not place:
        raise RuntimeError(f"this process was started without {TOKEN} in its environment")
    return place


def rename(place: int, mark: str) -> None:
    """Give this process, a fork of the one that `place` was found in, a token of its own."""
    if len(ctypes.string_at(place)) != len(mark):
        raise ValueError(f"the token {mark!r} is not as long as the one in its place")
    ctypes.memmove(place, mark.encode(), len(mark))
    os.environ[TOKEN] = mark
