"""One scoring process: reads chunks of (text, record), answers item by item. See pool.py.

A request is a pickled list. A reply is a line of JSON, [kind, value]: "ready"; "failed" with the
reason why the worker cannot serve; "begin" for each chunk; then for each item "score" with the task
reward and the parts, or a kind of faults.KINDS with a message. After "memory" the pool replaces the
worker, as what it holds on to could fail the next items; after "leaving" too, at no item's cost.
"""

import json
import os
import pickle
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from dapo_jax import config
from dapo_jax.envs import faults, parts, processes

MESSAGE = 500  # characters of an error that are passed on


def program(reward: str, weights: tuple, cfg: config.Scoring) -> str:
    """What a fresh interpreter runs to be a worker."""
    return (f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; "
            f"main({reward!r}, {weights!r}, timeout={cfg.timeout!r}, memory_mb={cfg.memory_mb!r})")


def main(reward: str, weights: tuple, *, timeout: float, memory_mb: int) -> None:
    """Serve the reward function until the pipe closes."""
    # Ctrl-C ends the parent, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, replies = private_pipes()
    threading.Thread(target=leave_with_parent, args=(requests.fileno(),), daemon=True).start()
    scorer = None
    try:
        limit_memory(memory_mb)
        scorer = parts.scorer(reward, parts.weights(weights))
        reply(replies, "ready", None)
        while True:
            _serve(scorer, pickle.load(requests), timeout, replies)
    except EOFError:
        return
    except BaseException as error:  # also SystemExit, from a module that exits while imported
        starved = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        if starved and scorer:  # by what earlier items left: another worker takes what is left
            reply(replies, "leaving", None)
        else:
            hint = f" (config.scoring.memory_mb = {memory_mb})" if starved else ""
            reply(replies, "failed", f"{type(error).__name__}: {error}{hint}")


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, out of reach of the reward's prints, reads and child processes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # A fork inherits them though a new program does not. By number: closing the buffered file
    # object could wait for a lock that a thread of the parent holds.
    pipes = (requests.fileno(), replies.fileno())

    def close() -> None:
        for pipe in pipes:
            os.close(pipe)

    os.register_at_fork(after_in_child=close)
    return requests, replies


def limit_memory(memory_mb: int) -> None:
    """Let an allocation beyond the limit raise MemoryError. Forked processes inherit the limit."""
    if memory_mb:
        # Data, not address space: libraries map and reserve far more than they ever use.
        size = memory_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def leave_with_parent(requests: int) -> None:
    """End the process, and all it started, with its parent, though an item is still running."""
    parent = os.getppid()
    poller = select.poll()
    poller.register(requests, 0)  # only hang-ups
    # A fork of the parent may keep the pipe open, hence the look at the parent itself.
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    processes.sweep(os.environ[processes.TOKEN])
    os.killpg(0, signal.SIGKILL)


def _serve(scorer: parts.Scorer, items: list, timeout: float, replies: BinaryIO) -> None:
    reply(replies, "begin", None)
    here = os.getpid()
    for text, record in items:
        # The parent kills a late worker. If the parent is gone and a C function keeps the
        # interpreter from noticing (a regular expression does), the kernel's alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        found = _answer(scorer, text, record)
        if os.getpid() != here:
            os._exit(0)  # the reward forked, and the child came back from it too
        reply(replies, *found)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(scorer: parts.Scorer, text: str, record: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return "score", parts.numbers(scorer, text, record)
    except parts.NoScore as error:
        return error.kind, str(error)
    except MemoryError:
        return "memory", f"{scorer.name} needed more memory than scoring.memory_mb"
    except faults.UnusableRecord as error:
        return "record", str(error)
    except BaseException as error:  # sys.exit() in a reward costs its item only
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = traceback.format_exception_only(error)[-1].strip()
        return "error", f"{scorer.name}: {frame.filename}:{frame.lineno}: {reason}"


def reply(replies: BinaryIO, kind: str, value: Any) -> None:
    """Send one line; a text is cut at MESSAGE characters."""
    value = value[:MESSAGE] if isinstance(value, str) else value
    line = json.dumps([kind, value]).encode() + b"\n"
    while line:
        line = line[replies.write(line):]
