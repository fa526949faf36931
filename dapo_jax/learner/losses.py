"""The policy loss: `sum(weights * per_token_loss)`, a plain sum with no divisor on the device.

Because weights (learner/weights.py) hold the normalisation, the sum over any split of the rows is
the sum over all of them, and so is its gradient. The loss never calls the model.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dapo_jax import types

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any clip, and finite when multiplied on


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Static part of the loss; `dual_clip` 0 is off, else above 1."""

    ratio: str  # a name in RATIOS
    clip_low: float
    clip_high: float
    dual_clip: float
    entropy_coef: float


def policy_loss(logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array,
                weights: jax.Array, *, entropy: jax.Array, settings: LossSettings
                ) -> tuple[jax.Array, types.Metrics]:
    """Clipped policy-gradient loss of one microbatch, summed, and its metrics.

    All arrays are f32[..., T]; the last axis is the sequence, and a token is in the loss where its
    weight is above 0. Whatever stands elsewhere, NaN included, touches neither loss nor gradient.
    Log-ratios are clamped to +-LOG_RATIO_LIMIT. Metrics are means over the loss tokens;
    `policy/kl` estimates KL(old || new) by r - 1 - log r.
    """
    used = weights > 0
    # Junk has to go before any arithmetic: 0 * NaN is NaN in the loss, and inf in a gradient.
    logprobs, old_logprobs, advantages, weights, entropy = (
        jnp.where(used, x, 0) for x in (logprobs, old_logprobs, advantages, weights, entropy))
    difference = logprobs - old_logprobs
    ratio = RATIOS[settings.ratio](difference, used)
    high = (advantages > 0) & (ratio > 1 + settings.clip_high)
    low = (advantages < 0) & (ratio < 1 - settings.clip_low)
    if settings.ratio == "none":
        high, low = jnp.zeros_like(used), jnp.zeros_like(used)
        per_token = -advantages * logprobs
    else:
        per_token = -advantages * _clip(ratio, advantages, high=high, low=low, settings=settings)
    loss = jnp.sum(weights * (per_token - settings.entropy_coef * entropy))
    metrics = _metrics(ratio, difference, entropy, used=used, high=high, low=low)
    if settings.ratio == "none":  # nothing is compared with what sampled
        metrics = {"policy/entropy": metrics["policy/entropy"]}
    return loss, metrics


def _clip(ratio: jax.Array, advantages: jax.Array, *, high: jax.Array, low: jax.Array,
          settings: LossSettings) -> jax.Array:
    """The ratio of max(min(r A, clip(r) A), c A if A < 0) / A.

    Written with `where`, not min and clip: those halve the gradient on ties, and with a clip of 0
    every on-policy token is one.
    """
    result = jnp.where(high, 1 + settings.clip_high, jnp.where(low, 1 - settings.clip_low, ratio))
    if settings.dual_clip:
        result = jnp.where((advantages < 0) & (ratio > settings.dual_clip), settings.dual_clip,
                           result)
    return result


def _metrics(ratio: jax.Array, difference: jax.Array, entropy: jax.Array, *, used: jax.Array,
             high: jax.Array, low: jax.Array) -> types.Metrics:
    count = used.sum().astype(ratio.dtype)

    def mean(values: jax.Array) -> types.Mean:
        return types.Mean(jnp.sum(jnp.where(used, values, 0), dtype=ratio.dtype), count)

    log_ratio = _clamp(difference)
    return {
        "policy/ratio_mean": mean(ratio),
        "policy/ratio_max": types.Max(jnp.max(jnp.where(used, ratio, 0))),
        "policy/clip_low": mean(low),
        "policy/clip_high": mean(high),
        "policy/kl": mean(jnp.expm1(log_ratio) - log_ratio),
        "policy/entropy": mean(entropy),
    }


def token_ratio(difference: jax.Array, used: jax.Array) -> jax.Array:
    """Each token's own ratio new / old; PPO, GRPO, DAPO."""
    return jnp.exp(_clamp(difference))


def sequence_ratio(difference: jax.Array, used: jax.Array) -> jax.Array:
    """The geometric mean of the row's ratios, at each of its tokens; GSPO (arXiv 2507.18071)."""
    count = jnp.maximum(used.sum(axis=-1, keepdims=True), 1)
    mean = difference.sum(axis=-1, keepdims=True) / count
    return jnp.broadcast_to(jnp.exp(_clamp(mean)), difference.shape)


def _clamp(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "none": token_ratio,  # not used: the loss is -A log p (SFT, REINFORCE)
}
