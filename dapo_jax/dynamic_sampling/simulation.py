"""What a policy of asking for prompts costs, on outcomes that do not depend on the policy.

A run is a sequence of steps. Each step needs `groups` informative groups; a policy asks for
prompts in rounds, and a round costs seconds by its size. `draw` says how the prompts turn out, so
one loop serves prompts drawn from a distribution, prompts of a recorded run, and a table of prompts
with a history. Requests, refills, carried surplus and their limits follow controller.collect.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import accounts, controller, predictor


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a round: `round` + `sample` * prompts * samples of each."""

    round: float = 77.9
    sample: float = 1.80 / 32


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a step's prompts are asked for: a configuration, or what no configuration can be."""

    name: str
    dynamic: config.DynamicSampling
    refill: str = "deficit"  # "same": as many prompts again as were asked for first
    absorb: bool = True  # the margin reckons with what later steps take of the surplus
    oracle: str = ""  # "exact": knows the number; "informative": finds no other prompts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the prompts of one request turned out, in admission order."""

    informative: np.ndarray  # bool[m]; fewer than asked for: there are no more in this step
    samples: int
    rounds: int = 1  # more where a group's budget comes in stages


Draw = Callable[[Any, int, int, int], tuple[Any, Outcome]]  # (state, step, asked before, count)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run step by step, an array entry per step."""

    needed: np.ndarray  # i32[steps] groups missing when the step began
    predicted: np.ndarray  # i32[steps] prompts of the first request
    asked: np.ndarray  # i32[steps] prompts sampled
    informative: np.ndarray  # i32[steps] groups of these
    samples: np.ndarray  # i32[steps]
    rounds: np.ndarray  # i32[steps]
    kept: np.ndarray  # i32[steps] groups trained on
    old: np.ndarray  # i32[steps] of these carried from an earlier step
    age: np.ndarray  # f64[steps] mean steps that trained groups have waited
    carried: np.ndarray  # i32[steps] groups that wait for the next step
    expired: np.ndarray  # i32[steps] informative groups dropped
    seconds: np.ndarray  # f64[steps]
    oracle_ratio: np.ndarray  # f64[steps] asked / prompts after which the need was met
    beyond: np.ndarray  # bool[steps] asked for more prompts than the step has


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step half way."""

    flags: np.ndarray  # bool[asked]
    samples: int = 0
    rounds: int = 0
    beyond: bool = False


@dataclasses.dataclass(frozen=True)
class Reference:
    """Prompts drawn fresh each time: p ~ Beta(a, b) at the start, and logit p rises linearly."""

    groups: int = 32  # N of a batch
    samples: int = 8  # G of a group
    steps: int = 400
    a: float = 1.0
    b: float = 10.2
    rise: float = 0.81  # of logit p over `rise_steps`
    rise_steps: int = 400
    pool: int = 640  # prompts of a step that exist


def reference_flags(world: Reference, *, seed: Sequence[int]) -> np.ndarray:
    """Which prompts turn out informative, bool[steps, pool], in admission order.

    A group of G samples is informative with probability 1 - p^G - (1 - p)^G.
    """
    rng = np.random.default_rng(seed)
    start = rng.beta(world.a, world.b, size=(world.steps, world.pool))
    rates = raised(start, world.rise * np.arange(1, world.steps + 1)[:, None] / world.rise_steps)
    return rng.random(rates.shape) < mixed_chance(rates, world.samples)


def raised(rates: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Probabilities whose logits are `shift` higher."""
    odds = rates * np.exp(shift)
    return odds / (odds + 1 - rates)


def mixed_chance(rates: np.ndarray, samples: int) -> np.ndarray:
    """Chance that `samples` answers, each right with probability `rates`, are not all alike."""
    return 1 - rates ** samples - (1 - rates) ** samples


def pool_draw(flags: np.ndarray, samples: int) -> Draw:
    """Prompts come from the step's row of `flags`, bool[steps, pool], with `samples` each."""
    return recorded_draw(flags, np.broadcast_to(np.int32(samples), flags.shape))


