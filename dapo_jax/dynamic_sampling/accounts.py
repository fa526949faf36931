"""A step's sampling in numbers: every prompt asked for is accounted for."""

import dataclasses
from typing import Any

import numpy as np

from dapo_jax import types
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import filter as filters
from dapo_jax.dynamic_sampling import gather

ADVICE = {
    filters.ALL_ONE: "most prompts are too easy: use harder ones",
    filters.ALL_ZERO: "most prompts are too hard: use easier ones or more samples per prompt",
    filters.INVALID: "most groups had too few scored samples: look at the reward function or the "
    "environment, whose first failure is in the log",
    filters.INFORMATIVE: "most groups were informative",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """One step in numbers. NaN: nothing to measure.

    asked + in flight before = all_zero + all_one + invalid + informative + dropped + in_flight.
    Accepted groups (filter on: informative; off: all but invalid) that were not dropped + those
    carried before = kept + carried + expired.
    So with the filter on: asked + in flight before + carried before
    = all_zero + all_one + invalid + kept + carried + expired + dropped + in_flight.
    """

    all_zero: int
    all_one: int
    informative: int
    invalid: int
    kept: int  # groups of the batch
    carried: int  # groups that wait for the next step
    expired: int  # accepted groups dropped for their age or their number
    dropped: int  # groups abandoned half way, and accepted ones behind them
    in_flight: int  # groups asked for whose samples are not all there
    asked: int  # prompts sampled
    skipped: int  # turns that prompts lost by their history
    needed: int  # groups missing when the step began
    predicted: int  # prompts of the first request, before limits
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
       ("all_zero", "all_one", "informative", "invalid", "kept", "carried", "expired",
        "dropped", "in_flight")},
    **{f"sampling/{name}": name for name in
       ("asked", "skipped", "needed", "predicted", "rounds", "samples", "tokens", "waste",
        "oracle_ratio")},
    "sampling/prompts": "asked",
    "reward/mean": "reward_mean", "reward/std": "reward_std",
    "reward/kept_mean": "kept_mean", "reward/shaped_mean": "shaped_mean",
}


def measure(progress: gather.Progress, *, need: int, batch: types.Samples, rest: types.Samples,
            size: gather.CollectSettings) -> dict[str, Any]:
    """The fields of a report that are counted from the step's entries and samples."""
    entries = progress.entries
    return dict(
        **group_counts(entries), kept=buffer.groups(batch), carried=buffer.groups(rest),
        dropped=int(np.sum(entries.dropped)),
        in_flight=int(np.sum(~entries.done & ~entries.dropped)),
        asked=len(entries.prompt), skipped=progress.skipped,
        rounds=progress.rounds, samples=progress.samples, tokens=int(np.sum(entries.tokens)),
        waste=_waste(entries, batch, rest),
        oracle_ratio=oracle_ratio(gather.accepted(progress, size), need),
        reward_mean=_mean(progress.rewards),
        reward_std=_mean((progress.rewards - _mean(progress.rewards)) ** 2) ** 0.5,
        kept_mean=_mean(batch.reward), shaped_mean=_mean(batch.shaped))


def group_counts(entries: gather.Entries) -> dict[str, int]:
    """Finished groups of each kind, without those dropped."""
    kinds = {"all_zero": filters.ALL_ZERO, "all_one": filters.ALL_ONE,
             "informative": filters.INFORMATIVE, "invalid": filters.INVALID}
    kind_of = entries.kind[entries.done & ~entries.dropped]
    return {name: int(np.sum(kind_of == kind)) for name, kind in kinds.items()}


def explain(progress: gather.Progress, *, need: int, limit: str,
            size: gather.CollectSettings) -> str:
    """Why a limit was reached, and what to do."""
    entries = progress.entries
    asked, counts = len(entries.prompt), group_counts(entries)
    most = int(np.argmax(np.bincount(entries.kind, minlength=len(ADVICE))))
    shares = ", ".join(f"{name.replace('_', ' ')} {counts[name] / max(asked, 1):.1%}"
                       for name in ("all_one", "all_zero", "invalid"))
    accepted = int(np.sum(gather.accepted(progress, size)))
    remedy = "raise the limit" if size.dynamic.at_limit != "error" else (
        "raise the limit, or set dynamic_sampling.at_limit to partial (train on fewer) or skip "
        "(carry them on)")
    return (f"limit reached: {limit}. {accepted} of {need} groups after {asked} prompts in "
            f"{progress.rounds} rounds: keep rate {round(accepted / max(asked, 1), 3)}, {shares}. "
            f"{ADVICE[most]}; {remedy}")


def oracle_ratio(accepted: np.ndarray, need: int) -> float:
    """Groups asked for / the least that held `need` informative ones, in admission order (bool[n]);
    NaN where none did."""
    met = np.flatnonzero(np.cumsum(accepted) >= need) if need else np.zeros(0)
    return len(accepted) / (int(met[0]) + 1) if len(met) else float("nan")


def _waste(entries: gather.Entries, batch: types.Samples, rest: types.Samples) -> float:
    used = np.isin(entries.group, np.concatenate([batch.group, rest.group]))
    total = int(np.sum(entries.tokens))
    return float(np.sum(entries.tokens[~used])) / total if total else float("nan")


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")
