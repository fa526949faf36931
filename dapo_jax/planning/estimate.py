"""Figures of the programs that a step runs, on each device, counted from shapes: the model's and
what its programs are given. This works for every chip; compiled.py asks a compiler."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dapo_jax.learner import update as learner
from dapo_jax.models import transformer
from dapo_jax.planning import collectives, memory, programs, work
from dapo_jax.rollout import programs as sampler

FEW = (2, 4)  # layers of the programs of which a few stand for all: they write out each layer
COUNTED = "counted from shapes"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one program, on each device."""

    temporary: float  # bytes beside what outlives it (memory.Held)
    flops: float
    bytes: float  # read and written
    sent: tuple[collectives.Collective, ...] = ()
    source: str = COUNTED  # where temporary bytes come from
    sent_from: str = COUNTED
    saved: float = 0.0  # of the update: bytes that a token leaves for the backward pass


def counted(
    planned: programs.Plan, mesh: jax.sharding.AbstractMesh, *, update: learner.Programs,
    rollout: sampler.Programs,
) -> dict[str, Estimate]:
    """Estimates of all programs by name: those of the update, then those of the rollout."""
    found = {"update": of_update(planned, update, mesh)}
    for name in ("old", "reference"):
        if getattr(update, name):
            found[f"log-probs, {name}"] = _score(planned, getattr(update, name), mesh)
    return found | {"apply": _apply(update)} | {
        "weights": _weights(planned, rollout, mesh), "prefill": _prefill(planned, rollout, mesh),
        "admit": _admit(rollout), "decode": _decode(planned, rollout, mesh)} | (
            {"resize": _resize(planned, mesh)} if len(planned.cfg.rollout.slots) > 1 else {})


