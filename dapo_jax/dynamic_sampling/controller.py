"""How one step's batch is gathered: ask, filter, ask again for what is missing, within limits."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import filter as filters
from dapo_jax.dynamic_sampling import history, order, predictor

Sampler = Callable[[types.Plan], types.Samples]

EPOCHS_USED = "rl.epochs"
ADVICE = {
    filters.ALL_ONE: "most prompts are too easy: use harder ones",
    filters.ALL_ZERO: "most prompts are too hard: use easier ones or more samples per prompt",
    filters.INVALID: "most groups had too few scored samples: look at the reward function",
    filters.INFORMATIVE: "most groups were informative",
}


class LimitReached(RuntimeError):
    """A limit of dynamic sampling ended the run: the message says which and what to do."""


@dataclasses.dataclass(frozen=True)
class CollectSettings:
    """What a step asks for."""

    groups: int  # of a batch
    samples_per_prompt: int
    filter_enabled: bool
    filter: config.Filter
    dynamic: config.DynamicSampling
    ladder: tuple[int, ...]  # prompts per generate call that are compiled; (): any number
    seed: int
    epochs: int  # 0: endless


@dataclasses.dataclass(frozen=True)
class Report:
    """One step in numbers. NaN: nothing to measure.

    asked = all_zero + all_one + invalid + informative. Accepted groups (filter on: informative;
    off: all but invalid) and those carried before = kept + carried + expired.
    """

    all_zero: int
    all_one: int
    informative: int
    invalid: int
    kept: int  # groups of the batch
    carried: int  # groups that wait for the next step
    expired: int  # accepted groups dropped for their age
    asked: int  # prompts sampled
    needed: int  # groups missing when the step began
    predicted: int  # prompts of the first request, before it was rounded to the ladder
    rounds: int
    samples: int
    tokens: int  # of all sampled completions
    oracle_ratio: float  # asked / prompts after which the need was met
    waste: float  # share of the tokens in groups neither trained on nor carried
    reward_mean: float  # raw task reward of all valid samples
    reward_std: float
    kept_mean: float  # raw task reward of the batch
    shaped_mean: float  # shaped reward of the batch
    exhausted: bool  # the epochs are used up and the batch is not full
    limit: str  # the limit that left the batch not full, or ""


METRICS = {
    **{f"groups/{name}": name for name in
       ("all_zero", "all_one", "informative", "invalid", "kept", "carried", "expired")},
    **{f"sampling/{name}": name for name in
       ("asked", "needed", "predicted", "rounds", "samples", "tokens", "waste", "oracle_ratio")},
    "sampling/prompts": "asked",
    "reward/mean": "reward_mean", "reward/std": "reward_std",
    "reward/kept_mean": "kept_mean", "reward/shaped_mean": "shaped_mean",
}


@dataclasses.dataclass(frozen=True)
class Progress:
    """A step half way. The arrays of length m hold one entry per prompt asked, in order."""

    state: types.ControllerState
    pool: types.Samples  # carried, then accepted groups
    prompt: np.ndarray  # i32[m]
    group: np.ndarray  # i32[m]
    kind: np.ndarray  # i8[m] of filters
    accepted: np.ndarray  # bool[m]
    tokens: np.ndarray  # i64[m]
    rewards: np.ndarray  # f32[*] raw, of the valid samples
    samples: int
    rounds: int


def init(table_size: int, *, seed: int, cfg: config.DynamicSampling) -> types.ControllerState:
    """Before the first step over a table of `table_size` prompts."""
    zero = np.asarray(0, np.int32)
    return types.ControllerState(
        predictor=predictor.init(cfg.predictor), history=history.init(table_size),
        order=order.init(table_size, seed), next_group=zero, empty_steps=zero)


def metrics(report: Report) -> dict[str, float]:
    """The report under the names of metrics.jsonl."""
    return {name: float(getattr(report, field)) for name, field in METRICS.items()}


def collect(
    state: types.ControllerState, carried: types.Samples, *, step: int, sample: Sampler,
    size: CollectSettings,
) -> tuple[types.ControllerState, types.Samples, types.Samples, Report]:
    """Gather one batch: the new state, the groups carried on, the batch, the report.

    The batch holds exactly `size.groups` groups in admission order (carried ones, then those of
    each round as planned, whatever order `sample` returns rows in), or fewer where the epochs end
    or a limit is met under `at_limit`. Raises LimitReached; the arguments are never changed, so
    after any exception the run stands where it stood.
    """
    cfg = size.dynamic
    pool, expired = buffer.evict(carried, step=step, carry_steps=cfg.carry_steps)
    need = max(0, size.groups - buffer.groups(pool))
    first = predictor.predict(state.predictor, need, cfg.predictor) if size.filter_enabled else need
    progress, stop = _gather(_start(state, pool), need, first, step, sample, size)
    exhausted, limit = stop == EPOCHS_USED, "" if stop == EPOCHS_USED else stop
    if limit and cfg.at_limit == "error":
        raise LimitReached(_explain(progress, need, limit))
    skipped = bool(limit) and cfg.at_limit == "skip"
    batch, rest = buffer.draw(progress.pool, 0 if skipped else size.groups)
    rest, late = buffer.evict(rest, step=step + 1, carry_steps=cfg.carry_steps)
    report = Report(needed=need, predicted=first, expired=expired + late, exhausted=exhausted,
                    limit=limit, **_measure(progress, need, batch, rest))
    return _finish(progress, report, size), rest, batch, report


def _start(state: types.ControllerState, pool: types.Samples) -> Progress:
    none = np.zeros(0, np.int32)
    return Progress(state, pool, prompt=none, group=none, kind=none.astype(np.int8),
                    accepted=none.astype(bool), tokens=none.astype(np.int64),
                    rewards=none.astype(np.float32), samples=0, rounds=0)


def _gather(progress: Progress, need: int, first: int, step: int, sample: Sampler,
            size: CollectSettings) -> tuple[Progress, str]:
    """Rounds until `need` groups are accepted; or what stopped it."""
    while (deficit := need - int(np.sum(progress.accepted))) > 0:
        stop = _stop(progress, size)
        if stop:
            return progress, stop
        wanted = first if progress.rounds == 0 else _refill(progress, deficit, size)
        if size.filter_enabled:
            wanted = predictor.round_up(wanted, size.ladder)
        progress = _round(progress, min(wanted, _max_prompts(size) - len(progress.prompt)),
                          step, sample, size)
    return progress, ""


def _refill(progress: Progress, deficit: int, size: CollectSettings) -> int:
    if not size.filter_enabled:
        return deficit
    wanted = predictor.refill(deficit, len(progress.prompt), int(np.sum(progress.accepted)),
                              factor=size.dynamic.refill_factor)
    return max(deficit, min(wanted, predictor.bound(deficit, size.dynamic.predictor)))


def _max_prompts(size: CollectSettings) -> int:
    return size.dynamic.max_prompts or 20 * size.groups


def _stop(progress: Progress, size: CollectSettings) -> str:
    """Why no further round may run, or ""."""
    table, asked = len(progress.state.order.order), len(progress.prompt)
    if order.exhausted(progress.state.order, size.epochs):
        return EPOCHS_USED
    if asked >= table:
        return f"every prompt of the table was sampled in this step ({table} in the table)"
    if progress.rounds >= size.dynamic.max_rounds:
        return f"dynamic_sampling.max_rounds = {size.dynamic.max_rounds} generate rounds per step"
    if asked >= _max_prompts(size):
        return f"dynamic_sampling.max_prompts: {_max_prompts(size)} prompts per step"
    return ""


def _round(progress: Progress, count: int, step: int, sample: Sampler,
           size: CollectSettings) -> Progress:
    state, plan = _plan(progress, count, step, size)
    samples, row_slot = _in_plan_order(sample(plan), plan)
    alone = not size.filter_enabled and size.samples_per_prompt == 1
    classes = filters.informative(samples, size.filter, least=1 if alone else 2)
    kind = np.full(len(plan.group), filters.INVALID, np.int8)
    kind[np.searchsorted(plan.group, classes.group)] = classes.kind
    accepted = kind == filters.INFORMATIVE if size.filter_enabled else kind != filters.INVALID
    tokens = np.bincount(row_slot, weights=samples.length, minlength=len(kind)).astype(np.int64)
    return Progress(
        state=state,
        pool=buffer.add(progress.pool, filters.keep(samples, plan.group[accepted])),
        prompt=np.concatenate([progress.prompt, plan.prompt]),
        group=np.concatenate([progress.group, plan.group]),
        kind=np.concatenate([progress.kind, kind]),
        accepted=np.concatenate([progress.accepted, accepted]),
        tokens=np.concatenate([progress.tokens, tokens]),
        rewards=np.concatenate([progress.rewards, samples.reward[samples.valid]]),
        samples=progress.samples + len(samples), rounds=progress.rounds + 1)


def _plan(progress: Progress, count: int, step: int,
          size: CollectSettings) -> tuple[types.ControllerState, types.Plan]:
    state = progress.state
    passes, prompt = order.take(state.order, count, seed=size.seed, avoid=progress.prompt,
                                epochs=size.epochs)
    plan = types.Plan(
        prompt=prompt, visit=state.history.visits[prompt],
        group=state.next_group + np.arange(len(prompt), dtype=np.int32),
        size=np.full(len(prompt), size.samples_per_prompt, np.int32))
    return dataclasses.replace(
        state, order=passes, history=history.visit(state.history, prompt, step=step),
        next_group=np.asarray(state.next_group + len(prompt), np.int32)), plan


def _in_plan_order(samples: types.Samples, plan: types.Plan) -> tuple[types.Samples, np.ndarray]:
    """Rows sorted by admission, then sample number; and the position of each in the plan."""
    unknown = np.setdiff1d(samples.group, plan.group)
    if len(unknown):
        raise ValueError(f"controller.collect: `sample` returned group {unknown[0]}, which is not "
                         "in its plan; give each row the group of its plan entry")
    row_slot = np.searchsorted(plan.group, samples.group)
    rows = np.lexsort([samples.sample, row_slot])
    return samples.take(rows), row_slot[rows]


def _finish(progress: Progress, report: Report, size: CollectSettings) -> types.ControllerState:
    """The state after the step; an end of the epochs is no empty step."""
    state = progress.state
    empty = 0 if report.kept else int(state.empty_steps) + (not report.exhausted)
    if empty and empty >= size.dynamic.max_empty_steps:
        raise LimitReached(_explain(progress, report.needed, "dynamic_sampling.max_empty_steps = "
                                    f"{empty} steps in a row without an update"))
    seen = state.predictor
    if report.asked and size.filter_enabled:
        seen = predictor.update(seen, report.asked, report.informative,
                                cfg=size.dynamic.predictor)
    return dataclasses.replace(state, predictor=seen, empty_steps=np.asarray(empty, np.int32))


def _measure(progress: Progress, need: int, batch: types.Samples,
             rest: types.Samples) -> dict[str, float]:
    """Fields of the report that are counted from the step's samples."""
    return dict(
        **_group_counts(progress), kept=buffer.groups(batch), carried=buffer.groups(rest),
        asked=len(progress.prompt), rounds=progress.rounds, samples=progress.samples,
        tokens=int(np.sum(progress.tokens)), waste=_waste(progress, batch, rest),
        oracle_ratio=_oracle_ratio(progress.accepted, need),
        reward_mean=_mean(progress.rewards),
        reward_std=_mean((progress.rewards - _mean(progress.rewards)) ** 2) ** 0.5,
        kept_mean=_mean(batch.reward), shaped_mean=_mean(batch.shaped))