def recorded_draw(
    flags: Sequence[np.ndarray] | np.ndarray, sizes: Sequence[np.ndarray] | np.ndarray
) -> Draw:
    """Prompts come in order from the step's pool: informative or not bool[m], samples i32[m]."""
    def draw(state: Any, step: int, asked: int, count: int) -> tuple[Any, Outcome]:
        taken = slice(asked, asked + count)
        return state, Outcome(flags[step][taken], int(np.sum(sizes[step][taken])))
    return draw


def run(policy: Policy, draw: Draw, *, groups: int, steps: int, costs: Costs,
        state: Any = None) -> tuple[Trace, Any]:
    """`steps` batches of `groups` groups under a policy, and the last state of `draw`.

    `state` is what `draw` is given first. A step that needs more prompts than there are is marked
    `beyond` and trains on what it has.
    """
    cfg = policy.dynamic
    seen, waiting, rows = predictor.init(cfg.predictor), np.zeros(0, np.int32), []
    for step in range(steps):
        need = max(0, groups - len(waiting))
        absorbed = controller.absorbed(groups, cfg) if policy.absorb else 0
        first = need if policy.oracle else predictor.predict(seen, need, cfg.predictor,
                                                             absorbed=absorbed)
        state, done = _gather(state, policy, draw, step=step, need=need, first=first)
        informative = int(np.sum(done.flags))
        if len(done.flags):
            seen = predictor.update(seen, len(done.flags), informative, cfg=cfg.predictor)
        pool = np.concatenate([waiting, np.full(informative, step, np.int32)])
        batch, (waiting, expired) = pool[:groups], _carry(pool[groups:], cfg, groups, step)
        rows.append((
            need, first, len(done.flags), informative, done.samples, done.rounds, len(batch),
            int(np.sum(batch < step)), float(np.mean(step - batch)) if len(batch) else 0.0,
            len(waiting), expired,
            done.rounds * costs.round + done.samples * costs.sample,
            accounts.oracle_ratio(done.flags, need), done.beyond))
    return Trace(*map(np.array, zip(*rows, strict=True))), state


def _gather(state: Any, policy: Policy, draw: Draw, *, step: int, need: int,
            first: int) -> tuple[Any, _Step]:
    """Rounds until `need` groups are informative or the step has no more prompts."""
    done = _Step(np.zeros(0, bool))
    while (deficit := need - int(np.sum(done.flags))) > 0:
        if done.beyond or (done.rounds >= policy.dynamic.max_rounds and not policy.oracle):
            break
        wanted = first if not done.rounds else _refill(policy, done, deficit, first)
        state, outcome = draw(state, step, len(done.flags), wanted)
        done = _Step(np.concatenate([done.flags, outcome.informative]),
                     done.samples + outcome.samples, done.rounds + outcome.rounds,
                     beyond=len(outcome.informative) < wanted)
    return state, _as_oracle(policy, done, need)


def _refill(policy: Policy, done: _Step, deficit: int, first: int) -> int:
    if policy.oracle:
        return deficit
    if policy.refill == "same":
        return first
    wanted = predictor.refill(deficit, len(done.flags), int(np.sum(done.flags)),
                              factor=policy.dynamic.refill_factor)
    return max(deficit, min(wanted, predictor.bound(deficit, policy.dynamic.predictor)))


def _as_oracle(policy: Policy, done: _Step, need: int) -> _Step:
    """What an oracle pays for the prompts that were found: one round, and `need` groups if it
    finds only informative prompts."""
    if not policy.oracle or not done.rounds:
        return done
    if policy.oracle == "exact":
        return dataclasses.replace(done, rounds=1)
    each = done.samples // max(len(done.flags), 1)
    return _Step(np.ones(need, bool), need * each, 1)


def _carry(rest: np.ndarray, cfg: config.DynamicSampling, groups: int,
           step: int) -> tuple[np.ndarray, int]:
    """Steps in which the waiting groups were sampled, and how many groups were dropped."""
    young = rest[step + 1 - rest <= cfg.carry_steps][:controller.carry_limit(groups, cfg)]
    return young, len(rest) - len(young)
