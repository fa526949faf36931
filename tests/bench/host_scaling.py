"""Seconds of the host in a step of as many samples as 1, 8, 64 or 512 processes draw.

    python tests/bench/host_scaling.py [--processes=1,8,64] [--samples=128] [--width=4096]

Every process holds every sample of a step, so its host work grows with the number of processes; of
the microbatches it fills the slots of its own devices. Done by the project's own functions on
made-up completions of half the width: the controller's step (fixed 3 N, half the groups
informative), the join of the rewards, the digests that processes compare, and the packing of all
updates. Generating, scoring and what devices do are left out.
`--samples` is of a process and a step; memory is about 45 bytes a token. Given are the medians of
`--repeats` steps after a first one, in processor seconds of the program; the last columns are the
kernel's share besides, which finds and clears the memory: for the kept samples, which the
controller copies once, and for the rest. It is 0.1 s a GB where the machine has it at hand, and
twenty times that where a virtual machine has to get it from its host.
"""

import argparse
import dataclasses
import pathlib
import resource
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from stand_in import setup, start

from dapo_jax import types
from dapo_jax.dynamic_sampling import controller
from dapo_jax.envs import pool as pools
from dapo_jax.envs import rewards
from dapo_jax.learner import algorithms, packing
from dapo_jax.learner import step as learner
from dapo_jax.runtime import processes

GROUP, PROMPT, UPDATES, SLOTS = 16, 64, 16, 8


def user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def kernel_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def rollout(plan: types.Plan, width: int) -> types.Samples:
    """Completions of half the width; every second group has unequal rewards."""
    group = np.repeat(np.arange(len(plan.group)), plan.size)
    count = len(group)
    number = np.arange(count) - np.repeat(np.cumsum(plan.size) - plan.size, plan.size)
    reward = ((plan.group[group] % 2 == 0) & (number % 2 == 0)).astype(np.float32)
    mask = np.zeros((count, width), bool)
    mask[:, :width // 2] = True
    return types.Samples(
        tokens=np.ones((count, width), np.int32), loss_mask=mask,
        logprobs=np.full((count, width), -0.5, np.float32),
        length=np.full(count, width // 2, np.int32), stopped=np.ones(count, bool), reward=reward,
        shaped=reward, valid=np.ones(count, bool), group=plan.group[group],
        prompt=plan.prompt[group], visit=plan.visit[group], sample=number.astype(np.int32),
        born=np.zeros(count, np.int32))


def joined(count: int, count_of_processes: int) -> pools.Scores:
    """The rewards of all, from what each found."""
    places = [slice(index, count, count_of_processes) for index in range(count_of_processes)]
    parts = [pools.Scores(np.zeros(len(range(count)[place]), np.float32),
                          np.ones(len(range(count)[place]), bool), 0, 0, "") for place in places]
    return rewards.joined(parts, places, count)


def measured(number: int, samples: int, width: int, *, packed: bool) -> dict[str, float]:
    """Seconds by part, for a step of `number` processes' samples."""
    groups = number * samples // GROUP
    size = setup(groups=groups, samples=GROUP, carry_steps=0)
    state, held = start(100_000, size)
    seconds, drawn, apart = {}, 0.0, 0.0

    def sample(plan: types.Plan) -> types.Samples:
        nonlocal drawn, apart
        begun, kernel = user_seconds(), kernel_seconds()
        made = rollout(plan, width)
        drawn, apart = drawn + user_seconds() - begun, apart + kernel_seconds() - kernel
        return made

    begun, kernel = user_seconds(), kernel_seconds()
    state, held, batch, report = controller.collect(
        state, types.no_samples(width), step=0, sample=sample, size=size)
    seconds["controller"] = user_seconds() - begun - drawn
    copying = kernel_seconds() - kernel - apart
    begun, kernel = user_seconds(), kernel_seconds()
    joined(report.samples, number)
    seconds["rewards"] = user_seconds() - begun
    begun = user_seconds()
    processes.digests({"controller": state, "buffer": held})
    seconds["digests"] = user_seconds() - begun
    table = types.PromptTable([np.ones(PROMPT, np.int32)] * 100_000, (), ())
    shape = packing.PackShape(max(SLOTS, number), GROUP, (PROMPT,), (width // 2, width),
                              parts=number, own=(0,))
    if packed:  # two samples to a row, a group to a slot
        shape = dataclasses.replace(shape, rows=GROUP // 2, prompt_buckets=(2 * PROMPT,),
                                    completion_buckets=(width,), packed=True)
    begun = user_seconds()
    learner.prepare(batch, algorithm=algorithms.dapo(), updates=min(UPDATES, groups), step=0,
                    table=table, shape=shape, max_length=width)
    seconds["packing"] = user_seconds() - begun
    return seconds | {"all": sum(seconds.values()), "kernel, controller": copying,
                      "kernel, rest": kernel_seconds() - kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,8,64")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packed", action="store_true", help="rows of several samples")
    given = parser.parse_args()
    print("processes  samples kept   million tokens   " + "".join(
        f"{name:>12s}" for name in (
            "controller", "rewards", "digests", "packing", "all", "k.controller", "k.rest")))
    for number in map(int, given.processes.split(",")):
        steps = [measured(number, given.samples, given.width, packed=given.packed)
                 for _ in range(given.repeats + 1)]
        seconds = {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}
        tokens = number * given.samples * given.width / 2e6
        print(f"{number:9d}  {number * given.samples:12d}   {tokens:14.1f}   " + "".join(
            f"{value:12.3f}" for value in seconds.values()), flush=True)


if __name__ == "__main__":
    main()
