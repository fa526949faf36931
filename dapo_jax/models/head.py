"""From hidden states to logits, and to log-probabilities and entropies without ever holding
the logits of a whole batch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import layers, placement

LOGIT_BYTES, MOST_TOKENS = 256 << 20, 1024  # of a chunk by default


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


def chunk_size(vocab: int) -> int:
    """Tokens whose logits exist at once if nothing else is asked for: at most 1024, no more than
    take 256 MiB; a power of two."""
    return min(MOST_TOKENS, 1 << max(0, (LOGIT_BYTES // (4 * vocab)).bit_length() - 1))


class _Form(NamedTuple):
    """What is static in the head's gradient."""

    temperature: float
    entropy_gradient: bool
    softcap: float | None


def token_stats(
    params: types.Tree, hidden: jax.Array, targets: jax.Array, *, temperature: float, chunk: int,
    entropy_gradient: bool = False, softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[S, L] of targets i32[S, L] given hidden [S, L, D].

    The temperature divides the logits, as it does in the sampler. On each device at most about
    `chunk` tokens' logits exist at once, forward and backward: where that is less than all, each
    chunk's are computed again in the backward pass. Chunks run along L so that a sharded S stays
    where it is.
    """
    slots, length, _ = hidden.shape
    form = _Form(temperature, entropy_gradient, softcap)
    width = min(length, max(1, chunk * placement.slot_parts() // slots))
    name = "head" if "head" in params else "embedding"
    kernel = {name: params[name]}
    if width == length:
        return _values(kernel, hidden, targets, form)[:2]
    padding = -length % width
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(slots, -1, width, *x.shape[2:]), 1, 0)

    parts = _chunked(form, kernel, split(hidden), split(targets))
    joined = (jnp.moveaxis(part, 0, 1).reshape(slots, -1)[:, :length] for part in parts)
    chosen, spread = joined
    return chosen, spread


def _values(kernel: types.Tree, hidden: jax.Array, targets: jax.Array, form: _Form
            ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability, entropy and the logarithm of the mass, of each token."""
    scaled = logits(kernel, hidden, softcap=form.softcap) / form.temperature
    mass = jax.nn.logsumexp(scaled, axis=-1)
    chosen = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0] - mass
    log_p = scaled - mass[..., None]
    return chosen, _entropy(log_p if form.entropy_gradient else jax.lax.stop_gradient(log_p)), mass


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(form: _Form, kernel: types.Tree, hidden: jax.Array, targets: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies [C, S, W] of hidden [C, S, W, D], a chunk C at a time."""
    return _forward(form, kernel, hidden, targets)[0]


def _forward(form: _Form, kernel: types.Tree, hidden: jax.Array, targets: jax.Array) -> tuple:
    whole = _gathered(kernel, hidden.dtype)
    chosen, spread, mass = jax.lax.map(
        lambda part: _values(whole, part[0], part[1], form), (hidden, targets))
    return (chosen, spread), (kernel, hidden, targets, spread, mass)


def _gathered(kernel: types.Tree, dtype: jnp.dtype) -> types.Tree:
    """The kernel on every device, but for its vocabulary: before a loop over chunks, else each of
    them gathers it."""
    over = (None, "tensor") if "head" in kernel else ("tensor", None)
    return jax.tree.map(lambda leaf: placement.constrain(leaf.astype(dtype), *over), kernel)


def _backward(form: _Form, kept: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
    """With probabilities p of logits z and entropy H: d log p[target] = onehot - p, and
    dH = -p (log p + H), each divided by the temperature and, if z is capped, times the cap's
    slope."""
    whole = _gathered(kept[0], kept[1].dtype)
    (name, table), = whole.items()
    back, down = ("slv,dv->sld", "psld,pslv->pdv") if name == "head" else (
        "slv,vd->sld", "psld,pslv->pvd")
    parts = placement.slot_parts()  # each sums its own slots' gradient: one exchange, at the end
    apart = lambda x: x.reshape(parts, -1, *x.shape[1:])  # noqa: E731
    over = (None, "tensor") if name == "head" else ("tensor", None)
    wide = layers.wide_dtype(table)

    def one(total: jax.Array, part: tuple) -> tuple[jax.Array, jax.Array]:
        hidden, targets, spread, mass, chosen_bar, spread_bar = part
        capped = logits(whole, hidden, softcap=form.softcap)
        log_p = capped / form.temperature - mass[..., None]
        p = jnp.exp(log_p)
        at = jax.lax.broadcasted_iota(targets.dtype, p.shape, p.ndim - 1) == targets[..., None]
        bar = chosen_bar[..., None] * (at - p)
        if form.entropy_gradient:
            bar -= spread_bar[..., None] * p * (log_p + spread[..., None])
        bar = bar / form.temperature
        if form.softcap is not None:
            bar = bar * (1 - (capped / form.softcap) ** 2)
        bar = bar.astype(hidden.dtype)
        more = jnp.einsum(down, apart(hidden), apart(bar), preferred_element_type=wide)
        return total + more, jnp.einsum(back, bar, table)

    zeros = placement.constrain(jnp.zeros((parts, *table.shape), wide), placement.SLOTS, *over)
    total, hidden_bar = jax.lax.scan(one, zeros, (*kept[1:], *cotangents))
    return {name: total.sum(axis=0).astype(kept[0][name].dtype)}, hidden_bar, None


_chunked.defvjp(_forward, _backward)


def log_softmax_at(scaled: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(scaled)[tokens] for scaled f32[..., V], tokens i32[...]."""
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def entropy(scaled: jax.Array) -> jax.Array:
    """Entropy in nats of softmax(scaled) over the last axis."""
    return _entropy(jax.nn.log_softmax(scaled, axis=-1))


def _entropy(log_p: jax.Array) -> jax.Array:
    # Written as a product: XLA for CPU sums it 30 times as fast where an axis of log_p is 1.
    return -jnp.einsum("...v,...v->...", jnp.exp(log_p), log_p, precision="highest")
