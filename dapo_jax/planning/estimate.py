"""Figures of the programs that a step runs, on each device: by the TPU compiler, or counted from
shapes alone, which works for every chip."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.models import transformer
from dapo_jax.planning import collectives, compiler, memory, programs, work

FEW = (2, 4)  # layers of the decode programs that are compiled: they write out each layer


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one program, on each device."""

    temporary: float  # bytes beside what it is given
    flops: float
    bytes: float  # read and written
    sent: tuple[collectives.Collective, ...]
    source: str  # where temporary bytes come from


def _numbers(planned: programs.Plan) -> int:
    shapes = jax.eval_shape(lambda: transformer.init(planned.spec, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _size(planned: programs.Plan) -> int:
    return jnp.dtype(planned.spec.compute_dtype).itemsize


def update_counted(planned: programs.Plan, mesh: jax.sharding.AbstractMesh, *, slots: int = 0
                   ) -> Estimate:
    """The gradient of a microbatch, from shapes."""
    accumulate = programs.only(programs.of_update(planned, mesh, slots=slots).accumulate)
    part, spec = memory.split(accumulate), planned.spec
    parts = memory.accumulate_temporary(spec, part, head_chunk=planned.cfg.model.head_chunk)
    total = work.counted(accumulate)
    sent = collectives.of_update(
        parameters=_numbers(planned), tokens=part.tokens, d_model=spec.d_model, layers=spec.layers,
        size=_size(planned), mesh=mesh.shape)
    return Estimate(sum(parts.values()), total.flops / mesh.size, total.bytes / mesh.size, sent,
                    "counted from the model's shape")


def update_compiled(planned: programs.Plan, mesh: jax.sharding.Mesh, counted: Estimate, *,
                    slots: int = 0) -> Estimate:
    """The same by the compiler: temporary bytes and, where its text can be had, collectives.
    Operations are those counted in what it was given, since it counts a loop's body once."""
    accumulate = programs.only(programs.of_update(planned, mesh, slots=slots).accumulate)
    figures = compiler.compiled(accumulate, text=True)
    sent = counted.sent if figures.sent is None else figures.sent
    source = "TPU compiler" + (" (its text could not be had: collectives are counted from the "
                               "model's shape)" if figures.sent is None else "")
    return Estimate(figures.temporary, counted.flops, counted.bytes, sent, source)


def prefill_counted(planned: programs.Plan, mesh: jax.sharding.AbstractMesh) -> Estimate:
    """Running as many prompts as one admission takes."""
    made = programs.of_rollout(planned, mesh)
    prefill, shape = programs.only(made.prefill), mesh.shape
    parts = shape["data"] * shape["fsdp"]
    part = memory.Split(1, planned.cfg.prompts.buckets[-1], 0, 0, shape["tensor"], 1.0)
    total = work.counted(prefill)
    temporary = memory.prefill_temporary(planned.spec, part, admitted=made.admitted // parts)
    gathered = _numbers(planned) / shape["tensor"] * _size(planned)
    sent = (collectives.Collective("all-gather", planned.spec.layers, gathered),) if (
        shape["fsdp"] > 1) else ()
    return Estimate(temporary, total.flops / mesh.size, total.bytes / mesh.size, sent,
                    "counted from the model's shape")


def prefill_compiled(planned: programs.Plan, mesh: jax.sharding.Mesh, counted: Estimate
                     ) -> Estimate:
    """The same, its temporary bytes and its result by the compiler."""
    figures = compiler.compiled(programs.only(programs.of_rollout(planned, mesh).prefill))
    return dataclasses.replace(counted, temporary=figures.temporary + figures.result,
                               source="TPU compiler")


def decode_counted(planned: programs.Plan, mesh: jax.sharding.AbstractMesh, *, slots: int = 0
                   ) -> Estimate:
    """Drawing one token of each row; all of the caches is read, as the program does."""
    few, more = (work.counted(programs.only(programs.of_rollout(
        planned, mesh, slots=slots, layers=layers).decode)) for layers in FEW)
    weights, state, *_ = programs.only(
        programs.of_rollout(planned, mesh, slots=slots).decode).arguments
    shape, spec = mesh.shape, planned.spec
    rows = state.live.size / (shape["data"] * shape["fsdp"])
    keys = planned.cfg.prompts.buckets[-1] + planned.cfg.rollout.max_new_tokens
    read = sum(map(memory.on_device, (weights, state.cache, state.own)))
    sent = collectives.of_token(
        weights=_numbers(planned), rows=rows, d_model=spec.d_model, layers=spec.layers,
        size=_size(planned), gather=planned.cfg.rollout.gather, mesh=shape)
    return Estimate(memory.decode_temporary(spec, rows=rows, tensor=shape["tensor"], keys=keys),
                    _line(few.flops, more.flops, spec.layers) / mesh.size, read, sent,
                    "counted from the model's shape")


def decode_compiled(planned: programs.Plan, mesh: jax.sharding.Mesh, *, slots: int = 0) -> Estimate:
    """The same by the compiler, from models of a few layers."""
    layers = [min(number, planned.spec.layers) for number in FEW]
    figures = [compiler.compiled(programs.only(programs.of_rollout(
        planned, mesh, slots=slots, layers=number).decode), text=True)
        for number in dict.fromkeys(layers)]
    ends = (*layers, planned.spec.layers)
    whole = compiler.by_layers(*figures, ends) if len(figures) > 1 else figures[0]
    return Estimate(whole.temporary, whole.flops, whole.bytes, whole.sent or (),
                    f"TPU compiler, continued from {layers[0]} and {layers[-1]} layers")


def _line(few: float, more: float, layers: int) -> float:
    return few + (more - few) / (FEW[1] - FEW[0]) * (layers - FEW[0])


def largest(fits_at: Callable[[int], bool], *, parts: int, least: int, most: int) -> int:
    """The largest multiple of `parts` from `least` to `most` of which `fits_at(number)` is true;
    0 if of none. It is asked at most 2 log2(most / parts) times, and fits less the larger."""
    low, high = 0, max(least, parts) // parts
    while high * parts <= most and fits_at(high * parts):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * parts <= most and fits_at(middle * parts) else (
            low, middle)
    return low * parts

