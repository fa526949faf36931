"""An algorithm is a record: a paper is a preset function, and a variant is a changed field.

No preset has a KL term against a reference model: DAPO drops it, and the others are given without.
"""

import dataclasses
import math
from collections.abc import Collection

from dapo_jax import config
from dapo_jax.learner import advantages, losses, weights


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What one phase learns by; see `config.AlgorithmChoice` for the meaning of shared fields."""

    name: str
    advantage: str = "grpo"
    weights: str = "token"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_coef: float = 0.0
    ddof: int = 1
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
    """GRPO, arXiv 2402.03300: clip 0.2, the mean over samples of their mean over tokens."""
    return Algorithm("grpo", weights="sequence")


def dr_grpo() -> Algorithm:
    """Dr. GRPO, arXiv 2503.20783: no division by the group's deviation nor by a sample's length."""
    return Algorithm("dr_grpo", advantage="dr_grpo", weights="constant")


def reinforce_baseline() -> Algorithm:
    """REINFORCE++ with baseline, arXiv 2501.03262: group mean, whitened over the batch's tokens."""
    return Algorithm("reinforce_baseline", advantage="reinforce_baseline")


def rloo() -> Algorithm:
    """RLOO, arXiv 2402.14740: leave-one-out baseline, REINFORCE without a ratio or a clip.

    A sample is one action: its log-probs are summed (divided by the constant length limit). It
    has no correction for stale samples: use one update per step.
    """
    return Algorithm("rloo", advantage="rloo", weights="constant", ratio="none")


def gspo() -> Algorithm:
    """GSPO, arXiv 2507.18071: ratio and clip (3e-4 / 4e-4) of whole sequences."""
    return Algorithm("gspo", weights="sequence", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


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
    _known(algorithm.advantage, advantages.ADVANTAGES, where=f"{where}.advantage")
    _known(algorithm.weights, weights.WEIGHTS, where=f"{where}.weights")
    _known(algorithm.ratio, losses.RATIOS, where=f"{where}.ratio")
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
    return losses.LossSettings(
        ratio=algorithm.ratio, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip, entropy_coef=algorithm.entropy_coef)


def _known(name: str, names: Collection[str], *, where: str) -> None:
    if name not in names:
        hint = config.near(name, names) or f"; allowed: {', '.join(names)}"
        raise config.ConfigError(f"config.{where} is {name!r}, which is not known{hint}")


def _check_numbers(algorithm: Algorithm, *, where: str) -> None:
    rules = (
        ("clip_low", 0 <= algorithm.clip_low < 1, "has to be in [0, 1)"),
        ("clip_high", 0 <= algorithm.clip_high < math.inf, "has to be 0 or more"),
        ("dual_clip", algorithm.dual_clip == 0 or 1 < algorithm.dual_clip < math.inf,
         "has to be above 1, or 0 for none"),
        ("entropy_coef", math.isfinite(algorithm.entropy_coef), "has to be finite"),
        ("ddof", algorithm.ddof in (0, 1), "has to be 0 or 1"),
    )
    for field, holds, rule in rules:
        if not holds:
            raise config.ConfigError(
                f"config.{where}.{field} is {getattr(algorithm, field)}; it {rule}")


def _check_effects(algorithm: Algorithm, changes: Collection[str], *, where: str) -> None:
    for field in ("clip_low", "clip_high", "dual_clip"):
        if algorithm.ratio == "none" and field in changes:
            raise config.ConfigError(
                f"config.{where}.{field} has no effect with ratio 'none'; leave it out, or set "
                f"config.{where}.ratio to 'token' or 'sequence'")
    if "ddof" in changes and algorithm.advantage != "grpo":
        raise config.ConfigError(
            f"config.{where}.ddof has no effect with advantage {algorithm.advantage!r}; leave it "
            "out")
    if algorithm.samples == "demonstrations" and (
            algorithm.advantage != "ones" or algorithm.ratio != "none"):
        raise config.ConfigError(
            f"config.{where}: preset {algorithm.name!r} learns from demonstrations, which have no "
            "rewards and no sampler's log-probs; leave advantage and ratio as they are")
