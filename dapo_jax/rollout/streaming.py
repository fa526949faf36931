"""One step's samples without rounds: groups are scored while the device decodes further ones."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np

from dapo_jax import types
from dapo_jax.dynamic_sampling import stream
from dapo_jax.rollout import collect as collecting
from dapo_jax.rollout import engine as engines

Scoring = Callable[[types.Samples], concurrent.futures.Future]


@dataclasses.dataclass
class _Desk:
    """What a step's boundaries share: the state machine, and scores that are on their way."""

    flow: stream.Flow
    step: int
    rounds: list[collecting.Round]  # those whose rewards counted
    jobs: collections.deque[concurrent.futures.Future]  # one per boundary that reported groups
    waited: float = 0.0  # seconds


def collect(
    source: collecting.Source, params: types.Tree, *, state: types.ControllerState,
    carried: types.Samples, step: int, rounds: list[collecting.Round],
) -> collecting.Collected:
    """One step's batch, as collect.collect gives it and with the same errors.

    Groups that become complete are scored in one thread beside, at most one boundary's at a time,
    each within the time limits of the scoring pool; so the step ends in bounded time whatever the
    reward function does.
    """
    begun, size = time.perf_counter(), collecting.asked(source)
    flow = stream.begin(state, carried, step=step, size=size)
    desk = _Desk(flow, step, rounds, collections.deque())
    with _scorer(source) as score:
        served = engines.serve(
            source.engine, params, table=source.table, root=source.root, step=step,
            feed=lambda boundary: _feed(desk, boundary, source, score))
        _count(desk, _end(), source)  # complete when the others were dropped
    seconds = {"rollout": time.perf_counter() - begun - desk.waited, "reward": desk.waited}
    state, carried, batch, report = stream.finish(desk.flow, served.partial, size=size)
    return collecting.Collected(state, carried, batch, report, rounds, seconds, served.use)


@contextlib.contextmanager
def _scorer(source: collecting.Source) -> Iterator[Scoring]:
    """A thread that scores; at an error what it has not begun is left undone."""
    executor = concurrent.futures.ThreadPoolExecutor(1, "scoring")
    try:
        yield lambda samples: executor.submit(collecting.share_scored, source, samples)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _feed(desk: _Desk, boundary: engines.Boundary, source: collecting.Source,
          score: Scoring) -> types.Plan | None:
    """Hand on what is complete, take in the rewards that count now, and say what is next."""
    if len(boundary.finished):
        desk.jobs.append(score(boundary.finished))
    beat = stream.Beat(
        boundary.number, np.unique(boundary.finished.group), idle=not len(boundary.in_flight),
        room=stream.room(boundary.free, boundary.waiting, source.engine.slots[-1]))
    _count(desk, beat, source)
    desk.flow, plan = stream.admit(desk.flow, beat, size=collecting.asked(source))
    return plan


def _count(desk: _Desk, beat: stream.Beat, source: collecting.Source) -> None:
    """Take in the rewards that are due, waiting for those that are late."""
    size = collecting.asked(source)
    desk.flow, groups = stream.due(desk.flow, beat, size=size)
    left, begun = set(groups.tolist()), time.perf_counter()
    while left:
        half = desk.jobs.popleft().result()
        one = collecting.scored(source, half, step=desk.step,
                                what=f"rewards of step {desk.step}")
        desk.rounds.append(one)
        mine = np.unique(one.samples.group)
        desk.flow = stream.observe(desk.flow, one.samples, groups=mine, size=size)
        left -= set(mine.tolist())
    desk.waited += time.perf_counter() - begun


def _end() -> stream.Beat:
    return stream.Beat(0, np.zeros(0, np.int32), idle=True, room=0)
