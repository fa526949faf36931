"""One optimizer update: gradients of microbatches are summed, then applied.

The weights already hold the normalisation, so a plain sum over microbatches is exact for any
split. `accumulate` and `apply` are compiled once per shape and driven by a host loop, which hands
over short microbatches in stacks (stacks.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from dapo_jax import config, reductions, types
from dapo_jax.learner import losses, optim, packing, stacks, train_states
from dapo_jax.models import head, lora, packed
from dapo_jax.models.spec import ModelSpec
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in an update."""

    loss: losses.LossSettings
    temperature: float
    head_chunk: int
    frozen: tuple[str, ...] = ()  # patterns of parameters that have no gradient
    lora: config.Lora = config.Lora()  # of rank 0: all parameters are trained


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled functions of one phase, those of microbatches by (P, T).

    `old` and `reference` give log-probs of the parameters and of the reference model; they are
    empty where the loss needs none. Where an adapter is trained, `accumulate` and `old` take the
    base model as one argument more, which is never copied. `stacks` says how many microbatches
    they all take: of more than one a types.Stack.
    """

    start: Callable
    accumulate: Mapping[tuple[int, int], Callable]
    apply: Callable
    old: Mapping[tuple[int, int], Callable]
    reference: Mapping[tuple[int, int], Callable]
    batch_sharding: NamedSharding
    stacks: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)


Sums = tuple[types.Tree, reductions.Metrics]  # gradients and metrics summed so far


def token_logprobs(
    spec: ModelSpec, settings: Settings, params: types.Tree, batch: types.TrainBatch
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[S, R, T] of each completion token, prompts run once.

    The state that predicts token t is that of token t - 1; for t = 0, of the prompt's last token.
    """
    slots, rows, width = batch.tokens.shape
    states = packed.states(spec, params, batch)
    stats = head.token_stats(
        params, states.reshape(slots, rows * width, -1), batch.tokens.reshape(slots, -1),
        temperature=settings.temperature, chunk=settings.head_chunk,
        entropy_gradient=settings.loss.entropy_coef != 0, softcap=spec.logit_softcap)
    logprobs, entropy = (x.reshape(batch.tokens.shape) for x in stats)
    return logprobs, entropy


def loss(
    params: types.Tree, batch: types.TrainBatch, base: types.Tree | None = None, *,
    spec: ModelSpec, settings: Settings,
) -> tuple[jax.Array, reductions.Metrics]:
    """The microbatch's part of the update's loss; with a base model `params` are its adapter."""
    held = optim.matches(params, settings.frozen)
    params = jax.tree.map(lambda leaf, h: jax.lax.stop_gradient(leaf) if h else leaf, params, held)
    logprobs, entropy = token_logprobs(spec, settings, _whole(params, base, settings), batch)
    value, metrics = losses.policy_loss(
        logprobs, batch.logprobs if batch.old is None else batch.old, batch.advantages,
        batch.weights, entropy=entropy, settings=settings.loss,
        sampled=None if batch.old is None else batch.logprobs,
        reference=batch.reference, sample=None if batch.packed is None else batch.packed.after)
    fresh = (batch.fresh > 0) & (batch.weights > 0)
    gap = jnp.where(fresh, jnp.abs(logprobs - batch.logprobs), 0)
    metrics |= {"policy/loss": reductions.Mean(value, jnp.float32(0)),  # `apply` counts the update
                "mismatch/mean": reductions.Mean(gap.sum(), fresh.sum()),
                "mismatch/max": reductions.Max(gap.max())}
    return value, metrics


def _whole(params: types.Tree, base: types.Tree | None, settings: Settings) -> types.Tree:
    """The parameters that are run."""
    return params if base is None else lora.attach(base, params, settings.lora)


