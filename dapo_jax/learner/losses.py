"""The policy loss: `sum(weights * per_token_loss)`, a plain sum with no divisor on the device.

Because weights (learner/weights.py) hold the normalisation, the sum over any split of the rows is
the sum over all of them, and so is its gradient. The loss never calls the model.

What stands between the parameters that sampled a token and those that learn from it is corrected
once. Where the sampler's own log-probs are the denominator of the ratio, the ratio is the whole
correction. Where they were recomputed at the step's start, the ratio is new / recomputed, and the
importance weight recomputed / sampler's (a constant) is the rest: for the sampler's rounding and
for samples carried from an earlier step alike.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax import reductions
from dapo_jax.learner import segments

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any clip, and finite when multiplied on


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Static part of the loss; see `config.AlgorithmChoice` for the fields' meaning."""

    ratio: str = "token"  # a name in RATIOS
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0 is off, else above 1
    entropy_coef: float = 0.0
    objective: str = "clip"  # a name in OBJECTIVES
    kl_estimator: str = "k3"  # a name in KLS
    kl_coef: float = 0.0  # 0: no reference model
    old_logprobs: str = "sampler"  # a name in OLD_LOGPROBS
    importance: str = "token"  # a name in IMPORTANCE; without effect unless old are recomputed
    importance_mode: str = "truncate"  # a name in IMPORTANCE_MODES
    importance_min: float = 0.0
    importance_max: float = 2.0


def policy_loss(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, weights: jax.Array, *,
    entropy: jax.Array, settings: LossSettings, sampled: jax.Array | None = None,
    reference: jax.Array | None = None, sample: jax.Array | None = None,
) -> tuple[jax.Array, reductions.Metrics]:
    """Policy-gradient loss of one microbatch, summed, and its metrics.

    Arrays are f32[..., T]; the last axis is the sequence, and a token is in the loss where its
    weight is above 0. What stands elsewhere, NaN included, touches neither loss nor gradient.
    `sampled`: the sampler's log-probs, where `old_logprobs` are not those. `reference`: the
    reference model's, needed if kl_coef is not 0. `sample` i32[..., T]: which tokens of a
    row belong to one sample, where it holds several (segments.totals). Log-ratios are clamped to
    +-LOG_RATIO_LIMIT. Metrics are means over the loss tokens; `policy/kl` estimates KL(old || new)
    by r - 1 - log r, `policy/kl_reference` KL(new || reference) by k3, whatever is in the loss.
    """
    used = weights > 0
    # Junk has to go before any arithmetic: 0 * NaN is NaN in the loss, and inf in a gradient.
    clean: Iterator[Any] = (
        x if x is None else jnp.where(used, x, 0)
        for x in (logprobs, old_logprobs, advantages, weights, entropy, sampled, reference))
    logprobs, old_logprobs, advantages, weights, entropy, sampled, reference = clean
    difference = logprobs - old_logprobs
    ratio = RATIOS[settings.ratio](difference, used, sample)
    objective = OBJECTIVES["none" if settings.ratio == "none" else settings.objective]
    per_token, low, high = objective(ratio, logprobs, advantages, settings=settings)
    metrics = _metrics(ratio, difference, entropy, used=used, high=high, low=low)
    if settings.ratio == "none":  # nothing is compared with what sampled
        metrics = {"policy/entropy": metrics["policy/entropy"]}
    correction = jnp.ones_like(ratio)
    if sampled is not None and settings.importance != "none":
        correction, more = _importance(old_logprobs - sampled, used, sample, settings=settings)
        metrics |= more
    per_token = correction * per_token - settings.entropy_coef * entropy
    if settings.kl_coef:
        assert reference is not None  # update.scored put it there
        to_sampler = correction * jnp.exp(_clamp(difference))
        estimate = KLS[settings.kl_estimator](logprobs - reference, to_sampler)
        per_token += settings.kl_coef * estimate
        metrics["policy/kl_reference"] = _mean(k3(logprobs - reference, ratio), used)
    return jnp.sum(weights * per_token), metrics


def _metrics(ratio: jax.Array, difference: jax.Array, entropy: jax.Array, *, used: jax.Array,
             high: jax.Array, low: jax.Array) -> reductions.Metrics:
    log_ratio = _clamp(difference)
    return {
        "policy/ratio_mean": _mean(ratio, used),
        "policy/ratio_max": reductions.Max(jnp.max(jnp.where(used, ratio, 0))),
        "policy/clip_low": _mean(low, used),
        "policy/clip_high": _mean(high, used),
        "policy/kl": _mean(jnp.expm1(log_ratio) - log_ratio, used),
        "policy/entropy": _mean(entropy, used),
        "policy/ess": _effective(ratio, used),
    }


def _mean(values: jax.Array, used: jax.Array) -> reductions.Mean:
    dtype = jnp.result_type(values.dtype, jnp.float32)
    return reductions.Mean(jnp.sum(jnp.where(used, values, 0), dtype=dtype),
                           used.sum().astype(dtype))


def _effective(values: jax.Array, used: jax.Array) -> reductions.Effective:
    """The effective sample size (Kish) of `values` as a share of the loss tokens."""
    values = jnp.where(used, values, 0)
    return reductions.Effective(values.sum(), (values ** 2).sum(), used.sum().astype(values.dtype))


# ------------------------------------------------------------------------------------------ ratios


