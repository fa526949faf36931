"""Strangers' Python in a locked-down process: no network, no disk but a small tmpfs, bounded.

Two mechanisms, each tried by a program that attempts what must fail; the first that stands is used,
and without one nothing is run:

- "namespaces": user, pid, mount, network, IPC, UTS and cgroup namespaces (sandbox_launch.py)
- "bubblewrap": Debian's `bwrap`, for machines that allow such namespaces to it alone

Both with resource limits (sandbox_inner.py). What can be read inside is the interpreter's
installation and the system's libraries. It is a kernel boundary, not a virtual machine: a hole in
the kernel's system calls is a hole in it.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from typing import cast

from dapo_jax import config
from dapo_jax.envs import processes, sandbox_inner

LONGEST_CODE = 1 << 15  # bytes; fits a pipe's buffer, so writing it never waits
START_SECONDS = 30.0  # until the program starts; beyond them and its limit it ends by itself
TRY_SECONDS = 20.0  # for the program that tries a mechanism
CANARY = "sandbox holds"

# Each line must fail inside; then it says CANARY.
ATTEMPTS = """
import os, socket, pathlib
def fails(attempt):
    try:
        attempt()
    except (OSError, AttributeError):
        return
    raise SystemExit(f"could {attempt.__name__}")
def reach_the_network(): socket.create_connection(("192.0.2.1", 9), 1)
def read_the_disk(): pathlib.Path(%r).read_bytes()
def write_outside_tmp(): pathlib.Path("/usr/lib/x").write_text("")
def see_other_processes(): os.kill(%d, 0)
def become_root(): os.setuid(0) if os.getuid() else os.chroot("/")
def fork_without_limit():
    children = []
    try:
        for _ in range(64):
            children.append(os.fork())
            if not children[-1]:
                os.read(pipe[0], 1)
                os._exit(0)
    finally:
        os.close(pipe[1])
pipe = os.pipe()
for attempt in (reach_the_network, read_the_disk, write_outside_tmp, see_other_processes,
                become_root, fork_without_limit):
    fails(attempt)
print(%r)
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one run. Memory in all is at most `memory_mb` times `processes`, and `disk_mb`."""

    seconds: float = 2.0  # wall clock
    memory_mb: int = 256  # address space of each process
    processes: int = 8  # with threads
    output: int = 4096  # bytes of stdout and stderr together; what writes more is ended
    disk_mb: int = 16  # of /tmp


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a program printed and how it ended."""

    output: str  # cut at Limits.output bytes
    ended: str  # "exit", "time" (killed at the limit) or "output" (killed for too much of it)
    status: int  # exit status; of a program that was killed 256 - signal, or -9 if from outside


def run(code: str, limits: Limits = Limits(), *, mechanism: str = "") -> Ran:
    """Run Python source; ConfigError if no mechanism stands here, ValueError if it is too long.

    `mechanism` is a name of MECHANISMS; empty: the first that stands. RuntimeError: the sandbox
    itself could not be made.
    """
    source = code.encode("utf-8", "replace")
    if len(source) > LONGEST_CODE:
        raise ValueError(f"code of {len(source)} bytes, more than {LONGEST_CODE}")
    command = MECHANISMS[mechanism or available()](limits)
    # The environment has no more than the token by which the pool's sweep finds the launcher.
    environment = {name: os.environ[name] for name in (processes.TOKEN,) if name in os.environ}
    process = processes.piped(subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
        env=environment, start_new_session=True))
    try:
        process.stdin.write(source)
        process.stdin.close()
        output, ended = _read(process, limits)
    finally:
        processes.end(process)
    return Ran(output.decode("utf-8", "replace"), ended, cast(int, process.returncode))


def _read(process: processes.Process, limits: Limits) -> tuple[bytes, str]:
    """Bytes until the end of output, the limit of bytes or of time, and which it was."""
    started = _some(process, time.monotonic() + START_SECONDS, size=1)
    if started != sandbox_inner.STARTED:
        raise RuntimeError("the sandbox could not be made: " + (
            f"nothing within {START_SECONDS:g} s" if started is None
            else (started + (_some(process, time.monotonic() + 1) or b"")).decode(
                "utf-8", "replace")[:300].strip()))
    deadline, found = time.monotonic() + limits.seconds, b""
    while True:
        data = _some(process, deadline)
        if data is None:
            return found, "time"
        found += data
        if len(found) > limits.output:
            return found[:limits.output], "output"
        if not data:
            return found, "exit" if _waited(process, deadline) else "time"


