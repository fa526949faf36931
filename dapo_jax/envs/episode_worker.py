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
    try:
        if request[0] == "start":
            return _started(environment.start(*request[1:]))
        return _stepped(environment.step(pickle.loads(request[1]), request[2]))
    except parts.NoScore as error:
        return error.kind, str(error)
    except MemoryError:
        return "memory", f"environment {environment.name} needed more memory than its limit"
    except faults.UnusableRecord as error:
        return "record", str(error)
    except BaseException as error:  # sys.exit() in an environment costs its episode only
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = traceback.format_exception_only(error)[-1].strip()
        return "error", f"{environment.name}: {frame.filename}:{frame.lineno}: {reason}"


def _started(found: Any) -> tuple[str, Any]:
    fault = episodes.fault_of_start(found)
    if fault:
        return "turn", fault
    return _with_state(found[0], {"messages": [dict(message) for message in found[1]]})


def _stepped(turn: Any) -> tuple[str, Any]:
    fault = episodes.fault_of_turn(turn)
    if fault:
        return "turn", fault
    return _with_state(turn.state, {
        "reply": turn.reply, "reward": float(turn.reward), "done": turn.done,
        "parts": {name: float(value) for name, value in turn.parts.items()}})


def _with_state(state: episodes.State, value: dict) -> tuple[str, Any]:
    data = pickle.dumps(state)
    if len(data) > LARGEST_STATE:
        return "turn", f"a state of {len(data)} bytes, more than {LARGEST_STATE}"
    return "done", value | {"state": base64.b64encode(data).decode("ascii")}
