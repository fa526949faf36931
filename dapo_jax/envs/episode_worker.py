"""An environment in a worker process: reads a request, answers it. See episode_pool.py.

A request is a pickled tuple, ("start", record, seed) or ("step", state, text), whose state is the
bytes that an earlier reply held: only workers ever unpickle one. A reply, beside those of
serving.py, is "done" with what was asked for, or a kind of episodes.FAILURES with a message.
"""

import base64
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from dapo_jax.envs import environments, episodes, faults, parts, serving

LARGEST_STATE = 1 << 18  # bytes of a pickle


def program(name: str, *, timeout: float, memory_mb: int, nursery: bool) -> str:
    """What a fresh interpreter runs to be a worker of the environment, or to fork them."""
    return serving.program(__name__, name, timeout=timeout, memory_mb=memory_mb, nursery=nursery)


def main(name: str, *, timeout: float, memory_mb: int, nursery: bool) -> None:
    """Serve the environment until the pipe closes."""
    serving.run(serving.Service(
        lambda: _prepared(name),
        lambda environment, request, replies: _serve(environment, request, timeout, replies),
        memory_mb, "config.environment.memory_mb"), nursery=nursery)


def _prepared(name: str) -> episodes.Environment:
    environment = environments.environment(name)
    environment.ready()
    return environment


def _serve(environment: episodes.Environment, request: tuple, timeout: float,
           replies: BinaryIO) -> None:
    here = os.getpid()
    # Should the parent be gone, and a C function keep the interpreter from noticing.
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
    kind, value = answer(environment, request)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.getpid() != here:
        os._exit(0)  # the environment forked, and the child came back from it too
    serving.reply(replies, kind, value)


def answer(environment: episodes.Environment, request: tuple) -> tuple[str, Any]:
    """The kind of what came of a request, and the value or message."""
    name, starts = environment.name, request[0] == "start"
    try:
        if starts:
            return _started(name, environment.start(*request[1:]))
        return _stepped(name, environment.step(_state(request[1]), request[2]))
    except parts.NoScore as error:
        return error.kind, str(error)
    except MemoryError:
        return "memory", f"environment {name} needed more memory than its limit"
    except faults.UnusableRecord as error:
        return "record", str(error)
    except BaseException as error:  # sys.exit() in an environment costs its episode only
        frame = _frame(error, environment.start if starts else environment.step)
        reason = traceback.format_exception_only(error)[-1].strip()
        return "error", f"{name}: {frame.filename}:{frame.lineno}: {reason}"


def _frame(error: BaseException, function: Callable) -> traceback.FrameSummary:
    """Where an error came to be: the last place in the function's own file, else the last of all,
    which may lie in a library that its author does not know."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(getattr(function, "__code__", None), "co_filename", "")
    return ([frame for frame in frames if frame.filename == own] or frames)[-1]


def _started(name: str, found: Any) -> tuple[str, Any]:
    if fault := episodes.fault_of_start(found):
        return "turn", f"{name}: {fault}"
    return _with_state(f"{name}: start", found[0],
                       {"messages": [dict(message) for message in found[1]]})


def _stepped(name: str, turn: Any) -> tuple[str, Any]:
    if fault := episodes.fault_of_turn(turn):
        return "turn", f"{name}: {fault}"
    return _with_state(f"{name}: step", turn.state, {
        "reply": turn.reply, "reward": float(turn.reward), "done": turn.done,
        "parts": {name: float(value) for name, value in turn.parts.items()}})


def _with_state(what: str, state: episodes.State, value: dict) -> tuple[str, Any]:
    try:
        data = pickle.dumps(state)
    except MemoryError:
        raise
    except Exception as error:  # objects say themselves how they are pickled
        return "turn", (f"{what} returned a state that cannot be pickled: {type(error).__name__}: "
                        f"{error}; keep numbers, texts, lists and dicts in it, and make the rest "
                        "of them anew")
    if len(data) > LARGEST_STATE:
        return "turn", f"{what} returned a state of {len(data)} bytes, more than {LARGEST_STATE}"
    return "done", value | {"state": base64.b64encode(data).decode("ascii")}


def _state(data: bytes) -> episodes.State:
    """The state that an earlier call returned, perhaps in another worker."""
    try:
        return pickle.loads(data)
    except MemoryError:
        raise
    except Exception as error:
        raise parts.NoScore("turn", "a state was pickled, but cannot be read again: "
                            f"{type(error).__name__}: {error}; keep numbers, texts, lists and "
                            "dicts in it") from error
