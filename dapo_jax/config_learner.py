"""The records of the configuration that say how a phase learns; see config.py."""

import dataclasses

from dapo_jax.config_fields import option, section


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """A preset and what is changed in it; see learner/algorithms.py."""

    preset: str = option("dapo", "dapo, grpo, dr_grpo, reinforce_baseline, rloo, gspo or sft")
    advantage: str | None = option(None, "name in learner/advantages.py")
    weights: str | None = option(None, "name in learner/weights.py")
    ratio: str | None = option(None, "token, sequence or none")
    clip_low: float | None = option(None, "ratio is clipped below 1 - this")
    clip_high: float | None = option(None, "ratio is clipped above 1 + this")
    dual_clip: float | None = option(None, "bound of the loss for negative advantages; 0: none")
    entropy_coef: float | None = option(None, "weight of the entropy bonus")
    ddof: int | None = option(None, "of the group's standard deviation: 1 or 0")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = option(1e-4, "peak")
    schedule: str = option("constant", "after the warm-up", ("constant", "linear", "cosine"))
    warmup_updates: int = option(5, "updates until the peak is reached")
    end_factor: float = option(0.0, "linear, cosine: last rate / peak")
    weight_decay: float = option(0.0, "decoupled")
    b1: float = option(0.9, "AdamW")
    b2: float = option(0.99, "AdamW")
    eps: float = option(1e-8, "AdamW")
    clip_norm: float = option(1.0, "largest norm of the gradient; 0: no limit")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of steps that learns in one way: `sft` from demonstrations, `rl` from rollouts."""

    steps: int = option(0, "outer steps; 0: as many as `epochs` fill, or leave the phase out")
    prompts_per_step: int = option(32, "groups trained on per step")
    samples_per_prompt: int = option(16, "samples per group (sft: 1)")
    updates_per_step: int = option(1, "optimizer updates per step; divides prompts_per_step")
    microbatch_slots: int = option(32, "prompts per microbatch")
    completion_buckets: tuple = option((), "completion lengths in tokens that are compiled for "
                                       "updates; empty: max_new_tokens only")
    epochs: int = option(0, "passes over the prompts before the phase ends; 0: no limit. "
                        "Schedules and progress reckon with as many steps as the epochs fill "
                        "if no group is filtered out")
    algorithm: AlgorithmChoice = section(AlgorithmChoice)
    optimizer: Optimizer = section(Optimizer)
