"""The policies that the simulator compares."""

import dataclasses
from typing import Any

from dapo_jax import config
from dapo_jax.dynamic_sampling import simulation

BASE = "fixed 3 N"
WINDOW = "window"
ORACLE = "oracle: only informative prompts"
DEFAULT = "cost_optimal + carry + skip"
CARRIED: dict[str, Any] = {"carry_steps": 1, "carry_share": 0.25}
SKIP = config.Choice(kind="skip", skip_growth=0.5, skip_most=0.8)
MULTIPLIERS = (3.0, 1.0, 1.5, 2.0)


def reference(costs: simulation.Costs, samples: int) -> tuple[simulation.Policy, ...]:
    """Rows of the reference table for groups of `samples`; the first is the base of the savings."""
    window = config.Predictor()
    best = optimal(costs, samples)
    fixed = (_policy(f"fixed {multiplier:g} N",
                     config.Predictor(kind="fixed", multiplier=multiplier), refill="same")
             for multiplier in MULTIPLIERS)
    return (*fixed,
            _policy("window, refill of the same size", window, refill="same"),
            _policy("window, refill of the deficit", window),
            _policy("cost_optimal", best),
            _policy("cost_optimal, surplus carried", best, carry_steps=1, absorb=False),
            _policy("cost_optimal, margin for carried surplus", best, carry_steps=1),
            _policy("oracle: exact number", window, oracle="exact"),
            _policy(ORACLE, window, oracle="informative"))


def persistent(costs: simulation.Costs, samples: int) -> tuple[simulation.Policy, ...]:
    """Over a table of prompts: `window`, what each ingredient adds, and what it does alone."""
    window, best = config.Predictor(), optimal(costs, samples)
    half = config.Budget(kind="screening", first=max(2, samples // 2))
    return (
        _policy(WINDOW, window),
        _policy("window, refill of the same size", window, refill="same"),
        _policy("cost_optimal", best),
        _policy("cost_optimal + carry", best, **CARRIED),
        _policy(DEFAULT, best, **CARRIED, choice=SKIP),
        _policy("... without cost_optimal (window)", window, **CARRIED, choice=SKIP),
        _policy("... without carry", best, choice=SKIP),
        _policy("... skip at most 90 %", best, **CARRIED, choice=dataclasses.replace(
            SKIP, skip_most=0.9)),
        _policy("... difficulty, gap 100, for skip", best, **CARRIED, choice=config.Choice(
            kind="difficulty", longest_gap=100)),
        _policy("... difficulty, no gap, for skip", best, **CARRIED, choice=config.Choice(
            kind="difficulty", longest_gap=0)),
        _policy("... with screening of G/2", best, **CARRIED, choice=SKIP, budget=half),
        _policy(ORACLE, window, oracle="informative"))


def more_carry(costs: simulation.Costs, samples: int) -> tuple[simulation.Policy, ...]:
    """The default with more carried groups than a quarter of a batch, and with older ones."""
    best = optimal(costs, samples)
    return tuple(
        _policy(f"{DEFAULT}: {name}", best, choice=SKIP, carry_steps=steps, carry_share=share)
        for name, steps, share in (("half a batch", 1, 0.5), ("any number", 1, 0.0),
                                   ("2 steps, any number", 2, 0.0)))


def optimal(costs: simulation.Costs, samples: int) -> config.Predictor:
    """The cost-optimal predictor for groups of `samples` at these costs, in seconds."""
    return config.Predictor(kind="cost_optimal", round_cost=costs.round,
                            prompt_cost=costs.sample * samples)


def _policy(name: str, predictor: config.Predictor, *, refill: str = "deficit", oracle: str = "",
            absorb: bool = True, **dynamic: Any) -> simulation.Policy:
    changed: dict[str, Any] = {"carry_steps": 0, "max_rounds": 100} | dynamic
    return simulation.Policy(name, config.DynamicSampling(predictor=predictor, **changed),
                             refill=refill, absorb=absorb, oracle=oracle)
