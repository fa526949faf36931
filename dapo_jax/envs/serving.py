"""What runs in a pool's processes: workers that answer requests, and the one that forks them.

A worker reads pickled requests and writes lines of JSON, [kind, value]: "ready" with its number of
process; "failed" with the reason why it cannot serve; "leaving" where earlier requests left it
without memory, so that another worker takes what is left; else what its service says. A nursery
imports what is served once, then forks a worker in milliseconds for each request. It stays
single-threaded, since a fork of a process with threads may hang at a lock of theirs.
"""

import contextlib
import dataclasses
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from dapo_jax.envs import processes

MESSAGE = 500  # characters of an error that are passed on
REQUEST = 1 << 12  # bytes of a message to the nursery, at most
THREAD_SECONDS = 1.0  # that a thread which was joined may take to be gone


@dataclasses.dataclass(frozen=True)
class Service:
    """What a pool's processes do, beside reading and writing."""

    prepare: Callable[[], Any]  # imports what is served
    serve: Callable[[Any, Any, BinaryIO], None]  # (prepared, request, replies)
    memory_mb: int
    setting: str  # the field that sets it


def program(module: str, *arguments: Any, **named: Any) -> str:
    """What a fresh interpreter runs: `module.main` with these arguments, which repr() spells."""
    given = [repr(value) for value in arguments]
    given += [f"{name}={value!r}" for name, value in named.items()]
    return (f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
            f"main({', '.join(given)})")


def run(service: Service, *, nursery: bool) -> None:
    """Be a worker on standard input and output, or a nursery on the socket at standard input."""
    # Ctrl-C ends the parent, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if nursery:
        _nurse(service)
    else:
        _work(service, service.prepare)


def reply(replies: BinaryIO, kind: str, value: Any) -> None:
    """Send one line; a text is cut at MESSAGE characters."""
    line = _line(kind, value)
    while line:
        line = line[replies.write(line):]


def _line(kind: str, value: Any) -> bytes:
    return json.dumps([kind, value[:MESSAGE] if isinstance(value, str) else value]).encode() + b"\n"


# ------------------------------------------------------------------------------------------ worker


def _work(service: Service, prepare: Callable[[], Any]) -> None:
    """Serve until the pipe closes."""
    requests, replies = _private_pipes()
    threading.Thread(target=_leave_with_parent, args=(requests.fileno(),), daemon=True).start()
    prepared = None
    try:
        _limit_memory(service.memory_mb)
        prepared = prepare()
        reply(replies, "ready", os.getpid())
        while True:
            service.serve(prepared, pickle.load(requests), replies)
    except EOFError:
        return
    except BaseException as error:  # also SystemExit, from a module that exits while imported
        if _starved(error) and prepared is not None:
            reply(replies, "leaving", None)
        else:
            reply(replies, "failed", _fault(service, error))


def _starved(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)


def _fault(service: Service, error: BaseException) -> str:
    hint = f" ({service.setting} = {service.memory_mb})" if _starved(error) else ""
    return f"{type(error).__name__}: {error}{hint}"


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, out of reach of what is served: prints, reads, child processes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    _quiet()
    # A fork inherits them though a new program does not. By number: closing the buffered file
    # object could wait for a lock that a thread of the parent holds.
    pipes = (requests.fileno(), replies.fileno())

    def close() -> None:
        for pipe in pipes:
            os.close(pipe)

    os.register_at_fork(after_in_child=close)
    return requests, replies


def _quiet() -> None:
    """Nothing to read, and what is printed goes to standard error."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)


def _limit_memory(memory_mb: int) -> None:
    """Let an allocation beyond the limit raise MemoryError. Forked processes inherit the limit."""
    if memory_mb:
        # Data, not address space: libraries map and reserve far more than they ever use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))


@contextlib.contextmanager
def _limited(memory_mb: int) -> Iterator[None]:
    """The same for a while."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _leave_with_parent(pipe: int, *, until: int = -1) -> None:
    """End the process, and all it started, with its parent, though it is still busy.

    Returns once the pipe `until`, if there is one, is closed at its other end.
    """
    parent = os.getppid()
    poller = select.poll()
    poller.register(pipe, 0)  # only hang-ups
    if until >= 0:
        poller.register(until, 0)
    events: dict[int, int] = {}
    # A fork of the parent may keep the pipe open, hence the look at the parent itself.
    while not events and os.getppid() == parent:
        events = dict(poller.poll(1000))
        if until in events:
            return
    processes.sweep(os.environ[processes.TOKEN])
    os.killpg(0, signal.SIGKILL)


