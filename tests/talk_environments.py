"""Environments that the tests of episodes beside the sampler run in worker processes."""

import os
import time

from dapo_jax.envs import episodes

REPLIES = {"bad reply": "\u00e4", "empty": ""}


def start(record, seed):
    """The state is how many turns there were."""
    if record.get("late"):
        time.sleep(record["late"])
    told = record["prompt"] + ("?" if record.get("other") else "")
    return 0, episodes.told(told)


def step(state, text):
    """A reward of 1 a turn; the text says what else happens."""
    word = text.strip()
    if word == "raise":
        raise ZeroDivisionError("on purpose")
    if word == "die":
        os._exit(3)
    if word == "hang":
        time.sleep(1000)
    if word == "nan":
        return episodes.Turn("", float("nan"), False)
    return episodes.Turn(REPLIES.get(word, "so\n"), 1.0, word == "end", state + 1,
                         {"good": float(word == "a")})


FAULTY = episodes.Environment("faulty", start, step, parts=("good",))
