"""The constants of `window`, fitted to the counts of a recorded run, and the cost of a round.

What was done by hand where the predictor comes from. A step is known by its counts alone: T
prompts, of which K were informative. In what order they came is drawn at random; beyond the T
prompts, others turn out informative at the run's pooled rate.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import predictor, simulation

Numbers = Sequence[float] | np.ndarray

LEAST_STEPS = 24
TRAINED = 0.75  # share of the steps, the first ones, that constants are fitted to
ORDERS = 64  # random orders of each step's prompts
CANDIDATES, ROUNDS, NEIGHBOURS = 240, 6, 40
BOUNDS = {"alpha": (0.0, 3.0), "gamma": (0.3, 1.0), "ratio1": (0.7, 1.0), "ratio2": (0.7, 1.0),
          "q": (0.8, 1.6)}


@dataclasses.dataclass(frozen=True)
class Series:
    """A run's steps as a predictor meets them."""

    states: tuple[types.PredictorState, ...]  # before each step
    needed: np.ndarray  # i32[steps, orders] prompts until the batch would have been full
    exact: np.ndarray  # f64[steps] x_t = N T_t / K_t
    groups: int


@dataclasses.dataclass(frozen=True)
class Score:
    """How a predictor does on some steps."""

    seconds: float  # expected per step
    again: float  # share of steps that need a further round
    error: float  # mean |predicted - needed| in prompts
    predicted: float  # mean prompts of the first request


@dataclasses.dataclass(frozen=True)
class Study:
    """A fit beside other predictors on the same steps."""

    predictor: config.Predictor
    scores: Mapping[str, tuple[Score, Score]]  # name -> steps fitted to, steps held out
    predicted: Mapping[str, np.ndarray]  # name -> i32[steps] prompts of the first request
    exact: np.ndarray  # f64[steps]
    held_out: int  # index of the first step held out


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of rollouts as a * rounds + c * samples."""

    round: float
    sample: float
    r_squared: float
    deviation: float  # seconds, of what is left
    steps: int


def study(
    asked: Numbers, kept: Numbers, *, groups: int, samples: int,
    costs: simulation.Costs, seed: int, progress: Callable[[str], None],
) -> Study:
    """Fit `window` to the first three quarters of a run's steps and score it on the others."""
    base = config.Predictor()
    found = series(asked, kept, groups=groups, cfg=base, seed=seed, costs=costs, samples=samples)
    border = round(TRAINED * len(found.states))
    fitted_to, held_out = slice(0, border), slice(border, None)
    progress(f"fitting to {border} steps")

    def scored(cfg: config.Predictor, steps: slice) -> Score:
        return score(found, steps, cfg, costs=costs, samples=samples)

    fitted = constants(base, lambda cfg: scored(cfg, fitted_to).seconds, seed=seed)
    compared = {"window, fitted": fitted, "window, defaults": base,
                "cost_optimal": dataclasses.replace(base, kind="cost_optimal"),
                **{f"fixed {m:g} N": config.Predictor(kind="fixed", multiplier=m)
                   for m in (1.0, 1.5, 2.0, 3.0)}}
    return Study(fitted, {name: (scored(cfg, fitted_to), scored(cfg, held_out))
                          for name, cfg in compared.items()},
                 {name: requests(found, cfg) for name, cfg in list(compared.items())[:3]},
                 found.exact, border)


def series(asked: Numbers, kept: Numbers, *, groups: int, cfg: config.Predictor,
           seed: int, costs: simulation.Costs, samples: int) -> Series:
    """From the counts of all steps; `groups` are needed in each."""
    rng = np.random.default_rng(seed)
    states = [predictor.calibrated(predictor.init(cfg), round_cost=costs.round,
                                   prompt_cost=costs.sample * samples)]
    for total, good in zip(asked, kept, strict=True):
        states.append(predictor.update(states[-1], int(total), int(good), cfg=cfg))
    rate = (sum(kept) + 0.5) / (sum(asked) + 1.0)
    needed = np.stack([_needed(int(total), int(good), groups, rate, rng)
                       for total, good in zip(asked, kept, strict=True)])
    exact = groups * np.asarray(asked, float) / np.maximum(kept, 0.5)
    return Series(tuple(states[:-1]), needed, exact, groups)