def _some(process: processes.Process, deadline: float, *, size: int = 1 << 16) -> bytes | None:
    """What has been printed, empty at the end of it; None if nothing is before the deadline."""
    left = max(0.0, deadline - time.monotonic())
    if not select.select([process.stdout], [], [], left)[0]:
        return None
    return os.read(process.stdout.fileno(), size)


def _waited(process: processes.Process, deadline: float) -> bool:
    # A program may close its output and run on.
    try:
        process.wait(max(0.0, deadline - time.monotonic()) + 0.05)
    except subprocess.TimeoutExpired:
        return False
    return True


@functools.lru_cache
def available() -> str:
    """Name of the first mechanism that stands on this machine; ConfigError says why none does."""
    reasons = []
    for name in MECHANISMS:
        reason = fault(name)
        if not reason:
            return name
        reasons.append(f"{name}: {reason}")
    raise config.ConfigError(
        "no sandbox for strangers' code stands on this machine, so none is run. Install "
        "bubblewrap, or allow unprivileged user namespaces (sysctl user.max_user_namespaces, "
        f"kernel.unprivileged_userns_clone). {'; '.join(reasons)}")


def fault(name: str) -> str:
    """Why a mechanism cannot be used; empty if it withstands everything that ATTEMPTS does."""
    code = ATTEMPTS % (__file__, os.getpid(), CANARY)
    try:
        ran = run(code, Limits(seconds=TRY_SECONDS), mechanism=name)
    except (OSError, RuntimeError) as error:
        return str(error)
    held = ran.ended == "exit" and ran.output.strip() == CANARY
    return "" if held else ran.output.strip()[-300:] or f"ended by {ran.ended}, {ran.status}"


def _visible() -> list[str]:
    """Paths that an interpreter needs."""
    installed = [sys.base_prefix] if sys.base_prefix not in ("/usr", "/") else [_interpreter()]
    libraries = [path for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
                 if os.path.lexists(path)]
    return [*libraries, *installed]


def _interpreter() -> str:
    # The file itself: sys.executable of a virtual environment points elsewhere.
    return os.path.realpath(sys.executable)


def _program(limits: Limits) -> list[str]:
    text = pathlib.Path(__file__).with_name("sandbox_inner.py").read_text()
    size = limits.memory_mb << 20
    resources = {"RLIMIT_AS": size, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 64,
                 "RLIMIT_FSIZE": limits.disk_mb << 20, "RLIMIT_MSGQUEUE": 0,
                 "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
                 # The launcher and process 1 count where they are the same user.
                 "RLIMIT_NPROC": limits.processes + 2}
    return [_interpreter(), "-I", "-S", "-c", text, json.dumps(resources)]


def _namespaces(limits: Limits) -> list[str]:
    spec = {"seconds": limits.seconds + START_SECONDS, "disk_mb": limits.disk_mb,
            "visible": _visible(), "program": _program(limits)}
    return [_interpreter(), "-I", "-S", str(pathlib.Path(__file__).with_name("sandbox_launch.py")),
            json.dumps(spec)]


def _bubblewrap(limits: Limits) -> list[str]:
    program = shutil.which("bwrap")
    if not program:
        raise FileNotFoundError("bwrap is not installed (Debian: bubblewrap)")
    shown = [part for path in _visible() for part in (
        ("--symlink", os.readlink(path), path) if os.path.islink(path)
        else ("--ro-bind", path, path))]
    return [program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
            "--new-session", "--cap-drop", "ALL", "--clearenv", *shown, "--dev", "/dev",
            "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp",  # noqa: S108
            "--remount-ro", "/", "--", *_program(limits)]


MECHANISMS = {"namespaces": _namespaces, "bubblewrap": _bubblewrap}
