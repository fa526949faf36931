"""Reward functions of tests of how workers are forked; what each import does is written down."""

import os
import pathlib
import random
import signal
import time

from dapo_jax.envs import processes

if "CREW_IMPORTS" in os.environ:
    with open(os.environ["CREW_IMPORTS"], "a", encoding="utf-8") as notes:
        notes.write("imported\n")
    print("while imported")


def act(text, record):
    """Does what the text says; a number is its own reward."""
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(1000)
    if text == "orphan":  # the process that forked this one ends, and this one stays
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if text == "parent":
        return os.getppid()
    if text == "print":
        print("a line")
        print(end="", flush=True)
        return 1
    if text == "files":
        return len(os.listdir("/proc/self/fd"))
    if text == "threads":
        return len(os.listdir("/proc/self/task"))
    if text == "random":
        return random.randrange(1 << 24)  # all that a reward in float32 tells apart
    if text == "numpy":
        import numpy as np

        return np.random.randint(1 << 24)
    if text == "leads":
        return os.getpid() == os.getpgid(0) == os.getsid(0)
    if text == "token":  # as the kernel shows it, and as a program that is started gets it
        shown = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
        told = f"{processes.TOKEN}={os.environ[processes.TOKEN]}"
        return told.encode() in shown and int(told.rstrip(".").rpartition(".")[2])
    if text == "leave":
        if os.fork() == 0:
            os.setsid()
            pathlib.Path(record["note"]).write_text(str(os.getpid()))
            time.sleep(1000)
        time.sleep(1000)
    return float(text)
