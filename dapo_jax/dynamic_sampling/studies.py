"""The simulator's comparisons: which policies meet which outcomes, and what is reported."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import comparison, persistent, policies, simulation

Progress = Callable[[str], None]

SENSITIVITY: dict[str, dict[str, Any]] = {
    "as above": {},
    "every prompt rises alike": {"spread": 0.0, "wander": 0.0},
    "prompts rise and wander twice as unevenly": {"spread": 1.0, "wander": 1.0},
    "no rise at all": {"rise": 0.0, "spread": 0.0, "wander": 0.0},
    "no rise, much wandering": {"rise": 0.0, "spread": 0.0, "wander": 1.5},
}


def reference(
    *, samples: Sequence[int], groups: int, runs: int, steps: int, seed: int,
    costs: simulation.Costs, progress: Progress,
) -> list[comparison.Section]:
    """Prompts drawn fresh each time, a section per group size."""
    sections = []
    for size in samples:
        world = simulation.Reference(groups=groups, samples=size, steps=steps, pool=20 * groups)
        chosen = policies.reference(costs, size)
        traces: dict[str, list] = {policy.name: [] for policy in chosen}
        for number in range(runs):
            progress(f"G = {size}: run {number + 1} of {runs}")
            flags = simulation.reference_flags(world, seed=[seed, size, number])
            for policy in chosen:
                traces[policy.name].append(simulation.run(
                    policy, simulation.pool_draw(flags, size), groups=groups, steps=steps,
                    costs=costs)[0])
        sections.append(comparison.Section(f"G = {size}", tuple(comparison.rows(
            traces, base=policies.BASE, first=warm_up(steps)))))
    return sections


def warm_up(steps: int) -> int:
    """First steps that the reference means leave out."""
    return min(comparison.WARM_UP, steps // 4)


def persistents(
    *, samples: Sequence[int], groups: int, runs: int, seed: int, costs: simulation.Costs,
    progress: Progress,
) -> list[comparison.Section]:
    """A table of prompts, a section per group size, then what a larger carry would add."""
    sections, larger = [], []
    for size in samples:
        world = persistent.World(groups=groups, samples=size)
        asked = policies.persistent(costs, size) + policies.more_carry(costs, size)
        rows = _table_rows(world, asked, runs=runs, seed=seed, costs=costs, progress=progress)
        names = {policy.name for policy in policies.more_carry(costs, size)}
        sections.append(comparison.Section(
            f"G = {size}", tuple(row for row in rows if row.name not in names)))
        larger.append(comparison.Section(f"Larger carry, G = {size}", tuple(
            row for row in rows if row.name in names | {policies.DEFAULT})))
    return sections + larger


def sensitivity(
    *, samples: Sequence[int], groups: int, runs: int, seed: int, costs: simulation.Costs,
    progress: Progress,
) -> list[comparison.Section]:
    """The default under other drifts of the prompts, a section per group size."""
    sections = []
    for size in samples:
        chosen = [policy for policy in policies.persistent(costs, size)
                  if policy.name in (policies.WINDOW, policies.DEFAULT, policies.ORACLE)]
        found = []
        for name, change in SENSITIVITY.items():
            world = persistent.World(groups=groups, samples=size, **change)
            rows = _table_rows(world, chosen, runs=runs, seed=seed, costs=costs, progress=progress)
            found += [dataclasses.replace(row, name=name) for row in rows
                      if row.name == policies.DEFAULT]
        sections.append(comparison.Section(f"G = {size}", tuple(found)))
    return sections


def _table_rows(
    world: persistent.World, chosen: Sequence[simulation.Policy], *, runs: int, seed: int,
    costs: simulation.Costs, progress: Progress,
) -> list[comparison.Row]:
    """Rows of the policies, all of as many updates as `window` makes in the world's epochs."""
    traces: dict[str, list] = {policy.name: [] for policy in chosen}
    ends: dict[str, list] = {policy.name: [] for policy in chosen}
    for number in range(runs):
        right = persistent.answers(world, seed=[seed, world.samples, number])
        window = next(policy for policy in chosen if policy.name == policies.WINDOW)
        whole, _ = _over_table(window, right, len(right), world=world, seed=number, costs=costs)
        steps = persistent.updates(whole, world)
        for policy in chosen:
            progress(f"G = {world.samples}: run {number + 1} of {runs}, {policy.name}")
            trace, end = _over_table(policy, right, steps, world=world, seed=number, costs=costs)
            traces[policy.name].append(trace)
            ends[policy.name].append(end)
    rows = comparison.rows(traces, base=policies.WINDOW, first=0, oracle=policies.ORACLE)
    return [dataclasses.replace(row, extra=_coverage(ends[row.name])) for row in rows]


def _over_table(
    policy: simulation.Policy, right: np.ndarray, steps: int, *, world: persistent.World, seed: int,
    costs: simulation.Costs,
) -> tuple[simulation.Trace, persistent.Table]:
    return simulation.run(
        policy, persistent.draw(right, policy.dynamic, seed=seed), groups=world.groups,
        steps=steps, costs=costs, state=persistent.start(world, seed=seed))


def _coverage(ends: Sequence[persistent.Table]) -> Mapping[str, float]:
    """What the policy made of the table, means over runs."""
    each = [persistent.coverage(end) for end in ends]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def replay(
    flags: Sequence[np.ndarray], sizes: Sequence[np.ndarray], *, samples: int, groups: int,
    costs: simulation.Costs, progress: Progress,
) -> comparison.Section:
    """Every policy on the same recorded outcomes: bool[m] and samples i32[m] of each step's pool.

    Means leave out the first steps, in which windows fill.
    """
    traces = {}
    for policy in policies.reference(costs, samples):
        progress(f"G = {samples}: {policy.name}")
        traces[policy.name] = [simulation.run(
            policy, simulation.recorded_draw(flags, sizes), groups=groups, steps=len(flags),
            costs=costs)[0]]
    return comparison.Section(f"G = {samples}", tuple(comparison.rows(
        traces, base=policies.BASE, first=settling(len(flags)))))


def settling(steps: int) -> int:
    """First steps of a recorded run that the means leave out."""
    return min(config.Predictor().window, steps // 4)
