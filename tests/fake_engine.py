"""A device of numbers: slots, chunks and lengths as the rollout engine has them, and no model."""

import collections
import dataclasses
import heapq
import itertools

import numpy as np

from dapo_jax import types
from dapo_jax.dynamic_sampling import controller, stream


@dataclasses.dataclass(frozen=True)
class Boundary:
    number: int
    finished: types.Samples
    in_flight: np.ndarray
    waiting: int
    free: int


@dataclasses.dataclass(frozen=True)
class Device:
    """S by a ladder, R rows a slot, chunks of C tokens."""

    slots: tuple[int, ...] = (8,)
    rows: int = 4
    chunk: int = 4
    fixed: float = 0.0  # slots' worth of time that a step takes beside that of its slots


@dataclasses.dataclass
class Work:
    """What it took."""

    steps: int = 0
    cost: float = 0.0  # slots computed, and `fixed`, summed over steps
    chunks: int = 0


def duration(lengths, rows):
    """Steps until a prompt's samples, which stream through `rows` rows, have all ended."""
    ends = [0] * rows
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + int(length))
    return max(ends)


def serve(device, sample, feed, work=None):
    """As rollout.engine.serve; `sample(plan)` gives the rows of a plan, with their lengths.

    Returns (complete rows, rows that were cut off)."""
    work = work or Work()
    rows, left, missing, taken = {}, {}, [], 0
    seats, waiting = [], collections.deque()
    number, landed, flying, finished = 0, [], None, []

    def joined(entries):
        parts = [rows[entry] for entry in entries]
        return parts[0].take(np.zeros(0, int)) if not parts else dataclasses.replace(
            parts[0], **{field.name: np.concatenate([getattr(p, field.name) for p in parts])
                         for field in dataclasses.fields(types.Samples)})

    empty = types.no_samples(3)
    while True:
        plan = feed(Boundary(
            number, joined(finished) if finished else empty,
            np.array([group for _, group in missing], np.int32), len(waiting),
            max(0, device.slots[-1] - len(seats) - len(waiting))))
        if plan is None:
            break
        made = sample(plan)
        for group in plan.group.tolist():
            mine = made.take(made.group == group)
            entry, taken = taken, taken + 1
            rows[entry] = mine
            left[entry] = duration(mine.length, device.rows)
            missing.append((entry, group))
            waiting.append(entry)
        if flying is not None:
            seats = [entry for entry in seats if left[entry] > 0]
        landed, flying = flying, None
        while waiting and len(seats) < device.slots[-1]:
            seats.append(waiting.popleft())
        if seats:
            flying = _chunk(device, seats, left, len(waiting), work)
        if landed is None and flying is None:
            break
        finished = landed or []
        missing = [one for one in missing if one[0] not in finished]
        number += 1
    cut = [entry for entry, _ in missing]
    whole = [entry for entry in rows if entry not in cut]
    return (joined(whole) if whole else empty, joined(cut) if cut else empty)


def _chunk(device, seats, left, waiting, work):
    """Run a chunk; the entries that it completes, in the order of their places."""
    size = min(s for s in device.slots if s >= len(seats))
    smaller = max((s for s in device.slots if s < size), default=0)
    idle = size - len(seats)
    enough = max(idle + max(1, size // 8) if waiting else size - smaller, idle + 1)
    ends = sorted(left[entry] for entry in seats)
    stop = ends[enough - idle - 1] if enough - idle <= len(ends) else ends[-1]
    steps = min(device.chunk, stop)
    for entry in seats:
        left[entry] -= steps
    work.steps += steps
    work.cost += steps * (size + device.fixed)
    work.chunks += 1
    return sorted(entry for entry in seats if left[entry] <= 0)


def play(device, engine, state, held, *, step, size, work=None, look=lambda flow, beat: None):
    """One streaming step whose rewards are known at once."""
    flow = stream.begin(state, held, step=step, size=size)
    store = []

    def take(beat):
        nonlocal flow
        flow, groups = stream.due(flow, beat, size=size)
        if len(groups):
            rows = types.no_samples(3)
            for one in store:
                rows = types.concatenate(rows, one.take(np.isin(one.group, groups)))
            store[:] = [one.take(~np.isin(one.group, groups)) for one in store]
            flow = stream.observe(flow, rows, groups=groups, size=size)

    def feed(boundary):
        nonlocal flow
        store.append(boundary.finished)
        beat = stream.Beat(
            boundary.number, np.unique(boundary.finished.group), idle=not len(boundary.in_flight),
            room=stream.room(boundary.free, boundary.waiting, device.slots[-1]))
        take(beat)
        flow, plan = stream.admit(flow, beat, size=size)
        look(flow, beat)
        return plan

    engine.step = step
    _, partial = serve(device, engine, feed, work)
    take(stream.Beat(1 << 30, np.zeros(0, np.int32), True, 0))
    return (*stream.finish(flow, partial, size=size), flow)


class HeavyTail:
    """Groups that are informative with `keep(step)`, and samples of lognormal length: median 0.1
    of the limit, 3 % at it. All of it belongs to the number of the group."""

    def __init__(self, keep, *, limit=256, seed=0):
        self.keep, self.limit, self.seed, self.step = keep, limit, seed, 0

    def __call__(self, plan):
        columns = [np.zeros(0, np.int32)] * 6
        for i in range(len(plan.group)):
            drawn = self._group(*(int(values[i]) for values in (
                plan.group, plan.prompt, plan.visit, plan.first, plan.size)))
            columns = [np.concatenate(pair) for pair in zip(columns, drawn, strict=True)]
        group, prompt, visit, sample, length, right = (c.astype(np.int32) for c in columns)
        n, reward = len(group), right.astype(np.float32)
        return dataclasses.replace(
            types.no_samples(3), tokens=np.zeros((n, 3), np.int32),
            loss_mask=np.zeros((n, 3), bool), logprobs=np.zeros((n, 3), np.float32),
            length=length, stopped=length < self.limit, reward=reward, shaped=reward,
            valid=np.ones(n, bool), group=group, prompt=prompt, visit=visit, sample=sample,
            born=np.full(n, self.step, np.int32))

    def _group(self, group, prompt, visit, first, size):
        rng = np.random.default_rng([self.seed, group])
        mixed = rng.random() < self.keep(self.step)
        # 1.2247 = ln 10 / 1.88: 3 % of the mass lies above the limit.
        length = np.exp(np.log(0.1 * self.limit) + 1.2247 * rng.normal(size=first + size))
        number = np.arange(first, first + size)
        same = np.ones(size, np.int64)
        return (same * group, same * prompt, same * visit, number,
                np.clip(length, 1, self.limit).astype(int)[first:], number % 2 * mixed)


def in_rounds(device, engine, state, held, *, step, size, work):
    """One step in rounds on the same device."""
    def sample(plan):
        none = dataclasses.replace(plan, **{name: value[:0] for name, value in vars(plan).items()
                                            if value is not None})
        plans = itertools.chain([plan], itertools.repeat(none))
        return serve(device, engine, lambda _: next(plans), work)[0]

    engine.step = step
    return controller.collect(state, held, step=step, sample=sample, size=size)
