"""The optimizer: AdamW under a schedule that counts updates, never microbatches or samples."""

import jax
import jax.numpy as jnp
import optax

from dapo_jax import config, config_learner, types


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
    """Clip by the global norm (if `clip_norm` > 0), then AdamW; decay is decoupled.

    Moments and steps are float32 or wider, whatever the parameters are.
    """
    adamw = optax.adamw(schedule(cfg, horizon), b1=cfg.b1, b2=cfg.b2, eps=cfg.eps,
                        weight_decay=cfg.weight_decay)
    if cfg.clip_norm == 0:
        return _in_float32(adamw)
    return _in_float32(optax.chain(optax.clip_by_global_norm(cfg.clip_norm), adamw))


def widened(tree: types.Tree) -> types.Tree:
    """The tree with float32 for what is narrower: bfloat16 sums and moments lose small parts."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(
        grads: types.Tree, state: optax.OptState, params: types.Tree
    ) -> tuple[types.Tree, optax.OptState]:
        return inner.update(widened(grads), state, widened(params))
    return optax.GradientTransformation(lambda params: inner.init(widened(params)), update)


def _constant(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.constant_schedule(cfg.learning_rate)


def _linear(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.linear_schedule(cfg.learning_rate, cfg.end_factor * cfg.learning_rate, updates)


def _cosine(cfg: config_learner.Optimizer, updates: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(cfg.learning_rate, updates, alpha=cfg.end_factor)


SCHEDULES = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
