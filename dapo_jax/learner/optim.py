"""The optimizer: AdamW or Adafactor under a schedule that counts updates, never microbatches or
samples."""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dapo_jax import config, config_learner, types


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The transformation and, for the log, its learning rate by number of updates."""

    transform: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]


def optimizer(cfg: config_learner.Optimizer, horizon: int) -> Optimizer:
    """That of a phase of `horizon` updates; see `transform` and `schedule`."""
    return Optimizer(transform(cfg, horizon), schedule(cfg, horizon))


def schedule(cfg: config_learner.Optimizer, horizon: int) -> optax.Schedule:
    """Learning rate of the update number `count` = 0, 1, ... of a phase of `horizon` updates.

    Warm-up is linear: update `count` uses the share (count + 1) / warmup_updates of the peak, so
    none is spent at rate 0; linear and cosine end at `end_factor` times the peak at the horizon
    and stay there.
    """
    decay_updates = horizon - cfg.warmup_updates
    if cfg.schedule != "constant" and decay_updates < 1:
        raise config.ConfigError(
            f"optimizer.warmup_updates is {cfg.warmup_updates}, which leaves no room for "
            f"the {cfg.schedule} schedule in {horizon} updates; use fewer, or schedule 'constant'")
    after = SCHEDULES[cfg.schedule](cfg, decay_updates)
    if cfg.warmup_updates == 0:
        return after
    warmup = optax.linear_schedule(cfg.learning_rate / cfg.warmup_updates, cfg.learning_rate,
                                   max(cfg.warmup_updates - 1, 1))
    return optax.join_schedules([warmup, after], [cfg.warmup_updates])


def transform(cfg: config_learner.Optimizer, horizon: int) -> optax.GradientTransformation:
    """Clip by the global norm (if `clip_norm` > 0), then AdamW or Adafactor; decay is decoupled.

    Steps are float32 or wider, whatever the parameters are, and so are moments unless
    `moment_dtype` says otherwise. Frozen parameters have neither moments nor steps.
    """
    parts = [optax.clip_by_global_norm(cfg.clip_norm)] if cfg.clip_norm else []
    inner = _in_float32(optax.chain(*parts, *OPTIMIZERS[cfg.name](cfg, schedule(cfg, horizon))))
    if not cfg.freeze:
        return inner
    return optax.partition(
        {"frozen": optax.set_to_zero(), "trained": inner},
        lambda params: jax.tree.map(lambda frozen: "frozen" if frozen else "trained",
                                    matches(params, cfg.freeze)))


def matches(tree: types.Tree, patterns: Sequence[str]) -> types.Tree:
    """For each leaf, whether one of `patterns` is that of its dotted path, "blocks.mlp.norm".

    Patterns are those of a shell: * is any text, dots included.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(fnmatch.fnmatchcase(_dotted(path), p) for p in patterns), tree)


def check_patterns(tree: types.Tree, patterns: Sequence[str], *, where: str) -> None:
    """ConfigError for a pattern that no parameter of `tree` has; `where` is its field."""
    names = [_dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for pattern in patterns:
        if not isinstance(pattern, str) or not fnmatch.filter(names, pattern):
            raise config.ConfigError(
                f"config.{where} holds {pattern!r}, which is the pattern of no parameter; the "
                f"parameters are {', '.join(names)}")


def widened(tree: types.Tree) -> types.Tree:
    """The tree with float32 for narrower floats: bfloat16 sums and moments lose small parts."""
    return jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _dotted(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(
        grads: types.Tree, state: optax.OptState, params: types.Tree
    ) -> tuple[types.Tree, optax.OptState]:
        return inner.update(widened(grads), state, widened(params))
    return optax.GradientTransformation(lambda params: inner.init(widened(params)), update)


# --------------------------------------------------------------------------------------- optimizers


def _adamw(
    cfg: config_learner.Optimizer, rate: optax.Schedule
) -> list[optax.GradientTransformation]:
    moments = optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)
    if cfg.moment_dtype == "bfloat16":
        moments = _narrow(moments)
    return [moments, _decay(cfg), optax.scale_by_learning_rate(rate)]


def _adafactor(
    cfg: config_learner.Optimizer, rate: optax.Schedule
) -> list[optax.GradientTransformation]:
    """arXiv 1804.04235, without a first moment and with absolute rates, as AdamW's are."""
    return [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), _decay(cfg),
            optax.scale_by_learning_rate(rate)]


def _decay(cfg: config_learner.Optimizer) -> optax.GradientTransformation:
    def decays(params: types.Tree) -> types.Tree:
        return jax.tree.map(lambda matched: not matched, matches(params, cfg.no_decay))
    return optax.add_decayed_weights(cfg.weight_decay, mask=decays if cfg.no_decay else None)


class _Narrow(NamedTuple):
    # A tuple's own method of this name is not called.
    count: jax.Array  # type: ignore[assignment]  # i32[] updates, for the rounding's random numbers
    inner: optax.OptState  # its float32 arrays as bfloat16


def _narrow(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the moments of `inner` in bfloat16.

    They are rounded up or down at random in proportion to what is cut off: rounded to the nearest,
    a second moment would stand still where a step of 1 - b2 is below 1/512 of it.
    """
    def init(params: types.Tree) -> _Narrow:
        state = inner.init(params)
        return _Narrow(jnp.zeros([], jnp.int32), jax.tree.map(_halved, state))

    def update(
        grads: types.Tree, state: _Narrow, params: types.Tree
    ) -> tuple[types.Tree, _Narrow]:
        steps, wide = inner.update(grads, widened(state.inner), params)
        root = jax.random.fold_in(jax.random.key(0), state.count)
        leaves, structure = jax.tree.flatten(wide)
        leaves = [_rounded(leaf, jax.random.fold_in(root, i)) for i, leaf in enumerate(leaves)]
        return steps, _Narrow(state.count + 1, jax.tree.unflatten(structure, leaves))
    return optax.GradientTransformation(init, update)


def _halved(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf


def _rounded(leaf: jax.Array, key: jax.Array) -> jax.Array:
    """A float32 array as bfloat16: random bits are added below the 16 that are kept, so that the
    mean of many roundings is the number. Infinities and NaN stay."""
    if leaf.dtype != jnp.float32:
        return leaf
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    random = jax.random.bits(key, leaf.shape, jnp.uint16).astype(jnp.uint32)
    kept = ((bits + random) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
    return jnp.where(jnp.isfinite(leaf), rounded, leaf.astype(jnp.bfloat16))


# ---------------------------------------------------------------------------------------- schedules


def _constant(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.constant_schedule(cfg.learning_rate)


def _linear(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.linear_schedule(cfg.learning_rate, cfg.end_factor * cfg.learning_rate, updates)


def _cosine(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(cfg.learning_rate, updates, alpha=cfg.end_factor)


OPTIMIZERS = {
    "adamw": _adamw,
    "adafactor": _adafactor,
}
SCHEDULES = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