def score(
    params: types.Tree, batch: stacks.Batches, base: types.Tree | None = None, *,
    spec: ModelSpec, settings: Settings,
) -> jax.Array:
    """Log-probs f32[S, R, T] of a microbatch's completions; of a stack f32[M, S, R, T], 0 where
    nothing is run."""
    if isinstance(batch, types.Stack):
        def one(index: jax.Array, found: jax.Array) -> jax.Array:
            return found.at[index].set(
                score(params, batch[index], base, spec=spec, settings=settings))
        return jax.lax.fori_loop(0, batch.count, one, jnp.zeros_like(batch.batch.logprobs))
    return token_logprobs(spec, settings, _whole(params, base, settings), batch)[0]


def start(
    params: types.Tree, batch: types.TrainBatch, base: types.Tree | None = None, *,
    spec: ModelSpec, settings: Settings,
) -> Sums:
    """Zero sums; `batch` and `base` give only shapes."""
    _, metrics = jax.eval_shape(
        lambda *args: loss(*args, spec=spec, settings=settings), params, batch, base)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    return jax.tree.map(jnp.zeros_like, optim.widened(params)), zeros


def accumulate(
    sums: Sums, params: types.Tree, batch: stacks.Batches, base: types.Tree | None = None, *,
    spec: ModelSpec, settings: Settings,
) -> Sums:
    """Add one microbatch's gradient and metrics, or in turn those of a stack."""
    if isinstance(batch, types.Stack):
        return jax.lax.fori_loop(
            0, batch.count, lambda index, sums: accumulate(
                sums, params, batch[index], base, spec=spec, settings=settings), sums)
    gradient = jax.grad(lambda p: loss(p, batch, base, spec=spec, settings=settings), has_aux=True)
    grads, metrics = gradient(params)
    return jax.tree.map(jnp.add, sums[0], grads), reductions.merge(sums[1], metrics)


def apply(
    state: types.TrainState, sums: Sums, *, optimizer: optim.Optimizer
) -> tuple[types.TrainState, reductions.Metrics]:
    """Take one optimizer step with the summed gradient.

    Where loss or gradient are not finite there is no step: parameters, optimizer and schedule stay
    as they are, and `policy/skipped` alone counts the update.
    """
    grads, metrics = sums
    mean = metrics["policy/loss"]
    assert isinstance(mean, reductions.Mean)
    one, loss, norm = jnp.float32(1), mean.total, optax.tree.norm(grads)
    metrics = metrics | {
        "policy/loss": reductions.Mean(loss, one),
        "policy/grad_norm": reductions.Mean(norm, one),
        "policy/lr": reductions.Mean(
            jnp.asarray(optimizer.schedule(state.updates), jnp.float32), one)}
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)

    def step(before: types.TrainState) -> types.TrainState:
        steps, opt_state = optimizer.transform.update(grads, before.opt_state, before.params)
        return types.TrainState(optax.apply_updates(before.params, steps), opt_state,
                                before.updates + 1)
    # Not `where`: that would hold the parameters twice.
    state = jax.lax.cond(sound, step, lambda before: before, state)
    metrics = jax.tree.map(lambda value: jnp.where(sound, value, jnp.zeros_like(value)), metrics)
    return state, metrics | {"policy/skipped": reductions.Sum(1 - sound.astype(jnp.int32))}