def numbers(planned: programs.Plan) -> int:
    """Parameters of the model."""
    shapes = jax.eval_shape(lambda: transformer.init(planned.spec, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def head_chunk(planned: programs.Plan) -> int:
    """Tokens whose logits the update makes at once."""
    return programs.settings(planned).head_chunk


def _passes(planned: programs.Plan, mesh: jax.sharding.AbstractMesh, tokens: float) -> dict:
    return {"parameters": numbers(planned), "tokens": tokens, "d_model": planned.spec.d_model,
            "layers": planned.spec.layers, "mesh": dict(mesh.shape),
            "size": jnp.dtype(planned.spec.compute_dtype).itemsize}


def _counted(planned: programs.Plan, program: programs.Program) -> work.Work:
    """Its work. cuDNN, whose bounds on what is seen are numbers, computes all scores; the kernel
    that is traced in its place half."""
    return work.counted(program, layers=planned.spec.layers,
                        causal=planned.spec.attention != "cudnn")


def of_update(
    planned: programs.Plan, update: learner.Programs, mesh: jax.sharding.AbstractMesh
) -> Estimate:
    """The gradient of a microbatch."""
    accumulate = programs.only(update.accumulate)
    part, total = memory.split(accumulate), _counted(planned, accumulate)
    saved = memory.saved_of_token(total.saved, planned.spec, part)
    temporary = memory.accumulate_temporary(planned.spec, part, head_chunk=head_chunk(planned),
                                            saved=saved)
    return Estimate(sum(temporary.values()), total.flops / mesh.size, total.bytes / mesh.size,
                    collectives.of_update(table=planned.spec.vocab * planned.spec.d_model,
                                          **_passes(planned, mesh, part.tokens)), saved=saved)


def _score(planned: programs.Plan, scorers: Mapping, mesh: jax.sharding.AbstractMesh) -> Estimate:
    """Log-probs of a microbatch."""
    scorer = programs.only(scorers)
    part, total = memory.split(scorer), _counted(planned, scorer)
    return Estimate(
        memory.score_temporary(planned.spec, part, head_chunk=head_chunk(planned)),
        total.flops / mesh.size, total.bytes / mesh.size,
        collectives.of_forward(**_passes(planned, mesh, part.tokens)))


def _apply(update: learner.Programs) -> Estimate:
    """An optimizer step: everything is read, all but the gradients written, in place."""
    state, sums = programs.given(update.apply)[:2]
    return Estimate(0.0, 0.0, 2 * memory.on_device(state) + memory.on_device(sums))


def _weights(
    planned: programs.Plan, rollout: sampler.Programs, mesh: jax.sharding.AbstractMesh
) -> Estimate:
    """The sampler's copy of the parameters, whole over fsdp if they are gathered. All are gathered
    before they are laid out as results (TPU: so it was compiled), which takes as much again."""
    made = memory.on_device(programs.only(rollout.decode).arguments[0])
    gathers = planned.cfg.rollout.gather and mesh.shape["fsdp"] > 1
    sent = (collectives.Collective("all-gather", ("fsdp",), planned.spec.layers, made),)
    return Estimate(made, 0.0, memory.on_device(programs.given(rollout.weights)) + made,
                    sent if gathers else ())


def _prefill(
    planned: programs.Plan, rollout: sampler.Programs, mesh: jax.sharding.AbstractMesh
) -> Estimate:
    """Running as many prompts as one admission takes; its result is with its temporary bytes."""
    total = _counted(planned, programs.only(rollout.prefill))
    part = _admitted(planned, rollout, mesh)
    return Estimate(memory.prefill_temporary(planned.spec, part) + _handed_on(rollout),
                    total.flops / mesh.size, total.bytes / mesh.size,
                    collectives.of_forward(**_passes(planned, mesh, part.tokens)))


def _admitted(
    planned: programs.Plan, rollout: sampler.Programs, mesh: jax.sharding.AbstractMesh
) -> memory.Split:
    shape = dict(mesh.shape)
    parts = shape["data"] * shape["fsdp"]
    return memory.Split(rollout.admitted // parts, planned.cfg.prompts.buckets[-1], 0, 0,
                        shape["tensor"], parts, 1 / (shape["fsdp"] * shape["tensor"]))


def _handed_on(rollout: sampler.Programs) -> float:
    """Bytes that a prefill hands to `admit`."""
    _, _, *ran = programs.only(rollout.admit).arguments
    return memory.on_device(ran)


def _admit(rollout: sampler.Programs) -> Estimate:
    """Prompts put into their slots, in place."""
    moved = _handed_on(rollout)
    return Estimate(moved, 0.0, 2 * moved)


def _decode(
    planned: programs.Plan, rollout: sampler.Programs, mesh: jax.sharding.AbstractMesh
) -> Estimate:
    """Drawing one token of each row; all of the caches is read, as the program does."""
    flops = [work.counted(programs.only(programs.of_rollout(
        planned, mesh, layers=layers).decode)).flops for layers in FEW]
    weights, state, *_ = programs.only(rollout.decode).arguments
    spec, shape = planned.spec, dict(mesh.shape)
    rows = state.live.size / (shape["data"] * shape["fsdp"])
    keys = planned.cfg.prompts.buckets[-1] + planned.cfg.rollout.max_new_tokens
    read = sum(map(memory.on_device, (weights, state.cache, state.own)))
    sent = collectives.of_token(gather=planned.cfg.rollout.gather,
                                **_passes(planned, mesh, rows))
    return Estimate(memory.decode_temporary(spec, rows=rows, tensor=shape["tensor"], keys=keys),
                    line(FEW, flops, spec.layers) / mesh.size, read, sent)


def _resize(planned: programs.Plan, mesh: jax.sharding.AbstractMesh) -> Estimate:
    """Between the two largest numbers of slots; the smaller state is there beside the larger."""
    state, _ = resize_of(programs.of_rollout(planned, mesh, beside=True)).arguments
    smaller = memory.on_device(state)
    return Estimate(smaller, 0.0, 2 * smaller)


def resize_of(rollout: sampler.Programs) -> programs.Program:
    """From the smaller number of slots to the larger."""
    return programs.only({0: rollout.resize[min(rollout.resize)]})


def line(ends: tuple[int, int], values: list[float], at: float) -> float:
    """The straight line through two points."""
    return values[0] + (values[1] - values[0]) / (ends[1] - ends[0]) * (at - ends[0])


def largest(fits_at: Callable[[int], bool], *, least: int, most: int) -> int:
    """The largest number from `least` to `most` of which `fits_at(number)` is true; 0 if of none.
    It is asked at most 2 log2(most) times, and fits less the larger."""
    low, high = 0, least
    while high <= most and fits_at(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= most and fits_at(middle) else (low, middle)
    return low