# ----------------------------------------------------------------------------------------- nursery


def _nurse(service: Service) -> None:
    """Import what is served, then fork workers until the parent closes the socket.

    Told are "ready", "failed", or "unsafe" with the reason why what was imported cannot be forked.
    A request is ["fork", number, token] with a worker's two pipes, or ["end", number], which is
    answered by "ended" and the worker's status.
    """
    control = socket.socket(fileno=os.dup(0))
    _quiet()
    token, before = processes.token_place(), _descriptors()
    try:
        with _watched(control), _limited(service.memory_mb):
            prepared = service.prepare()
    except BaseException as error:  # also SystemExit, from a module that exits while imported
        control.send(_line("failed", _fault(service, error)))
        return
    reason = _unsafe(before)
    sys.stdout.flush()  # else each worker would print it again
    gc.freeze()  # a collection would write into pages that all share
    control.send(_line("unsafe" if reason else "ready", reason))
    children: dict[int, int | str] = {}  # number -> process, or why there is none
    while True:
        message, pipes, _, _ = socket.recv_fds(control, REQUEST, 2)
        if not message:
            break
        kind, number, *mark = json.loads(message)
        if kind == "fork":
            children[number] = _fork(service, prepared, control, pipes, token, *mark)
        else:
            control.send(_line("ended", _ended(children.pop(number))))
    for child in children.values():
        _ended(child)
    processes.sweep(processes.crew_of(os.environ[processes.TOKEN]))  # what they started, too
    os._exit(0)


@contextlib.contextmanager
def _watched(control: socket.socket) -> Iterator[None]:
    """End with the parent while this goes on; afterwards there is no thread of ours any more."""
    waiting, done = os.pipe()
    watcher = threading.Thread(target=_leave_with_parent, args=(control.fileno(),),
                               kwargs={"until": waiting}, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(done)
        watcher.join()
        os.close(waiting)


def _unsafe(before: set[str]) -> str:
    """Why this process cannot be forked; empty if it can."""
    limit = time.monotonic() + THREAD_SECONDS
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < limit:
        time.sleep(0.01)  # a thread is joined before the kernel has forgotten it
    if threads > 1:
        return f"its import leaves {threads - 1} threads running"
    opened = sorted(_descriptors() - before)
    if opened:
        return f"its import leaves open {opened[0].partition(' ')[2]}"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "its import leaves a process behind"
    return ""


def _descriptors() -> set[str]:
    """Number and target of each open file."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def _fork(service: Service, prepared: Any, control: socket.socket, pipes: list[int], token: int,
          mark: str) -> int | str:
    """The process of a new worker, or why there is none."""
    try:
        child = os.fork()
    except OSError as error:
        child, reason = -1, f"{type(error).__name__}: {error}"
    if child == 0:
        try:
            os.setsid()
            control.close()
            _be_worker(service, prepared, pipes, token, mark)
        finally:  # of what the nursery would do at its end, nothing is the worker's
            os._exit(0)
    for pipe in pipes:
        os.close(pipe)
    return reason if child < 0 else child


def _be_worker(service: Service, prepared: Any, pipes: list[int], token: int, mark: str) -> None:
    for pipe, standard in zip(pipes, (0, 1), strict=True):
        os.dup2(pipe, standard)
        os.close(pipe)
    processes.rename(token, mark)
    if "numpy.random" in sys.modules:  # as the standard library does itself
        sys.modules["numpy.random"].seed()
    _work(service, lambda: prepared)


def _ended(child: int | str) -> int | str:
    """The exit status of a worker that is killed, unless it has ended before."""
    if isinstance(child, str):
        return child
    # Its number is its own until it is waited for here. It may not lead its group yet.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
