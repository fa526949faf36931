"""Reward functions of test_pool.py, run in its workers."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time


def act(text, record):
    """Does what the text says; a number is its own reward."""
    if text == "raise":
        raise ZeroDivisionError("on purpose")
    if text == "rude":
        class Rude(Exception):
            def __str__(self):
                raise ValueError("no text")
        raise Rude()
    if text == "hang":
        time.sleep(1000)
    if text == "hang in C":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if text == "hang with child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        pathlib.Path(record["note"]).write_text(str(child.pid))
        time.sleep(1000)
    if text == "exit":
        sys.exit(3)
    if text == "die":
        os._exit(3)
    if text == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "print":
        os.write(1, b"not a reply\n")
        print("[1, 2]" * 5000, flush=True)
        return 1
    if text == "stdin":
        return 5 + len(sys.stdin.read())
    if text == "slow":
        time.sleep(0.05)
        return 1
    return float(text)


def platform(text, record):
    return float(os.environ["JAX_PLATFORMS"] == text)


def modules(text, record):
    return float(text in sys.modules)


def pid(text, record):
    if "note" in record:
        pathlib.Path(record["note"]).write_text(str(os.getpid()))
    return act(text, {}) if text else os.getpid()


def typed(text, record):
    import numpy as np  # here: the other functions are served without it

    return {"true": True, "int": 2, "float": 0.5, "f32": np.float32(0.25), "i64": np.int64(3),
            "bool_": np.bool_(True), "dict": {"score": 4, "more": "x"}, "nested": {"score": {}},
            "nan": float("nan"), "inf": np.float64("-inf"), "beyond f32": 1e39, "huge": 10**400,
            "str": "1", "none": None, "list": [1.0], "empty dict": {}, "array": np.zeros(1),
            "complex": np.complex64(1)}[text]
