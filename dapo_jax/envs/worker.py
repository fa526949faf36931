"""One scoring process: reads chunks of (text, record), answers item by item. See pool.py.

A request is a pickled list. A reply is a line of JSON, [kind, value]: "ready"; "failed" with the
reason why the worker cannot serve; "begin" for each chunk; then for each item "score" with a
number, "error" with a message, or "type" with the name of a type that is no reward.
"""

import json
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from dapo_jax.envs import base

F32_MAX = 3.4028234e38  # a reward beyond it would be infinite in f32
MESSAGE = 500  # characters of an error that are passed on


def main(reward: str, timeout: float) -> None:
    """Serve the reward function until the pipe closes."""
    # Ctrl-C ends the parent, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, replies = _private_pipes()
    threading.Thread(target=_leave_with_parent, args=(requests.fileno(),), daemon=True).start()
    try:
        function = base.resolve_reward(reward)
        _reply(replies, "ready", None)
        while True:
            _serve(function, pickle.load(requests), timeout, replies)
    except EOFError:
        return
    except BaseException as error:  # also SystemExit, from a module that exits while imported
        _reply(replies, "failed", f"{type(error).__name__}: {error}")


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, out of reach of the reward's prints, reads and child processes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _leave_with_parent(requests: int) -> None:
    """End the process with its parent, though an item is still running."""
    parent = os.getppid()
    poller = select.poll()
    poller.register(requests, 0)  # only hang-ups
    # A fork of the parent may keep the pipe open, hence the look at the parent itself.
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def _serve(function: Callable[..., Any], items: list, timeout: float, replies: BinaryIO) -> None:
    _reply(replies, "begin", None)
    for text, record in items:
        # The parent kills a late worker. If the parent is gone and a C function keeps the
        # interpreter from noticing (a regular expression does), the kernel's alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        _reply(replies, *_answer(function, text, record))
    signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(function: Callable[..., Any], text: str, record: dict) -> tuple[str, Any]:
    try:
        value = function(text, record)
        if isinstance(value, dict):
            if "score" not in value:
                return "type", "dict without 'score'"
            value = value["score"]
        if not _is_number(value):
            return "type", type(value).__name__
        number = float(value)
    except BaseException as error:  # sys.exit() in a reward costs its item only
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = traceback.format_exception_only(error)[-1].strip()
        return "error", f"{frame.filename}:{frame.lineno}: {reason}"
    return ("score", number) if abs(number) <= F32_MAX else ("error", f"the reward is {number}")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    numpy = sys.modules.get("numpy")  # not imported: then it is no numpy scalar
    return numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating))


def _reply(replies: BinaryIO, kind: str, value: Any) -> None:
    value = value[:MESSAGE] if isinstance(value, str) else value
    line = json.dumps([kind, value]).encode() + b"\n"
    while line:
        line = line[replies.write(line):]
