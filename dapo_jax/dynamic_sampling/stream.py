"""Dynamic sampling without rounds: while the device decodes, scored groups are judged and further
prompts admitted, until enough groups are accepted.

Decisions fall at chunk boundaries. At boundary k the rewards count of the groups that were reported
finished up to boundary k - lag, or of all where the device has nothing left to do. They are awaited
where they are late and not looked at where they are early, so a decision depends on tokens and
rewards, never on how fast either came.

A batch is the first accepted groups in *admission* order, and it is full only when every group
admitted before the last of them is decided. Long groups finish late, so the first groups that
happen to be finished would be short ones.

In flight is held what the predictor would ask for: as many undecided groups as its first request
would name for the groups still missing, corrected by what this step showed so far. The
costs of `cost_optimal` mean in this mode: `round_cost`, what a batch that turns out short costs,
is the drain of a tail (the time of a few prompts in an otherwise idle engine, which is what a small
call takes); `prompt_cost` is the device time of a prompt admitted in vain.
"""

import dataclasses
import math

import numpy as np

from dapo_jax import types
from dapo_jax.dynamic_sampling import controller, gather, predictor
from dapo_jax.dynamic_sampling.gather import CollectSettings, Progress

NO_PROMPT = "no further prompt could be chosen"


@dataclasses.dataclass(frozen=True)
class Flow:
    """A step half way."""

    progress: Progress
    opening: controller.Opening
    finished: tuple[tuple[int, np.ndarray], ...] = ()  # (boundary, groups) that do not count yet
    stop: str = ""  # what leaves the batch short, once nothing more can be done


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a boundary between chunks says."""

    number: int
    finished: np.ndarray  # i32[*] groups reported complete
    idle: bool  # nothing is in flight on the device
    room: int  # prompts that the device can take


def room(free: int, waiting: int, slots: int) -> int:
    """Prompts that may be admitted where `waiting` wait for one of `slots` slots, `free` of which
    nobody sits in or waits for: as many may wait as there are slots, so that a chunk that ends
    finds prompts to begin and none is chosen long before it is sampled."""
    return free + max(0, slots - waiting)


def begin(state: types.ControllerState, carried: types.Samples, *, step: int,
          size: CollectSettings) -> Flow:
    """Before the first chunk: carried groups that are too old are dropped."""
    progress, opening = controller.begin(state, carried, step=step, size=size)
    flow = Flow(progress, opening)
    return dataclasses.replace(flow, opening=dataclasses.replace(
        opening, first=wanted(flow, size)))


def _streaming(size: CollectSettings) -> gather.Streaming:
    assert size.stream is not None  # here it never is: without it a step goes by rounds
    return size.stream


def due(flow: Flow, beat: Beat, *, size: CollectSettings) -> tuple[Flow, np.ndarray]:
    """The groups whose rewards count at this boundary, i32[g], in the order they finished."""
    reported = (*flow.finished, (beat.number, beat.finished))
    counts = [beat.idle or number + _streaming(size).lag <= beat.number for number, _ in reported]
    now = [groups for (_, groups), count in zip(reported, counts, strict=True) if count]
    later = tuple(one for one, count in zip(reported, counts, strict=True) if not count)
    return dataclasses.replace(flow, finished=later), np.concatenate([np.zeros(0, np.int32), *now])


def observe(flow: Flow, samples: types.Samples, *, groups: np.ndarray,
            size: CollectSettings) -> Flow:
    """Take in the scored samples of the groups that are due."""
    progress = gather.observe(flow.progress, samples, groups=groups, size=size)
    return dataclasses.replace(flow, progress=progress)


def full(flow: Flow, size: CollectSettings) -> bool:
    """Whether the batch is certain: enough accepted groups before the first undecided one."""
    before = gather.decided(flow.progress.entries)
    return int(np.sum(gather.accepted(flow.progress, size)[:before])) >= flow.opening.need


def wanted(flow: Flow, size: CollectSettings) -> int:
    """Undecided groups that there should be; 0 where no group is missing.

    What the predictor would ask for, made larger or smaller by what this step showed so far, and
    no fewer than give the missing groups at one standard deviation of ill luck.
    """
    progress, cfg = flow.progress, size.dynamic.predictor
    missing = flow.opening.need - int(np.sum(gather.accepted(progress, size)))
    if missing <= 0 or not size.filter_enabled:
        return max(0, missing)
    seen = progress.state.predictor
    lost = _streaming(size).in_flight == "drop"
    absorbed = 0 if lost else controller.absorbed(size.groups, size.dynamic)
    asked = predictor.predict(seen, missing, cfg, absorbed=absorbed)
    before = gather.decided(progress.entries)
    if not before:
        return asked
    usual = float(predictor.acceptance(seen)) if seen.count else 1 / cfg.multiplier
    # Groups behind the first undecided one are left out: those that are decided are short. What is
    # usual weighs as much as a batch of prompts.
    kept = int(np.sum(gather.accepted(progress, size)[:before]))
    now = (kept + size.groups * usual) / (before + size.groups)
    least = missing + math.sqrt(missing * (1 - now))
    enough = math.ceil(max(asked * usual, least) / now - 1e-9)
    return max(missing, min(enough, predictor.bound(missing, cfg)))


def admit(flow: Flow, beat: Beat, *, size: CollectSettings) -> tuple[Flow, types.Plan | None]:
    """What to sample next, further stages first; None: the step samples no more.

    A plan of no groups says that there is nothing to add now. Beyond `beat.room` goes nothing but
    stages of groups that are in work.
    """
    whole = full(flow, size)
    if whole and _streaming(size).in_flight == "drop":
        return flow, None
    progress, stop = flow.progress, ""
    stages = int(np.sum(gather.ready(progress)))
    if not whole:
        stop = controller.stopped(progress, size, again=False)
        stop = stop or (controller.stopped(progress, size, again=True) if beat.idle else "")
        new = 0 if stop else _new(flow, beat.room - stages, size)
        progress, plan = gather.plan(progress, new, size=size)
    else:
        progress, plan = gather.plan(progress, 0, size=size)
    if not len(plan.group) and beat.idle:
        stop = "" if whole else stop or controller.stopped(progress, size, again=False) or NO_PROMPT
        return dataclasses.replace(flow, progress=progress, stop=stop), None
    rounds = progress.rounds + (beat.idle and len(plan.group) > 0)
    return dataclasses.replace(
        flow, progress=dataclasses.replace(progress, rounds=rounds)), plan


def finish(flow: Flow, partial: types.Samples, *, size: CollectSettings,
           ) -> tuple[types.ControllerState, types.Samples, types.Samples, controller.Report]:
    """The step's outcome, as controller.finish gives it.

    Groups that are not done are dropped; `partial` holds the samples that this cut off.
    """
    progress = gather.spent(gather.drop(flow.progress, size=size), partial)
    return controller.finish(progress, flow.opening, stop=flow.stop, size=size)


def _new(flow: Flow, room: int, size: CollectSettings) -> int:
    """New prompts to admit."""
    progress = flow.progress
    undecided = int(np.sum(~progress.entries.done & ~gather.accepted(progress, size)))
    left = controller.max_prompts(size) - len(progress.entries.prompt)
    return max(0, min(wanted(flow, size) - undecided, room, left))
