"""One line on standard error that says how far a command is."""

import sys
import time
from collections.abc import Callable

from dapo_jax.runtime import metrics

Show = Callable[[str], None]


def opened(every: float = metrics.PLAIN_SECONDS) -> Show:
    """Shows a text: in place on a terminal, else at most one line in `every` seconds; empty:
    nothing is shown."""
    terminal, shown = sys.stderr.isatty(), [time.monotonic()]

    def show(text: str) -> None:
        if terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() - shown[0] >= every:
            shown[0] = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return show
