"""What the processes of a run agree on after a step: that they hold the same state, and whether the
run ends there."""

import dataclasses
import signal
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import types
from dapo_jax.runtime import processes


class Ending(NamedTuple):
    """Why a run ends before its last step, with its state saved."""

    signal: int  # the exit status is 128 more
    what: str


def endings(signals: Sequence[int], *, late: bool) -> list[Ending]:
    """What one process knows of: the first signal it received, and that the deadline has passed."""
    found = [Ending(number, f"signal {number}") for number in signals[:1]]
    return found + [Ending(int(signal.SIGTERM), "checkpoint.deadline")] * late


def reached(
    state: types.RunState, own: Sequence[Ending], *, seconds: float, late_seconds: float
) -> tuple[list[Ending], dict[str, float]]:
    """The endings that any process knows of, alike in all, and the metrics of the slowest.

    `seconds` is what this process was busy for, without waiting for others in meetings. Raises
    processes.Parted where host states differ, or where one keeps the others waiting for longer than
    `late_seconds`.
    """
    if jax.process_count() == 1:
        return list(own), {}
    after = f"after step {int(state.step)}"
    none: types.Tree = None
    same = processes.digests(dataclasses.replace(state, train=none))
    found = processes.gather((same, list(own), seconds), what=f"agreement {after}",
                             seconds=late_seconds)
    processes.check_same([digests for digests, _, _ in found], where=after)
    busy = [each for _, _, each in found]
    return [one for _, told, _ in found for one in told], {
        "processes/slowest": int(np.argmax(busy)), "processes/slowest_seconds": max(busy),
        "processes/mean_seconds": float(np.mean(busy))}
