"""How one step's batch is gathered: ask, filter, ask again for what is missing, within limits."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import (
    accounts,
    choice,
    gather,
    history,
    narrow,
    order,
    predictor,
)
from dapo_jax.dynamic_sampling import filter as filters
from dapo_jax.dynamic_sampling.accounts import Report
from dapo_jax.dynamic_sampling.gather import CollectSettings, Progress

Sampler = Callable[[types.Plan], types.Samples]

EPOCHS_USED = "rl.epochs"


class LimitReached(RuntimeError):
    """A limit of dynamic sampling ended the run: the message says which and what to do."""


def init(table_size: int, *, seed: int, cfg: config.DynamicSampling) -> types.ControllerState:
    """Before the first step over a table of `table_size` prompts."""
    zero = np.asarray(0, np.int32)
    return types.ControllerState(
        predictor=predictor.init(cfg.predictor), history=history.init(table_size),
        order=order.init(table_size, seed), next_group=zero, empty_steps=zero)


def metrics(report: Report) -> dict[str, float]:
    """The report under the names of metrics.jsonl."""
    return {name: float(getattr(report, field)) for name, field in accounts.METRICS.items()}


def collect(
    state: types.ControllerState, carried: types.Samples, *, step: int, sample: Sampler,
    size: CollectSettings,
) -> tuple[types.ControllerState, types.Samples, types.Samples, Report]:
    """Gather one batch in rounds: the new state, the groups carried on, the batch, the report.

    The batch holds exactly `size.groups` groups in admission order (carried ones, then those of
    each round as planned, whatever order `sample` returns rows in), or fewer where the epochs end
    or a limit is met under `at_limit`. Raises LimitReached; the arguments are never changed, so
    after any exception the run stands where it stood.
    """
    progress, opening = begin(state, carried, step=step, size=size)
    progress, stop = _gather(progress, opening, sample, size)
    return finish(progress, opening, stop=stop, size=size)


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a step begins with."""

    need: int  # groups missing
    first: int  # prompts of the first request
    expired: int  # carried groups dropped for their age


def begin(state: types.ControllerState, carried: types.Samples, *, step: int,
          size: CollectSettings) -> tuple[Progress, Opening]:
    """Drop carried groups that are too old and size the first request."""
    pool, expired = buffer.evict(carried, step=step, carry_steps=size.dynamic.carry_steps)
    need = max(0, size.groups - buffer.groups(pool))
    first = need
    if size.filter_enabled:
        first = predictor.predict(state.predictor, need, size.dynamic.predictor,
                                  absorbed=absorbed(size.groups, size.dynamic))
    return gather.start(state, pool, step=step), Opening(need, first, expired)


def absorbed(groups: int, cfg: config.DynamicSampling) -> int:
    """Surplus groups of a step that the following ones, of `groups` each, will train on."""
    return min(cfg.carry_steps * groups, carry_limit(groups, cfg))


def carry_limit(groups: int, cfg: config.DynamicSampling) -> int:
    """Most groups that may wait for the next step of `groups`."""
    any_number = np.iinfo(np.int32).max
    return math.floor(cfg.carry_share * groups + 1e-9) if cfg.carry_share else any_number


def further(progress: Progress, opening: Opening, size: CollectSettings) -> int:
    """New prompts of the next request, before limits; 0: stages alone will do."""
    if progress.rounds == 0:
        return opening.first
    accepted = int(np.sum(gather.accepted(progress, size)))
    if accepted >= opening.need:
        return 0
    hoped = gather.hoped(progress, size)
    deficit = opening.need - accepted - hoped
    if deficit <= 0 or not size.filter_enabled:
        return max(0, math.ceil(deficit))
    cfg, asked = size.dynamic, len(progress.entries.prompt)
    wanted = predictor.refill(deficit, asked, accepted + hoped, factor=cfg.refill_factor)
    least = math.ceil(deficit)
    return max(least, min(wanted, predictor.bound(least, cfg.predictor)))


