"""What is known of each prompt: a pass rate that forgets, and how its visits went.

A success is a valid sample whose task reward is at least 0.5, the line that also tells a group
that is all right from one that is all wrong. Shaped rewards play no part.
"""

import dataclasses

import numpy as np

from dapo_jax import config, types

SUCCESS = 0.5  # least task reward of a success
BINS = 10  # of expected pass rates, in `shares`


def init(size: int) -> types.HistoryState:
    """`size` prompts, none sampled yet."""
    return types.HistoryState(
        visits=np.zeros(size, np.int32), successes=np.zeros(size, np.float32),
        trials=np.zeros(size, np.float32), streak=np.zeros(size, np.int32),
        last=np.full(size, -1, np.int32))


def visit(state: types.HistoryState, prompts: np.ndarray, *, step: int) -> types.HistoryState:
    """Count one more visit, in `step`, for each id in `prompts`, i32[n]."""
    visits = state.visits + np.bincount(prompts, minlength=len(state.visits)).astype(np.int32)
    last = state.last.copy()
    last[prompts] = step
    return dataclasses.replace(state, visits=visits, last=last)


def observe(
    state: types.HistoryState, prompts: np.ndarray, *, successes: np.ndarray, trials: np.ndarray,
    differed: np.ndarray, cfg: config.History,
) -> types.HistoryState:
    """The outcome of one visit each, whether its group was kept or not.

    `prompts` i32[n] without repetition; `successes` and `trials` i32[n] of the valid samples;
    `differed` bool[n]: the group was informative. A visit multiplies what was known by the decay,
    then adds its samples; one without a valid sample leaves everything as it was, and one with a
    single valid sample, which cannot differ, leaves the streak. Raises ValueError for a prompt
    named twice or counts that cannot be.
    """
    if len(np.unique(prompts)) < len(prompts):
        raise ValueError("history.observe: a prompt is named twice; give one entry per visit, and "
                         "the visits of a prompt in separate calls")
    if np.any(successes < 0) or np.any(successes > trials):
        raise ValueError("history.observe: successes must lie between 0 and trials")
    seen = trials > 0
    prompts, successes, trials, differed = (
        values[seen] for values in (prompts, successes, trials, differed))
    right, total, streak = state.successes.copy(), state.trials.copy(), state.streak.copy()
    right[prompts] = cfg.decay * right[prompts] + successes
    total[prompts] = cfg.decay * total[prompts] + trials
    longer = streak[prompts] + (trials > 1)
    streak[prompts] = np.where(differed, 0, longer)
    return dataclasses.replace(state, successes=right, trials=total, streak=streak)


def posterior(state: types.HistoryState, cfg: config.History) -> tuple[np.ndarray, np.ndarray]:
    """Parameters (a, b), f64[Q] each, of a Beta distribution of every prompt's pass rate."""
    right, total = state.successes.astype(np.float64), state.trials.astype(np.float64)
    return cfg.prior_right + right, cfg.prior_wrong + (total - right)


def mean(state: types.HistoryState, cfg: config.History) -> np.ndarray:
    """Every prompt's expected pass rate, f64[Q], in (0, 1)."""
    a, b = posterior(state, cfg)
    return a / (a + b)


def table(state: types.HistoryState, cfg: config.History) -> dict[str, np.ndarray]:
    """Columns for a report, a row per prompt that was sampled: `prompt` and `visits` i32[n],
    `mean` f64[n] the expected pass rate, `trials` f32[n] the decayed number of samples behind it,
    `streak` and `last` i32[n]."""
    prompt = np.flatnonzero(state.visits).astype(np.int32)
    return {"prompt": prompt, "visits": state.visits[prompt], "mean": mean(state, cfg)[prompt],
            "trials": state.trials[prompt], "streak": state.streak[prompt],
            "last": state.last[prompt]}


def shares(state: types.HistoryState, cfg: config.History) -> dict[str, float]:
    """How hard the table's prompts are now, under the names of metrics.jsonl: of all prompts, the
    share never scored and, for each tenth of expected pass rates, the share within it. Sum 1."""
    seen = state.trials > 0
    counts, _ = np.histogram(mean(state, cfg)[seen], bins=BINS, range=(0.0, 1.0))
    result = {"history/unseen": float(np.mean(~seen))}
    return result | {f"history/rate_{place}": float(count / len(seen))
                     for place, count in enumerate(counts)}
