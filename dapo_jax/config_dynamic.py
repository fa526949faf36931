"""The configuration of dynamic sampling: how many prompts, which, how many samples each."""

import dataclasses

from dapo_jax.config_fields import option, section


@dataclasses.dataclass(frozen=True)
class Predictor:
    """How many prompts a step asks for first; see dynamic_sampling/predictor.py."""

    kind: str = option("window", "how the first request of a step is sized",
                       ("fixed", "window", "cost_optimal"))
    multiplier: float = option(3.0, "requested / needed. fixed: always; window: until the window "
                               "is full; cost_optimal: until there is an entry and a cost")
    window: int = option(8, "steps looked at")
    eager: bool = option(False, "window: predict from the entries there are, before it is full")
    alpha: float = option(1.0, "window: weight of the standard deviation")
    gamma: float = option(0.8, "window: decay of the weighted mean, per step")
    ratio1: float = option(1.0, "window: factor of mean + alpha * std")
    ratio2: float = option(1.0, "window: factor of the decayed mean")
    q: float = option(1.05, "window: factor of the larger of the two")
    max_multiplier: float = option(10.0, "bound of requested / needed")
    round_cost: float = option(0.0, "cost_optimal: cost of one more round, in any unit; 0: "
                               "measured once at the start")
    prompt_cost: float = option(0.0, "cost_optimal: cost of one more prompt, in the unit of "
                                "round_cost; 0: measured once at the start")


@dataclasses.dataclass(frozen=True)
class History:
    """What is remembered of each prompt; see dynamic_sampling/history.py."""

    decay: float = option(0.7, "what one visit leaves of the successes and trials of those before")
    prior_right: float = option(1.0, "successes that a prompt starts with")
    prior_wrong: float = option(1.0, "failures that a prompt starts with")


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many samples a prompt gets; see dynamic_sampling/budget.py."""

    kind: str = option("fixed", "how many samples a prompt gets (dynamic_sampling/budget.py)",
                       ("fixed", "hard_more", "screening", "successive", "allocate"))
    tau: float = option(0.9, "hard_more: wanted chance that right and wrong both occur")
    least: int = option(4, "hard_more, allocate: fewest samples of a prompt")
    most: int = option(0, "hard_more, successive, allocate: most samples of a prompt; 0: twice "
                       "samples_per_prompt")
    first: int = option(4, "screening, successive: samples of a stage")
    stages: int = option(1, "screening: stages after which a group without a difference is "
                         "dropped")
    each: int = option(2, "successive: samples wanted of either outcome")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which prompts are sampled; see dynamic_sampling/choice.py."""

    kind: str = option("epochs", "which prompts are sampled (dynamic_sampling/choice.py)",
                       ("epochs", "skip", "difficulty"))
    skip_growth: float = option(0.5, "skip: growth of the chance to be skipped per uninformative "
                                "visit in a row")
    skip_most: float = option(0.8, "skip: bound of that chance, below 1")
    target: float = option(0.5, "difficulty: pass rate that is sought")
    longest_gap: int = option(50, "difficulty: steps after which a visited prompt comes first; 0: "
                              "no limit")


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """How a step's batch is gathered, and within which limits."""

    predictor: Predictor = section(Predictor)
    history: History = section(History)
    budget: Budget = section(Budget)
    choice: Choice = section(Choice)
    refill_factor: float = option(1.25, "a refill asks for this times the expected need")
    carry_steps: int = option(1, "steps a surplus group may wait; 0: dropped and counted")
    carry_share: float = option(0.0, "surplus groups that may wait, as a share of "
                                "prompts_per_step; 0: any number")
    max_rounds: int = option(10, "generate rounds per step; rollout.mode = streaming: times that "
                             "the device is filled when nothing is left on it")
    max_prompts: int = option(0, "prompts per step; 0: twenty times prompts_per_step")
    at_limit: str = option("error", "too few groups at a limit: stop, train on fewer, or train on "
                           "none", ("error", "partial", "skip"))
    max_empty_steps: int = option(3, "steps in a row without an update before the run stops")
