"""One process in which an environment runs: reads a request, answers it. See episode_pool.py.

A request is a pickled tuple, ("start", record, seed) or ("step", state, text), whose state is the
bytes that an earlier reply held: only workers ever unpickle one. A reply is a line of JSON, [kind,
value]: "ready", "failed", "done" with what was asked for, or a kind of episodes.FAILURES with a
message.
"""

import base64
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

from dapo_jax.envs import environments, episodes, faults, parts
from dapo_jax.envs import worker as serving

LARGEST_STATE = 1 << 18  # bytes of a pickle


def program(name: str, *, timeout: float, memory_mb: int) -> str:
    """What a fresh interpreter runs to be a worker of the environment."""
    return (f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; "
            f"main({name!r}, timeout={timeout!r}, memory_mb={memory_mb!r})")


def main(name: str, *, timeout: float, memory_mb: int) -> None:
    """Serve the environment until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends the parent, which closes the pipe
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, replies = serving.private_pipes()
    threading.Thread(target=serving.leave_with_parent, args=(requests.fileno(),),
                     daemon=True).start()
    try:
        serving.limit_memory(memory_mb)
        environment = environments.environment(name)
        environment.ready()
        serving.reply(replies, "ready", None)
        here = os.getpid()
        while True:
            request = pickle.load(requests)
            # Should the parent be gone, and a C function keep the interpreter from noticing.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
            kind, value = answer(environment, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != here:
                os._exit(0)  # the environment forked, and the child came back from it too
            serving.reply(replies, kind, value)
    except EOFError:
        return
    except BaseException as error:  # also SystemExit, from a module that exits while imported
        serving.reply(replies, "failed", f"{type(error).__name__}: {error}")


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
