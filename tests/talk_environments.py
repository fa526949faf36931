"""Environments that the tests of episodes beside the sampler run in worker processes."""

import os
import random
import time

from dapo_jax.envs import episodes

TOLD = "x"
REPLIES = {"bad reply": "\u00e4", "empty": ""}


def start(record, seed):
    """The state is how many turns there were, or what every turn is."""
    if record.get("late"):
        time.sleep(record["late"])
    told = record["prompt"] + ("?" if record.get("other") else "")
    return record.get("always", 0), episodes.told(told)


def step(state, text):
    """A reward of 1 a turn; the text says what else happens."""
    always = isinstance(state, str)
    word = state if always else text.strip()
    if word == "raise":
        raise ZeroDivisionError("on purpose")
    if word == "die":
        os._exit(3)
    if word == "hang":
        time.sleep(1000)
    if word == "nan":
        return episodes.Turn("", float("nan"), False)
    after = state if always else state + 1
    return episodes.Turn(REPLIES.get(word, "so\n"), 1.0, word == "end",
                         None if word == "forget" else after, {"good": float(word == "a")})


FAULTY = episodes.Environment("faulty", start, step, parts=("good",))


def chaotic_start(record, seed):
    """The state is the seed and the turn; what happens in each turn is theirs alone."""
    return (seed, 0), episodes.told(record["prompt"])


def chaotic_step(state, text):
    """After some time, a tenth raises, a twentieth hangs, a twentieth exits."""
    seed, turn = state
    fate, seconds = fate_of(seed, turn)
    time.sleep(seconds * float(os.environ.get("CHAOS_SECONDS", "0.005")))
    if os.environ.get("CHAOS_CALM") != "1":
        if fate == "raise":
            raise ZeroDivisionError("on purpose")
        if fate == "hang":
            time.sleep(1000)
        if fate == "exit":
            os._exit(3)
    odd = any(character in "13579" for character in text)
    return episodes.Turn("=\n", float(odd), turn == 1, (seed, turn + 1))


def fate_of(seed, turn):
    """What happens in a turn, and how long it takes in units of the median latency: lognormal, the
    95th percentile at four of them."""
    luck = random.Random(1000 * seed + turn)
    number = luck.random()
    fate = ("raise" if number < 0.1 else "hang" if number < 0.15 else "exit" if number < 0.2
            else "fine")
    return fate, min(luck.lognormvariate(0.0, 0.843), 20.0)


CHAOTIC = episodes.Environment("chaotic", chaotic_start, chaotic_step)


def echo_start(record, seed):
    """The state is nothing."""
    return None, episodes.told(record["prompt"])


def echo_step(state, text):
    """Tells the text's own number of characters in x; a text that ends in a full stop is last."""
    return episodes.Turn(TOLD * (1 + len(text) % 5), 1.0, text.endswith("."), None)


ECHO = episodes.Environment("echo", echo_start, echo_step)
