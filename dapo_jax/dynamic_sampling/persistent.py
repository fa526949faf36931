"""A table of prompts that are visited again and again, each with a pass rate of its own.

What the reference simulation cannot show: history, choice and budgets. A prompt's pass rate is
drawn once, p ~ Beta(a, b); logit p then rises at a speed of its own and wanders. The mean rise is
the reference's. Answers belong to (step, prompt, sample), so every policy meets the same ones.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import budget, choice, history, order, simulation


@dataclasses.dataclass(frozen=True)
class World:
    """The prompts and what becomes of them."""

    groups: int = 32  # N of a batch
    samples: int = 8  # G of a group
    prompts: int = 2000
    epochs: int = 10  # of `window`: how many updates a run has
    a: float = 1.0
    b: float = 10.2
    rise: float = 0.81  # of logit p over `rise_steps`, mean over prompts
    rise_steps: int = 400
    spread: float = 0.5  # of a prompt's own rise, standard deviation as a share of the mean
    wander: float = 0.5  # of logit p: a random walk's standard deviation after `rise_steps`


@dataclasses.dataclass(frozen=True)
class Table:
    """Where a policy stands with its prompts."""

    order: types.EpochOrder
    history: types.HistoryState
    used: np.ndarray  # i32[*] prompts that the step sampled
    informative: np.ndarray  # i32[prompts] informative visits
    skipped: int = 0


def answers(world: World, *, seed: Sequence[int]) -> np.ndarray:
    """Right or wrong, bool[steps, prompts, samples], for as many steps as the epochs can fill."""
    rng = np.random.default_rng(seed)
    steps = -(-world.epochs * world.prompts // world.groups)
    start = rng.beta(world.a, world.b, world.prompts)
    speed = world.rise / world.rise_steps * (1 + world.spread * rng.normal(size=world.prompts))
    walk, jump = np.zeros(world.prompts), world.wander / world.rise_steps ** 0.5
    result = np.empty((steps, world.prompts, world.samples), bool)
    for step in range(steps):
        walk = walk + jump * rng.normal(size=world.prompts)
        rate = simulation.raised(start, speed * (step + 1) + walk)
        luck = rng.random((world.prompts, world.samples), dtype=np.float32)
        result[step] = luck < rate[:, None]
    return result


def start(world: World, *, seed: int) -> Table:
    """No prompt sampled yet."""
    none = np.zeros(world.prompts, np.int32)
    return Table(order.init(world.prompts, seed), history.init(world.prompts), none[:0], none)


def draw(right: np.ndarray, cfg: config.DynamicSampling, *, seed: int) -> simulation.Draw:
    """Prompts chosen and sampled as `cfg` says; `right` as from `answers`."""
    def from_table(table: Table, step: int, asked: int,
                   count: int) -> tuple[Table, simulation.Outcome]:
        used = table.used if asked else table.used[:0]
        chosen = choice.take(table.order, choice.Request(
            count, used, table.history, step=step, seed=seed, epochs=0), cfg)
        prompt = chosen.prompt
        drawn, successes, rounds = _sample(right[step, prompt], table, prompt, cfg)
        mixed = (successes > 0) & (successes < drawn)
        known = history.observe(
            history.visit(table.history, prompt, step=step), prompt, successes=successes,
            trials=drawn, differed=mixed, cfg=cfg.history)
        informative = table.informative.copy()
        informative[prompt[mixed]] += 1
        table = Table(chosen.order, known, np.concatenate([used, prompt]), informative,
                      table.skipped + chosen.skipped)
        return table, simulation.Outcome(mixed, int(np.sum(drawn)), rounds)
    return from_table


def _sample(right: np.ndarray, table: Table, prompt: np.ndarray,
            cfg: config.DynamicSampling) -> tuple[np.ndarray, np.ndarray, int]:
    """Samples and successes of each group, i32[m], and the rounds that their stages took."""
    size, rows = right.shape[1], np.arange(len(prompt))
    sums = np.concatenate([np.zeros((len(prompt), 1), np.int32), np.cumsum(right, axis=1)], axis=1)
    rate = history.mean(table.history, cfg.history)[prompt]
    drawn, rounds = np.zeros(len(prompt), np.int32), 0
    while True:
        successes = sums[rows, drawn].astype(np.int32)
        mixed = (successes > 0) & (successes < drawn)
        now = budget.more(cfg.budget, successes, drawn, drawn=drawn, mixed=mixed, rate=rate,
                          size=size)
        if not np.any(now):
            return drawn, successes, rounds
        drawn, rounds = drawn + now, rounds + 1


def updates(trace: simulation.Trace, world: World) -> int:
    """Updates that a run made before it had sampled the table `world.epochs` times."""
    return int(np.sum(np.cumsum(trace.asked) <= world.epochs * world.prompts))


def coverage(table: Table) -> dict[str, float]:
    """How evenly the prompts were used: passes over the table, % of prompts visited at most twice,
    and, in %, the share of prompts that would hold the informative visits if all had as many
    (1 / sum of squared shares)."""
    visits, used = table.history.visits, table.informative.astype(np.float64)
    even = np.sum(used) ** 2 / max(np.sum(used ** 2), 1.0) / len(used)
    return {"epochs": float(np.mean(visits)),
            "<= 2 visits, %": 100 * float(np.mean(visits <= 2)),
            "most visits": float(np.max(visits)), "effective prompts, %": 100 * float(even)}
