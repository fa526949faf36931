"""What the runs of the study found: costs of a round, replays, curves of learning."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.dynamic_sampling import comparison, simulation, studies
from dapo_jax.runtime import recording, status_line
from dapo_jax.studies import learning, round_times

SOURCE_COSTS = simulation.Costs()  # of the reference simulation


@dataclasses.dataclass(frozen=True)
class Where:
    """What the runs left."""

    out: pathlib.Path
    times: pathlib.Path
    recorded: Mapping[int, pathlib.Path]  # G -> work directory
    live: Mapping[str, Mapping[int, pathlib.Path]]  # arm -> seed -> work directory


@dataclasses.dataclass(frozen=True)
class Times:
    """Part a."""

    rows: Sequence[Mapping[str, Any]]
    wall: round_times.Fitted
    processor: round_times.Fitted
    by_size: Mapping[int, round_times.Fitted]  # G -> of its calls alone, wall


@dataclasses.dataclass(frozen=True)
class Replay:
    """Part b, one group size."""

    groups: int  # N
    steps: int
    informative: float  # share of the recorded prompts
    here: comparison.Section | None  # at this machine's costs
    source: comparison.Section  # at the costs that the source reports


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that is there, and what is not."""

    times: Times | None
    replays: Mapping[int, Replay]
    live: Mapping[str, Mapping[int, learning.Curve]]  # only finished runs
    missing: Sequence[str]


def read(where: Where, show: status_line.Show = lambda text: None) -> Findings:
    """Everything that can be read; what cannot is named in `missing`."""
    missing: list[str] = []
    times = _times(where.times, missing)
    replays = {}
    for size, workdir in where.recorded.items():
        try:
            replays[size] = _replay(workdir, size, times, show)
        except config.ConfigError as error:
            missing.append(f"recorded run, G = {size}: {error}")
    live = {arm: _curves(arm, runs, missing) for arm, runs in where.live.items()}
    return Findings(times, replays, live, missing)


def _times(path: pathlib.Path, missing: list[str]) -> Times | None:
    if not path.is_file():
        missing.append(f"seconds of a round: {path.name} does not exist")
        return None
    return fitted(json.loads(path.read_text(encoding="utf-8"))["rows"])


def fitted(rows: Sequence[Mapping[str, Any]]) -> Times:
    """The lines through the rows of round_times, all together and for each group size."""
    return Times(rows, round_times.fit_times(rows), round_times.fit_times(rows, "processor"), {
        size: round_times.fit_times([row for row in rows if row["samples"] == size])
        for size in sorted({row["samples"] for row in rows})})


def costs(times: Times, size: int) -> simulation.Costs:
    """Of this machine for groups of `size`, by the line of its own calls.

    The common line books a prompt's own cost, which it has beside its samples, as the round's. A
    round costs at least what a sample costs, and a sample a thousandth of the mean call's share,
    so that a fit of noise does not turn signs.
    """
    line = times.by_size.get(size, times.wall)
    seconds = sum(row["seconds"] for row in times.rows)
    least = 1e-3 * seconds / sum(row["prompts"] * row["samples"] for row in times.rows)
    sample = max(line.sample.mean, least)
    return simulation.Costs(max(line.round.mean, sample), sample)


def _replay(workdir: pathlib.Path, size: int, times: Times | None,
            show: status_line.Show) -> Replay:
    if not learning.finished(workdir):
        raise config.ConfigError(f"{workdir} holds no finished run")
    found = recording.pools(workdir)
    groups = int(recording.settings(workdir)["prompts_per_step"])

    def section(chosen: simulation.Costs, place: str) -> comparison.Section:
        made = studies.replay(found.informative, found.samples, samples=size, groups=groups,
                              costs=chosen, progress=show)
        return dataclasses.replace(made, title=f"G = {size}, {place}")

    return Replay(groups, len(found.steps), float(np.mean(np.concatenate(found.informative))),
                  section(costs(times, size), "costs of this machine") if times else None,
                  section(SOURCE_COSTS, "costs of the source"))


def _curves(arm: str, runs: Mapping[int, pathlib.Path],
            missing: list[str]) -> dict[int, learning.Curve]:
    found = {seed: learning.curve(workdir) for seed, workdir in runs.items()
             if learning.finished(workdir)}
    if left := [seed for seed in runs if seed not in found]:
        missing.append(f"live runs, {arm}: no finished run of seed {', '.join(map(str, left))}")
    return found
