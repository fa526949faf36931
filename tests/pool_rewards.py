"""Reward functions that the tests of the scoring pool run in its workers."""

import os
import pathlib
import re
import signal
import stat
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
    if text == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(1000)
    if text == "print":
        os.write(1, b"not a reply\n")
        print("[1, 2]" * 5000, flush=True)
        return 1
    if text == "stdin":
        return 5 + len(sys.stdin.read())
    if text == "hog":
        return len(bytearray(600 << 20)) >> 20
    if text == "hog by fork":
        child = os.fork()
        if child == 0:
            try:
                act("hog", record)
            except MemoryError:  # the limit is inherited
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise MemoryError
    if text == "fork":
        os.fork()
        return 7
    if text in ("garbage", "flood"):
        spoil(b"not json\n" if text == "garbage" else b"x" * (4 << 20))
        return 1
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
            "task": {"task": 0.75, "score": 9},
            "nan": float("nan"), "inf": np.float64("-inf"), "beyond f32": 1e39, "huge": 10**400,
            "str": "1", "none": None, "list": [1.0], "empty dict": {}, "array": np.zeros(1),
            "complex": np.complex64(1)}[text]


def spoil(data):
    """Writes into every pipe that the process has open, as a reward that closes too much might."""
    for number in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, data)
        except OSError:
            pass


def starts(text, record):
    """Starts a process in the way that `text` says, then ends as the record says."""
    if text == "1":
        return 1
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    if text == "subprocess":
        child = subprocess.Popen(command, start_new_session=True).pid
        pathlib.Path(record["note"]).write_text(str(child))
    elif os.fork() == 0:
        if text != "fork":
            os.setsid()
        if text == "daemon" and os.fork():
            os._exit(0)
        pathlib.Path(record["note"]).write_text(str(os.getpid()))
        time.sleep(1000)
    while not (os.path.exists(record["note"]) and pathlib.Path(record["note"]).read_text()):
        time.sleep(0.01)
    return act({"hang": "hang", "die": "die", "stay": "1"}[record["end"]], {})


KEPT = []


def leaks(text, record):
    KEPT.append(bytearray(80 << 20))
    return 1


def parted(text, record):
    return 1 if text == "bare" else {"task": float(text), "style": 10 * float(text), "note": "x"}


def shouts(text, record):
    return {"score": text.isupper()}


def one_argument(text):
    return 1


def three_arguments(text, record, more):
    return 1


async def coroutine(text, record):
    return 1


def generous(text, record=None, *more, extra=1, **rest):
    return extra


MODULE_DATA = {}


def words(text, record):
    """No number."""
    return text.split()