def finish(
    progress: Progress, opening: Opening, *, stop: str, size: CollectSettings,
) -> tuple[types.ControllerState, types.Samples, types.Samples, Report]:
    """The step's outcome as of `collect`; `stop` says what left the batch short, or ""."""
    cfg = size.dynamic
    exhausted, limit = stop == EPOCHS_USED, "" if stop == EPOCHS_USED else stop
    if limit and cfg.at_limit == "error":
        raise LimitReached(accounts.explain(progress, need=opening.need, limit=limit, size=size))
    skipped = bool(limit) and cfg.at_limit == "skip"
    batch, rest = buffer.draw(gather.in_order(progress.pool), 0 if skipped else size.groups)
    rest, late = buffer.evict(rest, step=progress.step + 1, carry_steps=cfg.carry_steps)
    rest, beyond = (rest, 0) if skipped else buffer.limit(
        rest, carry_limit(size.groups, cfg))
    report = Report(
        needed=opening.need, predicted=opening.first, expired=opening.expired + late + beyond,
        exhausted=exhausted, limit=limit,
        **accounts.measure(progress, need=opening.need, batch=batch, rest=rest, size=size))
    batch, rest = (narrow.with_tokens(rows, progress.sources) for rows in (batch, rest))
    return _learned(progress, report, size), rest, batch, report


def _gather(progress: Progress, opening: Opening, sample: Sampler,
            size: CollectSettings) -> tuple[Progress, str]:
    """Rounds until enough groups are accepted and all are complete; or what stopped it."""
    while True:
        short = int(np.sum(gather.accepted(progress, size))) < opening.need
        stages = int(np.sum(gather.ready(progress)))
        stop = stopped(progress, size, again=True) if short else ""
        if progress.rounds >= size.dynamic.max_rounds or not stages and (stop or not short):
            return gather.close(progress, size=size), stop
        new = 0 if stop else further(progress, opening, size)
        new = min(new, max_prompts(size) - len(progress.entries.prompt))
        progress, plan = gather.plan(progress, new, size=size)
        progress = gather.observe(progress, sample(plan), groups=plan.group, size=size)
        progress = dataclasses.replace(progress, rounds=progress.rounds + 1)


def max_prompts(size: CollectSettings) -> int:
    """Most prompts of a step."""
    return size.dynamic.max_prompts or 20 * size.groups


def stopped(progress: Progress, size: CollectSettings, *, again: bool) -> str:
    """Why no further prompt may be asked for, or ""; `again`: it would be in a further round."""
    table, asked = len(progress.state.order.order), len(progress.entries.prompt)
    if choice.exhausted(progress.state.order, size.epochs, size.dynamic.choice):
        return EPOCHS_USED
    if asked >= table:
        return f"every prompt of the table was sampled in this step ({table} in the table)"
    if again and progress.rounds >= size.dynamic.max_rounds:
        return f"dynamic_sampling.max_rounds = {size.dynamic.max_rounds} generate rounds per step"
    if asked >= max_prompts(size):
        return f"dynamic_sampling.max_prompts: {max_prompts(size)} prompts per step"
    return ""


def _learned(progress: Progress, report: Report, size: CollectSettings) -> types.ControllerState:
    """The state after the step; an end of the epochs is no empty step."""
    state, cfg = progress.state, size.dynamic
    empty = 0 if report.kept else int(state.empty_steps) + (not report.exhausted)
    if empty and empty >= cfg.max_empty_steps:
        limit = f"dynamic_sampling.max_empty_steps = {empty} steps in a row without an update"
        raise LimitReached(accounts.explain(progress, need=report.needed, limit=limit, size=size))
    seen, ready = state.predictor, gather.decided(progress.entries)
    if ready and size.filter_enabled:  # those behind are decided where they are short
        kept = int(np.sum(gather.accepted(progress, size)[:ready]))
        seen = predictor.update(seen, ready, kept, cfg=cfg.predictor)
    return dataclasses.replace(
        state, predictor=seen, history=_remembered(state.history, progress.entries, cfg.history),
        empty_steps=np.asarray(empty, np.int32))


def _remembered(state: types.HistoryState, entries: gather.Entries,
                cfg: config.History) -> types.HistoryState:
    """The history with every finished group, kept or not."""
    done = entries.done
    return history.observe(
        state, entries.prompt[done], successes=entries.successes[done],
        trials=entries.trials[done], cfg=cfg,
        differed=entries.kind[done] == filters.INFORMATIVE)