def compile_programs(
    spec: ModelSpec, settings: Settings, optimizer: optim.Optimizer, mesh: mesh_lib.AnyMesh, *,
    pack: packing.PackShape, build: mesh_lib.Build = mesh_lib.compiled,
) -> Programs:
    """Compile every program that a phase's updates need; `build` makes one of a jitted function,
    the mesh and shapes of the arguments."""
    state = train_states.state_structs(spec, optimizer, mesh, settings.lora)
    base = (mesh_lib.model_structs(mesh, spec),) if settings.lora.rank else ()
    packed = {shape: train_states.batch_structs(mesh, pack, *shape)
              for shape in packing.shapes(pack)}
    sizes = {shape: packing.stacked(pack, *shape) for shape in packed}
    static: dict[str, Any] = {"spec": spec, "settings": settings}
    whole, split = mesh_lib.replicated(mesh), mesh_lib.batch_sharding(mesh)
    scorers = functools.partial(_scorers, mesh, build, packed, sizes, static)
    old = scorers(state.params, *base) if settings.loss.old_logprobs == "recomputed" else {}
    reference = (scorers(train_states.reference_structs(spec, mesh, settings.lora))
                 if settings.loss.kl_coef != 0 else {})
    batches = {shape: dataclasses.replace(batch, old=batch.logprobs if old else None,
                                          reference=batch.logprobs if reference else None)
               for shape, batch in packed.items()}
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    sums_placed = (placed.params, whole)
    first = next(iter(batches.values()))
    begin = jax.jit(lambda params: start(params, first, *base, **static),
                    out_shardings=sums_placed)
    sums = jax.eval_shape(begin, state.params)
    sums = (mesh_lib.structs(sums[0], placed.params), mesh_lib.structs(sums[1], whole))
    add = jax.jit(lambda *args: accumulate(*args, **static), donate_argnums=0,
                  out_shardings=sums_placed)
    finish = jax.jit(lambda *args: apply(*args, optimizer=optimizer), donate_argnums=0,
                     out_shardings=(placed, whole))
    return Programs(
        start=build(begin, mesh, state.params),
        accumulate={shape: build(add, mesh, sums, state.params,
                                 stacks.structs(batch, sizes[shape]), *base)
                    for shape, batch in batches.items()},
        apply=build(finish, mesh, state, sums),
        old=old, reference=reference, batch_sharding=split, stacks=sizes)


def _scorers(
    mesh: mesh_lib.AnyMesh, build: mesh_lib.Build,
    packed: Mapping[tuple[int, int], types.TrainBatch], sizes: Mapping[tuple[int, int], int],
    static: Mapping[str, Any], params: types.Tree, *more: types.Tree,
) -> dict[tuple[int, int], Callable]:
    """Programs that give log-probs of one model, by shape; see `score`."""
    split = mesh_lib.batch_sharding(mesh)
    return {shape: build(
        jax.jit(lambda *args: score(*args, **static),
                out_shardings=stacks.placed(split, sizes[shape])),
        mesh, params, stacks.structs(batch, sizes[shape]), *more)
        for shape, batch in packed.items()}


def scored(
    programs: Programs, params: types.Tree, reference: types.Tree | None,
    batches: Iterable[stacks.Batches], *, base: types.Tree | None = None,
) -> list[stacks.Batches]:
    """Microbatches, stacked, with the log-probs that the loss compares with, on the devices; those
    of the host where there is nothing to compute. To be called before the step's first update."""
    if not (programs.old or programs.reference):
        return list(batches)
    result, more = [], () if base is None else (base,)
    for batch in stacks.stacked(batches, programs.stacks):
        shape, batch = stacks.shape(batch), stacks.put(batch, programs.batch_sharding)
        result.append(stacks.changed(
            batch, old=programs.old[shape](params, batch, *more) if programs.old else None,
            reference=programs.reference[shape](reference, batch) if programs.reference else None))
    return result


def update(
    programs: Programs, state: types.TrainState, batches: Iterable[stacks.Batches], *,
    base: types.Tree | None = None,
) -> tuple[types.TrainState, reductions.Metrics]:
    """One optimizer update from microbatches whose weights belong together; see `scored`.

    `state` is consumed, `base`, the model under an adapter, is not. Dispatches only: the metrics
    come back as device arrays.
    """
    sums, more = programs.start(state.params), () if base is None else (base,)
    for batch in stacks.stacked(batches, programs.stacks):
        sums = programs.accumulate[stacks.shape(batch)](
            sums, state.params, stacks.put(batch, programs.batch_sharding), *more)
    return programs.apply(state, sums)
