"""Scoring in a worker process: chunks of (text, record), answered item by item. See pool.py.

A request is a pickled list. Replies, beside those of serving.py: "begin" for each chunk; then for
each item "score" with the task reward and the parts, or a kind of faults.KINDS with a message.
After "memory" the pool replaces the worker, as what it holds on to could fail the next items.
"""

import os
import signal
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from dapo_jax import config
from dapo_jax.envs import faults, parts, serving


def program(reward: str, weights: tuple, cfg: config.Scoring, *, nursery: bool) -> str:
    """What a fresh interpreter runs to be a worker, or to fork them."""
    return serving.program(__name__, reward, weights, timeout=cfg.timeout,
                           memory_mb=cfg.memory_mb, nursery=nursery)


def main(reward: str, weights: tuple, *, timeout: float, memory_mb: int, nursery: bool) -> None:
    """Serve the reward function until the pipe closes."""
    serving.run(serving.Service(
        lambda: parts.scorer(reward, parts.weights(weights)),
        lambda scorer, items, replies: _serve(scorer, items, timeout, replies),
        memory_mb, "config.scoring.memory_mb"), nursery=nursery)


def _serve(scorer: parts.Scorer, items: list, timeout: float, replies: BinaryIO) -> None:
    serving.reply(replies, "begin", None)
    here = os.getpid()
    for text, record in items:
        # The parent kills a late worker. If the parent is gone and a C function keeps the
        # interpreter from noticing (a regular expression does), the kernel's alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        found = _answer(scorer, text, record)
        if os.getpid() != here:
            os._exit(0)  # the reward forked, and the child came back from it too
        serving.reply(replies, *found)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(scorer: parts.Scorer, text: str, record: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return "score", parts.numbers(scorer, text, record)
    except parts.NoScore as error:
        return error.kind, str(error)
    except MemoryError:
        return "memory", f"{scorer.name} needed more memory than scoring.memory_mb"
    except faults.UnusableRecord as error:
        return "record", str(error)
    except BaseException as error:  # sys.exit() in a reward costs its item only
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = traceback.format_exception_only(error)[-1].strip()
        return "error", f"{scorer.name}: {frame.filename}:{frame.lineno}: {reason}"