def _group_counts(progress: Progress) -> dict[str, int]:
    kinds = {"all_zero": filters.ALL_ZERO, "all_one": filters.ALL_ONE,
             "informative": filters.INFORMATIVE, "invalid": filters.INVALID}
    return {name: int(np.sum(progress.kind == kind)) for name, kind in kinds.items()}


def _oracle_ratio(accepted: np.ndarray, need: int) -> float:
    met = np.flatnonzero(np.cumsum(accepted) >= need) if need else np.zeros(0)
    return len(accepted) / (int(met[0]) + 1) if len(met) else float("nan")


def _waste(progress: Progress, batch: types.Samples, rest: types.Samples) -> float:
    used = np.isin(progress.group, np.concatenate([batch.group, rest.group]))
    total = int(np.sum(progress.tokens))
    return float(np.sum(progress.tokens[~used])) / total if total else float("nan")


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")


def _explain(progress: Progress, need: int, limit: str) -> str:
    asked, counts = len(progress.prompt), _group_counts(progress)
    most = int(np.argmax(np.bincount(progress.kind, minlength=len(ADVICE))))
    shares = ", ".join(f"{name.replace('_', ' ')} {counts[name] / max(asked, 1):.1%}"
                       for name in ("all_one", "all_zero", "invalid"))
    accepted = int(np.sum(progress.accepted))
    return (f"limit reached: {limit}. {accepted} of {need} groups after {asked} prompts in "
            f"{progress.rounds} rounds: keep rate {round(accepted / max(asked, 1), 3)}, {shares}. "
            f"{ADVICE[most]}, raise the limit, or set dynamic_sampling.at_limit to partial (train "
            "on fewer) or skip (carry them on)")
