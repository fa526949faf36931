"""Modules of users, imported within a limit of time."""

import importlib
import signal
import threading
from types import FrameType, ModuleType

SECONDS = 120.0  # that an import may take


def module(name: str) -> ModuleType:
    """The module of this name; TimeoutError: its import does not come to an end.

    Time is limited in the main thread, where users' modules are looked up at the start: only there
    can a signal interrupt what hangs. Else whatever the import raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return importlib.import_module(name)
    going = True

    def late(number: int, frame: FrameType | None) -> None:
        if going:
            raise TimeoutError(f"its import is not over after {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late) or signal.SIG_DFL
    # Again each second, since what is imported may catch the first.
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
    try:
        return importlib.import_module(name)
    finally:
        going = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
