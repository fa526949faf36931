"""The policies that the simulator compares."""

from dapo_jax import config
from dapo_jax.dynamic_sampling import simulation

BASE = "fixed 3 N"
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
            _policy("oracle: only informative prompts", window, oracle="informative"))


def optimal(costs: simulation.Costs, samples: int) -> config.Predictor:
    """The cost-optimal predictor for groups of `samples` at these costs, in seconds."""
    return config.Predictor(kind="cost_optimal", round_cost=costs.round,
                            prompt_cost=costs.sample * samples)


def _policy(name: str, predictor: config.Predictor, *, carry_steps: int = 0,
            **more: object) -> simulation.Policy:
    dynamic = config.DynamicSampling(predictor=predictor, carry_steps=carry_steps, max_rounds=100)
    return simulation.Policy(name, dynamic, **more)