def _needed(total: int, good: int, groups: int, rate: float,
            rng: np.random.Generator) -> np.ndarray:
    """Prompts until `groups` are informative, i32[orders], in random orders."""
    if good < groups:  # all of them, and as many others as are missing
        return total + (groups - good) + rng.negative_binomial(groups - good, rate, ORDERS)
    flags = np.zeros((ORDERS, total), bool)
    flags[:, :good] = True
    return np.argmax(np.cumsum(rng.permuted(flags, axis=1), axis=1) >= groups, axis=1) + 1


def score(found: Series, steps: slice, cfg: config.Predictor, *, costs: simulation.Costs,
          samples: int) -> Score:
    """Expected seconds of asking as `cfg` says, then once for the rest times the refill factor."""
    first = requests(found, cfg)[steps]
    needed, prompt = found.needed[steps], costs.sample * samples
    short = needed > first[:, None]
    rest = np.ceil(config.DynamicSampling().refill_factor * (needed - first[:, None]))
    seconds = costs.round + prompt * first[:, None] + short * (costs.round + prompt * rest)
    return Score(float(np.mean(seconds)), float(np.mean(short)),
                 float(np.mean(np.abs(first - found.exact[steps]))), float(np.mean(first)))


def requests(found: Series, cfg: config.Predictor) -> np.ndarray:
    """Prompts that each step's first request names, i32[steps]."""
    return np.array([predictor.predict(state, found.groups, cfg) for state in found.states],
                    np.int32)


def constants(cfg: config.Predictor, loss: Callable[[config.Predictor], float], *,
              seed: int) -> config.Predictor:
    """`cfg` with the alpha, gamma, ratios and q of least `loss`: a random search, then a walk.

    q scales both ratios, so one of them is held at 1. The given constants are among the candidates:
    the result is never worse than they are on the steps fitted to.
    """
    rng = np.random.default_rng(seed)
    low, high = (np.array(bound) for bound in zip(*BOUNDS.values(), strict=True))
    best = np.array([getattr(cfg, name) for name in BOUNDS])
    least = loss(_with(cfg, best))
    for narrower in range(ROUNDS + 1):
        reach, centre = 0.5 ** narrower * (high - low) / 2, best
        if not narrower:
            centre = (low + high) / 2
        for _ in range(NEIGHBOURS if narrower else CANDIDATES):
            values = _normalised(np.clip(centre + reach * rng.uniform(-1, 1, len(best)), low, high))
            value = loss(_with(cfg, values))
            if value < least:
                least, best = value, values
    return _with(cfg, best)


def _normalised(values: np.ndarray) -> np.ndarray:
    """The larger ratio is 1."""
    changed, places = values.copy(), [list(BOUNDS).index(name) for name in ("ratio1", "ratio2")]
    changed[places] /= np.max(changed[places])
    return changed


def _with(cfg: config.Predictor, values: np.ndarray) -> config.Predictor:
    changed: dict[str, Any] = dict(zip(BOUNDS, map(float, values), strict=True))
    return dataclasses.replace(cfg, **changed)


def round_costs(seconds: np.ndarray, rounds: np.ndarray, samples: np.ndarray) -> Costs:
    """Least squares of seconds on rounds and samples, f64[n] each.

    Raises ConfigError where the steps do not tell the two apart.
    """
    columns = np.stack([rounds, samples], 1)
    if len(seconds) < 3 or np.linalg.matrix_rank(columns / np.max(columns, axis=0)) < 2:
        raise config.ConfigError(
            f"{len(seconds)} steps do not tell the seconds of a round from those of its samples: "
            "record steps that differ in samples per round, at least 3")
    (per_round, per_sample), *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    rest = seconds - columns @ [per_round, per_sample]
    spread = np.sum((seconds - np.mean(seconds)) ** 2)
    explained = 1 - np.sum(rest ** 2) / spread if spread else float("nan")
    return Costs(float(per_round), float(per_sample), float(explained),
                 float(np.sqrt(np.sum(rest ** 2) / (len(seconds) - 2))), len(seconds))
