"""Rounds against streaming on a device of numbers, with completions of heavy-tailed length.

    python tests/bench/streaming_study.py [STEPS]

Per step of 32 groups of 8 samples: passes of the model, slots computed (summed over passes),
chunks, prompts asked, groups dropped, carried and expired. Takes a few minutes.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import fake_engine
import numpy as np
from stand_in import setup, start

from dapo_jax import config
from dapo_jax.dynamic_sampling import gather

SLOTS, WARM_UP = (8, 16, 32, 64), 8
COSTS = {"round_cost": 4096.0, "prompt_cost": 150.0}  # in slots computed: a drain, and a prompt
WORLDS = {"acceptance 0.35": lambda step: 0.35,
          "acceptance 0.6 and 0.15 by turns of 4 steps": lambda step: (0.6, 0.15)[step // 4 % 2]}
POLICIES = {"fixed 3 N": {"kind": "fixed"}, "window": {"kind": "window"},
            "cost_optimal": {"kind": "cost_optimal", **COSTS}}
MODES = {"rounds": None, "streaming, finish": gather.Streaming(1, "finish"),
         "streaming, drop": gather.Streaming(1, "drop")}


def measured(keep, predictor, stream, carry, steps):
    """Means over the steps after the warm-up."""
    size = setup(groups=32, samples=8, carry_steps=carry)
    size = dataclasses.replace(size, stream=stream, dynamic=dataclasses.replace(
        size.dynamic, predictor=config.Predictor(**predictor)))
    device, engine = fake_engine.Device(SLOTS, 8, 16), fake_engine.HeavyTail(keep)
    (state, held), rows = start(100_000, size), []
    for step in range(steps):
        work = fake_engine.Work()
        one = fake_engine.play if stream else fake_engine.in_rounds
        state, held, _, report, *_ = one(device, engine, state, held, step=step, size=size,
                                         work=work)
        rows.append((work.steps, work.cost, work.chunks, report.asked, report.dropped,
                     report.carried, report.expired))
    return np.mean(rows[WARM_UP:], axis=0)


def main(steps):
    print(f"{'':60s} passes   slots  chunks  asked dropped carried expired")
    for world, keep in WORLDS.items():
        for carry in (1, 0):
            for name, predictor in POLICIES.items():
                for mode, stream in MODES.items():
                    row = measured(keep, predictor, stream, carry, steps)
                    title = f"{world}, carry {carry}: {name}, {mode}"
                    print(f"{title:60s} {row[0]:6.1f} {row[1]:7.0f} "
                          + " ".join(f"{value:7.1f}" for value in row[2:]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
