"""Environments that the tests of the pool of environments run in its workers."""

import os
import pathlib
import random
import signal
import time

from dapo_jax.envs import episodes


def start(record, seed):
    """The state is what the turns have said so far; "begin" is what happens first."""
    if "begin" in record:
        act(record["begin"], record)
    return [seed], [{"role": "user", "content": str(seed)}]


def step(state, text):
    """Does what the text says, then repeats it with the state."""
    found = act(text, {})
    if found is not None:
        return found
    state = [*state, text]
    return episodes.Turn(" ".join(map(str, state)), float(len(text)), text == "end", state,
                         {"pid": os.getpid()} if text == "pid" else {})


def act(text, record):
    """Something hostile, by its name; None if the name is no such thing."""
    if text == "raise":
        raise ZeroDivisionError("on purpose")
    if text == "hang":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # else the worker's own alarm would end it
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    if text == "hog":
        return bytearray(900 << 20)
    if text == "fork":
        os.fork()
    if text == "print":
        os.write(1, b"not a reply\n")
    if text == "slow":
        time.sleep(0.3)
    if text.startswith("once:"):  # fails as it says, but only the first time
        _, how, note = text.split(":")
        if not pathlib.Path(note).exists():
            pathlib.Path(note).write_text(how)
            act(how, record)
    return {"nan": episodes.Turn("", float("nan"), False), "text": "a text",
            "lambda": episodes.Turn("", 0.0, False, lambda: None),
            "huge": episodes.Turn("", 0.0, False, bytes(1 << 20))}.get(text)


def chaotic_step(state, text):
    """A tenth raises, a twentieth hangs, a twentieth exits; which is the seed's matter."""
    luck = fate(state[0], len(state))
    act(luck, {})
    state = [*state, text]
    return episodes.Turn(luck, 1.0, len(state) == 4, state)


def fate(seed, turn):
    """What happens in a turn: equally for an equal seed."""
    luck = random.Random(1000 * seed + turn).random()
    return ("raise" if luck < 0.1 else "hang" if luck < 0.15 else "die" if luck < 0.2 else "fine")


def random_step(state, text):
    """Says something else each time."""
    return episodes.Turn(str(time.monotonic_ns()), 0.0, text == "end", state)


HOSTILE = episodes.Environment("hostile", start, step)
PATIENT = episodes.Environment("patient", start, step, idempotent=True)
CHAOTIC = episodes.Environment("chaotic", start, chaotic_step)
RANDOM = episodes.Environment("random", start, random_step)
BROKEN = episodes.Environment("broken", start, step, ready=lambda: act("raise", {}))
