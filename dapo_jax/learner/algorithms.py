"""An algorithm is a record: a paper is a preset function, and a variant is a changed field."""

import dataclasses
import math
from collections.abc import Collection, Mapping

from dapo_jax import config
from dapo_jax.learner import advantages, losses, weights


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What one phase learns by; see `config.AlgorithmChoice` for the meaning of shared fields."""

    name: str
    advantage: str = "grpo"
    leave_one_out: bool = False
    advantage_clip: float = 0.0
    ddof: int = 1
    weights: str = "token"
    ratio: str = "token"
    objective: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    old_logprobs: str = "sampler"
    importance: str = "token"
    importance_mode: str = "truncate"
    importance_min: float = 0.0
    importance_max: float = 2.0
    filter: bool = False  # keep informative groups only
    mask_overlong: bool = False  # leave truncated samples out of the loss
    samples: str = "rollout"  # or "demonstrations"


def dapo() -> Algorithm:
    """DAPO, arXiv 2503.14476: clip 0.2 / 0.28, token-level loss, only informative groups, no KL.

    Dual clip 10 is in the authors' script, not in the paper. Truncated samples stay in the loss:
    the soft overlong penalty, part of the reward, deals with them.
    """
    return Algorithm("dapo", clip_high=0.28, dual_clip=10.0, filter=True)


def grpo() -> Algorithm:
    """GRPO, arXiv 2402.03300: the mean over samples of their mean over tokens, KL 0.04 by k3.

    The paper gives no clip bound: 0.2 is PPO's. It holds a reference model (the parameters at the
    phase's start); kl_coef 0 leaves that out, as most later work does.
    """
    return Algorithm("grpo", weights="sequence", kl_coef=0.04)


def dr_grpo() -> Algorithm:
    """Dr. GRPO, arXiv 2503.20783: no division by the group's deviation nor by a sample's length,
    no KL."""
    return Algorithm("dr_grpo", advantage="dr_grpo", weights="constant")


def reinforce_baseline() -> Algorithm:
    """REINFORCE++ with baseline, arXiv 2501.03262: group mean, whitened over the batch's tokens.

    The paper's KL term is k2 in the loss; with verifiable rewards it is mostly left out, as here.
    Set kl_coef to have it.
    """
    return Algorithm("reinforce_baseline", advantage="reinforce_baseline", kl_estimator="k2")


def rloo() -> Algorithm:
    """RLOO, arXiv 2402.14740: leave-one-out baseline, REINFORCE without a ratio or a clip.

    A sample is one action: its log-probs are summed (divided by the constant length limit).
    Nothing corrects for the later updates of a step: use one. Samples of earlier steps are
    corrected for with recomputed log-probs only. The paper's KL is in the reward, and rewards here
    are verifiable; kl_estimator k2 in the loss has the same gradient token by token on policy.
    """
    return Algorithm("rloo", advantage="rloo", weights="constant", ratio="none", kl_estimator="k2")


def gspo() -> Algorithm:
    """GSPO, arXiv 2507.18071: ratio and clip (3e-4 / 4e-4) of whole sequences, no KL.

    The paper cuts a rollout batch into 4 mini-batches (updates_per_step).
    """
    return Algorithm("gspo", weights="sequence", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


def cispo() -> Algorithm:
    """CISPO, arXiv 2506.13585: the clipped ratio weighs log p and is not differentiated, so that no
    token loses its gradient; token-level loss, only informative groups, no KL.

    The paper has no lower bound and does not give its upper one; weights up to 5 are this
    preset's choice.
    """
    return Algorithm("cispo", objective="cispo", clip_low=1.0, clip_high=4.0, filter=True)


def sft() -> Algorithm:
    """Supervised fine-tuning: demonstrations with advantage 1, no ratio, cross-entropy by token."""
    return Algorithm("sft", advantage="ones", ratio="none", samples="demonstrations")


PRESETS = {
    "dapo": dapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce_baseline": reinforce_baseline,
    "rloo": rloo,
    "gspo": gspo,
    "cispo": cispo,
    "sft": sft,
}


def resolve(choice: config.AlgorithmChoice, *, where: str) -> Algorithm:
    """The preset with the choices that are not None put in; `where` is the section, "rl.algorithm".

    Raises ConfigError for unknown names, values out of range and choices that have no effect.
    """
    _known(choice.preset, PRESETS, where=f"{where}.preset")
    changes = {name: value for name, value in dataclasses.asdict(choice).items()
               if name != "preset" and value is not None}
    algorithm = dataclasses.replace(PRESETS[choice.preset](), **changes)
    for field, names in NAMES.items():
        _known(getattr(algorithm, field), names, where=f"{where}.{field}")
    _check_numbers(algorithm, where=where)
    _check_effects(algorithm, changes, where=where)
    return algorithm


def check(algorithm: Algorithm, *, samples_per_prompt: int, where: str) -> None:
    """Refuse groups of one where the samples of a group are compared; `where` as in `resolve`."""
    if samples_per_prompt > 1:
        return
    found = f"samples_per_prompt is {samples_per_prompt}"
    if algorithm.advantage != "ones":
        raise config.ConfigError(
            f"config.{where}.advantage is {algorithm.advantage!r}, which compares the samples of a "
            f"group, but {found}: every advantage would be 0; use 2 or more")
    if algorithm.filter:
        raise config.ConfigError(
            f"config.{where} filters groups, but {found}: no group of one is informative; use 2 "
            "or more, or set config.filter.enable to False")


def loss_settings(algorithm: Algorithm) -> losses.LossSettings:
    """The part of the record that the loss reads."""
    return losses.LossSettings(**{field.name: getattr(algorithm, field.name)
                                  for field in dataclasses.fields(losses.LossSettings)})


def advantage_settings(algorithm: Algorithm) -> advantages.Settings:
    """The part of the record that advantages read."""
    return advantages.Settings(ddof=algorithm.ddof, leave_one_out=algorithm.leave_one_out,
                               clip=algorithm.advantage_clip)


def _known(name: str, names: Collection[str], *, where: str) -> None:
    if name not in names:
        hint = config.near(name, names) or f"; allowed: {', '.join(names)}"
        raise config.ConfigError(f"config.{where} is {name!r}, which is not known{hint}")


def _check_numbers(algorithm: Algorithm, *, where: str) -> None:
    rules = (
        ("clip_low", 0 <= algorithm.clip_low <= 1, "has to be in [0, 1]; 1 is no bound"),
        ("clip_high", 0 <= algorithm.clip_high < math.inf, "has to be 0 or more"),
        ("dual_clip", algorithm.dual_clip == 0 or 1 < algorithm.dual_clip < math.inf,
         "has to be above 1, or 0 for none"),
        ("entropy_coef", math.isfinite(algorithm.entropy_coef), "has to be finite"),
        ("ddof", algorithm.ddof in (0, 1), "has to be 0 or 1"),
        ("advantage_clip", 0 <= algorithm.advantage_clip < math.inf, "has to be 0 or more"),
        ("kl_coef", 0 <= algorithm.kl_coef < math.inf, "has to be 0 or more"),
        ("importance_min", 0 <= algorithm.importance_min <= 1, "has to be in [0, 1]"),
        ("importance_max", 1 <= algorithm.importance_max < math.inf, "has to be 1 or more"),
    )
    for field, holds, rule in rules:
        if not holds:
            raise config.ConfigError(
                f"config.{where}.{field} is {getattr(algorithm, field)}; it {rule}")


def _check_effects(algorithm: Algorithm, changes: Mapping[str, object], *, where: str) -> None:
    """Refuse what was asked for and does nothing."""
    none = algorithm.ratio == "none"
    stored = algorithm.old_logprobs == "sampler"
    weighed = "importance_mode", "importance_min", "importance_max"
    rules = (
        (("clip_low", "clip_high", "dual_clip", "objective"), none, "ratio 'none'",
         f"or set config.{where}.ratio to 'token' or 'sequence'"),
        (("dual_clip",), algorithm.objective == "cispo", "objective 'cispo'", ""),
        (("ddof",), algorithm.advantage not in advantages.DEVIATIONS_OF_REWARDS,
         f"advantage {algorithm.advantage!r}", ""),
        (("leave_one_out",), algorithm.advantage in ("rloo", "ones"),
         f"advantage {algorithm.advantage!r}", ""),
        (("advantage_clip",), algorithm.advantage == "ones", "advantage 'ones'", ""),
        (("kl_estimator",), algorithm.kl_coef == 0, "kl_coef 0",
         f"or set config.{where}.kl_coef"),
        (("importance", *weighed), stored, "old_logprobs 'sampler', where the ratio already "
         "corrects everything", f"or set config.{where}.old_logprobs to 'recomputed'"),
        (weighed, algorithm.importance == "none", "importance 'none'", ""),
    )
    for fields, useless, reason, instead in rules:
        for field in fields:
            if useless and field in changes and changes[field] is not False:
                raise config.ConfigError(
                    f"config.{where}.{field} has no effect with {reason}; leave it out"
                    + (f", {instead}" if instead else ""))
    _check_demonstrations(algorithm, where=where)


def _check_demonstrations(algorithm: Algorithm, *, where: str) -> None:
    if algorithm.samples != "demonstrations":
        return
    if algorithm.advantage != "ones" or algorithm.ratio != "none":
        raise config.ConfigError(
            f"config.{where}: preset {algorithm.name!r} learns from demonstrations, which have no "
            "rewards and no sampler's log-probs; leave advantage and ratio as they are")
    for field, value in (("old_logprobs", "recomputed"), ("kl_estimator", "k3_weighted")):
        if getattr(algorithm, field) == value:
            raise config.ConfigError(
                f"config.{where}.{field} is {value!r}, which compares with the sampler's log-probs;"
                f" preset {algorithm.name!r} learns from demonstrations, which have none")


# Field of an algorithm -> names it may have.
NAMES: dict[str, Collection[str]] = {
    "advantage": advantages.ADVANTAGES,
    "weights": weights.WEIGHTS | weights.PACKED,
    "ratio": losses.RATIOS,
    "objective": [name for name in losses.OBJECTIVES if name != "none"],
    "kl_estimator": losses.KLS,
    "old_logprobs": losses.OLD_LOGPROBS,
    "importance": losses.IMPORTANCE,
    "importance_mode": losses.IMPORTANCE_MODES,
}
