"""Which prompts are sampled next.

Every random number belongs to a seed, an epoch or step, and a prompt, so a choice depends on the
state alone and a resumed run makes the same ones.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import special

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import history, order

SKIP, THOMPSON = 2, 3  # random streams; order.STREAM is another


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a request got."""

    order: types.EpochOrder  # where the passes over the table stand afterwards
    prompt: np.ndarray  # i32[m] in admission order
    skipped: int  # turns that prompts lost in this request


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, and all that the answer depends on beside the order's place."""

    count: int  # prompts
    avoid: np.ndarray  # i32[*] prompts that this step sampled already
    history: types.HistoryState
    step: int
    seed: int
    epochs: int  # passes over the table; 0: endless


def take(state: types.EpochOrder, request: Request, cfg: config.DynamicSampling) -> Chosen:
    """Choose `request.count` prompts, none of them in `request.avoid`, and no prompt twice.

    Fewer only where the epochs end or every prompt of the table was sampled in this step.
    """
    return KINDS[cfg.choice.kind](state, request, cfg)


def exhausted(state: types.EpochOrder, epochs: int, cfg: config.Choice) -> bool:
    """True if no prompt will come any more, because all of `epochs` passes were given."""
    return cfg.kind != "difficulty" and order.exhausted(state, epochs)


def skip_chance(streak: np.ndarray, cfg: config.Choice) -> np.ndarray:
    """Chance to lose a turn after `streak` uninformative visits in a row: growth * streak, at most
    `skip_most` < 1, so that a prompt comes back after 1 / (1 - skip_most) epochs on average."""
    return np.minimum(cfg.skip_growth * np.asarray(streak, np.float64), cfg.skip_most)


def _epochs(state: types.EpochOrder, request: Request, cfg: config.DynamicSampling) -> Chosen:
    del cfg
    state, prompt = order.take(state, request.count, seed=request.seed, avoid=request.avoid,
                               epochs=request.epochs)
    return Chosen(state, prompt, 0)


def _skip(state: types.EpochOrder, request: Request, cfg: config.DynamicSampling) -> Chosen:
    """In epoch order; a prompt's turn may be skipped, and it comes back in the next epoch.

    Where the rest of the table gives too few, those skipped last in this request come after all:
    a step is never short of prompts because of them.
    """
    given, skipped = np.zeros(0, np.int32), np.zeros(0, np.int32)
    while len(given) < request.count:
        seen = np.concatenate([request.avoid, given, skipped])
        state, prompt, late = _turns(state, request.count - len(given), seen, request, cfg.choice)
        if not len(prompt) and not len(late):
            break
        given, skipped = np.concatenate([given, prompt]), np.concatenate([skipped, late])
    if len(given) < request.count and not order.exhausted(state, request.epochs):
        first = max(0, len(skipped) - (request.count - len(given)))
        given, skipped = np.concatenate([given, skipped[first:]]), skipped[:first]
    return Chosen(state, given.astype(np.int32), len(skipped))


def _turns(
    state: types.EpochOrder, count: int, seen: np.ndarray, request: Request, cfg: config.Choice,
) -> tuple[types.EpochOrder, np.ndarray, np.ndarray]:
    """Up to `count` turns of one epoch: the prompts that take theirs, and those that lose it."""
    if state.cursor < len(state.order):  # else the epoch's number changes within the request
        count = min(count, len(state.order) - int(state.cursor))
    state, prompt = order.take(state, count, seed=request.seed, avoid=seen, epochs=request.epochs)
    luck = np.random.default_rng([request.seed, SKIP, int(state.epoch)]).random(len(state.order))
    lost = luck[prompt] < skip_chance(request.history.streak[prompt], cfg)
    return state, prompt[~lost], prompt[lost]


def _difficulty(state: types.EpochOrder, request: Request,
                cfg: config.DynamicSampling) -> Chosen:
    """Nearest to the target by a draw from each prompt's pass-rate distribution (Thompson).

    Prompts not visited for the longest gap come first, the longest waiting in front. If more of
    them fall due than a step samples, that is all that a step samples: keep the gap above table /
    prompts per step. The distributions are those at the step's start, so a refill goes on in the
    same order.
    """
    a, b = history.posterior(request.history, cfg.history)
    luck = np.random.default_rng([request.seed, THOMPSON, request.step]).random(len(a))
    distance = np.abs(special.betaincinv(a, b, luck) - cfg.choice.target)
    waited = np.where(request.history.last >= 0, request.step - request.history.last, 0)
    due = (waited >= cfg.choice.longest_gap) & (cfg.choice.longest_gap > 0)
    ranked = np.lexsort([distance, np.where(due, -waited, 0)])
    free = ranked[~np.isin(ranked, request.avoid)]
    return Chosen(state, free[:request.count].astype(np.int32), 0)


KINDS: dict[str, Callable[..., Chosen]] = {
    "epochs": _epochs, "skip": _skip, "difficulty": _difficulty}