def token_ratio(difference: jax.Array, used: jax.Array, sample: jax.Array | None) -> jax.Array:
    """Each token's own ratio new / old; PPO, GRPO, DAPO."""
    return jnp.exp(_clamp(difference))


def sequence_ratio(
    difference: jax.Array, used: jax.Array, sample: jax.Array | None
) -> jax.Array:
    """The geometric mean of the sample's ratios, at each of its tokens; GSPO (arXiv 2507.18071)."""
    count = jnp.maximum(segments.totals(used.astype(difference.dtype), sample), 1)
    return jnp.exp(_clamp(segments.totals(difference, sample) / count))


def _clamp(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# -------------------------------------------------------------------------------------- objectives


Objective = tuple[jax.Array, jax.Array, jax.Array]  # loss of each token, cut below, cut above


def clipped(ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array, *,
            settings: LossSettings) -> Objective:
    """max(-r A, -clip(r) A), and at most -c A for A < 0: dual clip, arXiv 1912.09729.

    Written with `where`, not min and clip: those halve the gradient on ties, and with a clip of 0
    every on-policy token is one.
    """
    high = (advantages > 0) & (ratio > 1 + settings.clip_high)
    low = (advantages < 0) & (ratio < 1 - settings.clip_low)
    kept = jnp.where(high, 1 + settings.clip_high, jnp.where(low, 1 - settings.clip_low, ratio))
    if settings.dual_clip:
        kept = jnp.where((advantages < 0) & (ratio > settings.dual_clip), settings.dual_clip, kept)
    return -advantages * kept, low, high


def cispo(ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array, *,
          settings: LossSettings) -> Objective:
    """-sg(clip(r)) A log p: the bound weighs a token down, but leaves its gradient; 2506.13585."""
    low, high = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    weight = jnp.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    return -jax.lax.stop_gradient(weight) * advantages * logprobs, low, high


def reinforce(ratio: jax.Array, logprobs: jax.Array, advantages: jax.Array, *,
              settings: LossSettings) -> Objective:
    """-A log p: REINFORCE, and with A = 1 cross-entropy."""
    no = jnp.zeros(ratio.shape, bool)
    return -advantages * logprobs, no, no


# ---------------------------------------------------------------------------- KL to the reference
#
# `apart` is log p - log p_ref of tokens from the sampler; each function's value estimates
# KL(p || p_ref), and its own derivative is what enters the gradient.


def k1(apart: jax.Array, ratio: jax.Array) -> jax.Array:
    """log p - log p_ref. Gradient: that of log p, whose mean on policy is 0, so in the loss it
    holds nothing near the reference; it is here to be compared with."""
    return apart


def k2(apart: jax.Array, ratio: jax.Array) -> jax.Array:
    """(log p - log p_ref)^2 / 2. Gradient: apart * grad log p, on policy that of KL(p || p_ref)
    without bias, though the value has one."""
    return apart ** 2 / 2


def k3(apart: jax.Array, ratio: jax.Array) -> jax.Array:
    """p_ref / p - 1 - log(p_ref / p), >= 0; GRPO (arXiv 2402.03300). Gradient:
    (1 - p_ref / p) * grad log p, on policy that of KL(p_ref || p): the other direction. It is 0
    where the clamp of the log-ratio holds."""
    apart = _clamp(apart)
    return jnp.expm1(-apart) + apart


def k3_weighted(apart: jax.Array, ratio: jax.Array) -> jax.Array:
    """k3 times p / p_sampler; DeepSeek-V3.2 (arXiv 2512.02556). The ratio is differentiated too,
    which makes the gradient ratio * apart * grad log p: without bias, also off policy."""
    return ratio * k3(apart, ratio)


# ------------------------------------------------------------------------------ importance weights


def _importance(
    gap: jax.Array, used: jax.Array, sample: jax.Array | None, *, settings: LossSettings
) -> tuple[jax.Array, reductions.Metrics]:
    """Bounded weights old / sampled, constants, and what is logged of them: the share of tokens
    out of bounds, and of the weights before the bounds their mean and effective sample size."""
    gap = jax.lax.stop_gradient(gap)
    weight = jnp.exp(_clamp(IMPORTANCE[settings.importance](gap, sample)))
    outside = (weight < settings.importance_min) | (weight > settings.importance_max)
    bounded = IMPORTANCE_MODES[settings.importance_mode](weight, outside, settings)
    return bounded, {
        "policy/ess": _effective(weight, used),
        "policy/importance_mean": _mean(weight, used),
        "policy/importance_cut": _mean(outside, used)}


def _truncate(weight: jax.Array, outside: jax.Array, settings: LossSettings) -> jax.Array:
    return jnp.clip(weight, settings.importance_min, settings.importance_max)


def _mask(weight: jax.Array, outside: jax.Array, settings: LossSettings) -> jax.Array:
    return jnp.where(outside, 0, weight)


RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "none": token_ratio,  # not used: the loss is -A log p (SFT, REINFORCE)
}
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "clip": clipped,
    "cispo": cispo,
    "none": reinforce,
}
KLS = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_weighted": k3_weighted,
}
OLD_LOGPROBS = ("sampler", "recomputed")
IMPORTANCE = {
    "token": lambda gap, sample: gap,
    "sequence": segments.totals,  # the product of the sample's ratios
    "none": lambda gap, sample: jnp.zeros_like(gap),
}
IMPORTANCE_MODES = {
    "truncate": _truncate,
    "mask": _mask,
}
