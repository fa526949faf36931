"""The records of the configuration that say how a phase learns; see config.py."""

import dataclasses

from dapo_jax.config_fields import option, section


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """A preset and what is changed in it; see learner/algorithms.py."""

    preset: str = option("dapo", "dapo, grpo, dr_grpo, reinforce_baseline, rloo, gspo, cispo or "
                         "sft")
    advantage: str | None = option(None, "name in learner/advantages.py")
    leave_one_out: bool | None = option(None, "the baseline is the mean of the group's others")
    advantage_clip: float | None = option(None, "largest size of an advantage; 0: no bound")
    ddof: int | None = option(None, "of the deviation of rewards: 1 or 0")
    weights: str | None = option(None, "name in learner/weights.py")
    ratio: str | None = option(None, "token, sequence or none")
    objective: str | None = option(None, "what the bounds of the ratio act on: clip, the loss; "
                                   "cispo, a constant weight of log p")
    clip_low: float | None = option(None, "ratio is clipped below 1 - this")
    clip_high: float | None = option(None, "ratio is clipped above 1 + this")
    dual_clip: float | None = option(None, "bound of the loss for negative advantages; 0: none")
    entropy_coef: float | None = option(None, "weight of the entropy bonus")
    kl_coef: float | None = option(None, "weight of the KL term against the reference model; 0: "
                                   "there is none")
    kl_estimator: str | None = option(None, "k1, k2, k3 or k3_weighted (learner/losses.py)")
    old_logprobs: str | None = option(None, "below the ratio: sampler, the stored ones; recomputed,"
                                      " those of the step's first parameters")
    importance: str | None = option(None, "token, sequence or none: weight recomputed / sampler's, "
                                    "where log-probs are recomputed")
    importance_mode: str | None = option(None, "weights out of bounds are cut to them (truncate) "
                                         "or set to 0 (mask)")
    importance_min: float | None = option(None, "lower bound of the importance weight")
    importance_max: float | None = option(None, "upper bound of the importance weight")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer of a phase and its schedule; see learner/optim.py."""

    name: str = option("adamw", "adafactor: no first moment, the second by rows and columns",
                       ("adamw", "adafactor"))
    learning_rate: float = option(1e-4, "peak")
    schedule: str = option("constant", "after the warm-up", ("constant", "linear", "cosine"))
    warmup_updates: int = option(5, "updates until the peak is reached")
    end_factor: float = option(0.0, "linear, cosine: last rate / peak")
    weight_decay: float = option(0.0, "decoupled")
    no_decay: tuple = option((), "patterns of parameters without decay, such as '*norm' or "
                             "'blocks.mlp.*'; * also matches dots")
    freeze: tuple = option((), "patterns of parameters that stay as they are")
    moment_dtype: str = option("float32", "adamw: bfloat16 halves the moments, rounded at random "
                               "so that no small part is lost", ("float32", "bfloat16"))
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
    updates_per_step: int = option(1, "mini-batches of whole groups that a step's samples are cut "
                                   "into, an update each; divides prompts_per_step")
    epochs_per_batch: int = option(1, "times that a step's samples are learned from")
    reference: str = option("", "what the KL term compares with: a folder of safetensors, or the "
                            "work directory of a run (its newest checkpoint), of the same shape; "
                            "empty: the parameters at the phase's start, or, where an adapter "
                            "is trained, the base model")
    microbatch_slots: int = option(32, "prompts per microbatch")
    microbatch_tokens: int = option(0, "tokens of a microbatch, padding included: it has as many "
                                    "slots as they hold, more of short ones; 0: microbatch_slots")
    packed_prompts: int = option(0, "prompt tokens of a slot that holds several prompts, whose "
                                 "rows (as long as the last completion bucket) hold several "
                                 "samples; 0: a prompt a slot, a sample a row")
    packed_rows: int = option(1, "rows of such a slot")
    completion_buckets: tuple = option((), "completion lengths in tokens that are compiled for "
                                       "updates; empty: max_new_tokens only")
    epochs: int = option(0, "passes over the prompts before the phase ends; 0: no limit. "
                        "Schedules and progress reckon with as many steps as the epochs fill "
                        "if no group is filtered out")
    algorithm: AlgorithmChoice = section(AlgorithmChoice)
    optimizer: Optimizer = section(Optimizer)
