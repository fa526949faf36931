"""From hidden states to logits, and to log-probabilities and entropies without ever holding
the logits of a whole batch."""

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import layers


def logits(params: types.Tree, hidden: jax.Array, *, softcap: float | None = None) -> jax.Array:
    """f32[..., V] (f64 if hidden is) from hidden [..., D]; a tied head is the embedding.

    `softcap` is the model's (ModelSpec.logit_softcap), and comes before any temperature.
    """
    if "head" in params:
        kernel, letters = params["head"], "...d,dv->...v"
    else:
        kernel, letters = params["embedding"], "...d,vd->...v"
    products = jnp.einsum(letters, hidden, kernel.astype(hidden.dtype),
                          preferred_element_type=layers.wide_dtype(hidden))
    return layers.softcap(products, softcap)


def token_stats(
    params: types.Tree, hidden: jax.Array, targets: jax.Array, *, temperature: float, chunk: int,
    entropy_gradient: bool = False, softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[S, L] of targets i32[S, L] given hidden [S, L, D].

    The temperature divides the logits, as it does in the sampler. At most about `chunk` tokens'
    logits exist at once, forward and backward (each chunk is recomputed in the backward pass);
    chunks run along L so that a sharded S stays where it is.
    """
    slots, length, _ = hidden.shape
    width = min(length, max(1, chunk // slots))
    padding = -length % width
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(slots, -1, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scaled = logits(params, part[0], softcap=softcap) / temperature
        chosen = log_softmax_at(scaled, part[1])
        return chosen, entropy(scaled if entropy_gradient else jax.lax.stop_gradient(scaled))

    parts = jax.lax.map(one, (split(hidden), split(targets)))
    joined = (jnp.moveaxis(part, 0, 1).reshape(slots, -1)[:, :length] for part in parts)
    return tuple(joined)


def log_softmax_at(scaled: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(scaled)[tokens] for scaled f32[..., V], tokens i32[...]."""
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def entropy(scaled: jax.Array) -> jax.Array:
    """Entropy in nats of softmax(scaled) over the last axis."""
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
