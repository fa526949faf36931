"""Figures of the programs that a step runs, on each device, counted from shapes: the model's and
what its programs are given. This works for every chip; compiled.py asks a compiler."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dapo_jax.models import transformer
from dapo_jax.planning import collectives, memory, moves, programs, sources, work
from dapo_jax.runtime import mesh as mesh_lib

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
    beside: float = 0.0  # of `temporary`, results of other programs that it is given
    saved: float = 0.0  # of the update: bytes that a token leaves for the backward pass


def counted(planned: programs.Plan, made: sources.Sources) -> dict[str, Estimate]:
    """Estimates of all programs by name."""
    return {name: _OF.get(name, _score)(planned, made, name) for name in sources.names(made)}


def numbers(planned: programs.Plan) -> int:
    """Parameters of the model."""
    shapes = jax.eval_shape(lambda: transformer.init(planned.spec, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def head_chunk(planned: programs.Plan) -> int:
    """Tokens whose logits the update makes at once."""
    return programs.settings(planned).head_chunk


def _passes(planned: programs.Plan, mesh: mesh_lib.AnyMesh, tokens: float) -> dict:
    return {"parameters": numbers(planned), "tokens": tokens, "d_model": planned.spec.d_model,
            "layers": planned.spec.layers, "mesh": dict(mesh.shape),
            "size": jnp.dtype(planned.spec.compute_dtype).itemsize}


def _counted(planned: programs.Plan, program: programs.Program) -> work.Work:
    """Its work. cuDNN, whose bounds on what is seen are numbers, computes all scores; the kernel
    that is traced in its place half."""
    return work.counted(program, layers=planned.spec.layers,
                        causal=planned.spec.attention != "cudnn")


def of_update(planned: programs.Plan, made: sources.Sources, name: str = "update") -> Estimate:
    """The gradient of a microbatch."""
    accumulate, mesh = sources.one(made, name), made.trained
    part, total = memory.split(accumulate), _counted(planned, accumulate)
    saved = memory.saved_of_token(total.saved, planned.spec, part)
    temporary = memory.accumulate_temporary(planned.spec, part, head_chunk=head_chunk(planned),
                                            saved=saved)
    return Estimate(sum(temporary.values()), total.flops / mesh.size, total.bytes / mesh.size,
                    collectives.of_update(table=planned.spec.vocab * planned.spec.d_model,
                                          **_passes(planned, mesh, part.tokens)), saved=saved)


def _score(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Log-probs of a microbatch."""
    scorer = sources.one(made, name)
    part = memory.split(scorer)
    return _forward(planned, scorer, part, memory.score_temporary(
        planned.spec, part, head_chunk=head_chunk(planned)))


def _forward(planned: programs.Plan, program: programs.Program, part: memory.Split,
             temporary: float) -> Estimate:
    """A pass without a gradient."""
    total, mesh = _counted(planned, program), program.mesh
    return Estimate(temporary, total.flops / mesh.size, total.bytes / mesh.size,
                    collectives.of_forward(**_passes(planned, mesh, part.tokens)))


def _states(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Mean hidden states of a microbatch's completions."""
    program = sources.one(made, name)
    _, prompts, _, tokens, *_ = program.arguments
    part = memory.of_rows(program.mesh, prompts.shape[-1], tokens.shape)
    return _forward(planned, program, part, memory.states_temporary(planned.spec, part))


def _apply(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """An optimizer step: everything is read, all but the gradients written, in place."""
    state, sums = sources.one(made, name).arguments[:2]
    return Estimate(0.0, 0.0, 2 * memory.on_device(state) + memory.on_device(sums))


def _merge(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """The adapter's products added to the blocks, a layer at a time; its result is held."""
    base, adapter = sources.one(made, name).arguments
    blocks = memory.on_device(base["blocks"])
    return Estimate(blocks / planned.spec.layers, 0.0, 2 * blocks + memory.on_device(adapter))


def _move(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Parameters brought to the sampler's mesh: at most what a device gets that it did not hold."""
    here, there = (sum(map(memory.on_device, trees)) for trees in (
        sources.one(made, name).arguments, sources.one(made, "prefill").arguments[:1]))
    got = max(moves.received(*(sources.one(made, one).arguments[0] for one in (name, "prefill"))))
    sent = (collectives.Collective("all-to-all", mesh_lib.AXES, 1, got),)
    return Estimate(0.0, 0.0, here + there, sent if got else ())


def _weights(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """The sampler's copy of the parameters, whole over fsdp if they are gathered. All are gathered
    before they are laid out as results (TPU: so it was compiled), which takes as much again."""
    laid = memory.on_device(sources.one(made, "decode").arguments[0])
    gathers = planned.cfg.rollout.gather and made.sampling.shape["fsdp"] > 1
    sent = (collectives.Collective("all-gather", ("fsdp",), planned.spec.layers, laid),)
    return Estimate(laid, 0.0, memory.on_device(sources.one(made, name).arguments) + laid,
                    sent if gathers else ())


def _prefill(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Running as many prompts as one admission takes; its result is with its temporary bytes."""
    program = sources.one(made, name)
    part = memory.of_rows(program.mesh, 0, (*program.arguments[1].shape[:1], 1,
                                            program.arguments[1].shape[1]))
    part = dataclasses.replace(part, prompt=part.width, rows=0, width=0)
    return _forward(planned, program, part,
                    memory.prefill_temporary(planned.spec, part) + _handed_on(made))


def _handed_on(made: sources.Sources) -> float:
    """Bytes that a prefill hands to `admit`."""
    _, _, *ran = sources.one(made, "admit").arguments
    return memory.on_device(ran)


def _admit(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Prompts put into their slots, in place."""
    moved = _handed_on(made)
    return Estimate(moved, 0.0, 2 * moved, beside=moved)


def _decode(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Drawing one token of each row; all of the caches is read, as the program does."""
    flops = [work.counted(sources.one(made, name, layers=layers)).flops for layers in FEW]
    weights, state, *_ = sources.one(made, name).arguments
    spec, mesh = planned.spec, made.sampling
    rows = state.live.size / mesh_lib.batch_parts(mesh)
    keys = planned.cfg.prompts.buckets[-1] + planned.cfg.rollout.max_new_tokens
    read = sum(map(memory.on_device, (weights, state.cache, state.own)))
    sent = collectives.of_token(gather=planned.cfg.rollout.gather,
                                **_passes(planned, mesh, rows))
    return Estimate(memory.decode_temporary(spec, rows=rows, tensor=mesh.shape["tensor"],
                                            keys=keys),
                    line(FEW, flops, spec.layers) / mesh.size, read, sent)


def _resize(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Between the two largest numbers of slots; the smaller state is there beside the larger."""
    smaller = memory.on_device(sources.one(made, name).arguments[0])
    return Estimate(smaller, 0.0, 2 * smaller, beside=smaller)


def contexts(made: sources.Sources) -> int:
    """Bytes on a device of the contexts of samples that go in or out of slots at once."""
    return memory.on_device(sources.one(made, "store").arguments[2])


def _parked(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Contexts of an admission's size copied: out of their slots, which makes as many of them, from
    there into the pool, or from the pool into slots, for which they are taken out first."""
    moved = float(contexts(made))
    return Estimate(2 * moved if name == "lines" else moved, 0.0, 2 * moved,
                    beside=moved if name == "store" else 0.0)


def _extend(planned: programs.Plan, made: sources.Sources, name: str) -> Estimate:
    """Replies of the longest size appended to contexts."""
    program = sources.one(made, name)
    count, width = program.arguments[3].shape
    part = memory.of_rows(program.mesh, 0, (count, 1, width))
    one = _forward(planned, program, part, memory.extend_temporary(
        planned.spec, part, contexts=contexts(made)))
    return dataclasses.replace(one, bytes=one.bytes + 4 * contexts(made))


_OF: Mapping[str, Callable[[programs.Plan, sources.Sources, str], Estimate]] = {
    "update": of_update, "apply": _apply, "states": _states, "merge": _merge, "move": _move,
    "weights": _weights, "prefill": _prefill, "admit": _admit, "decode": _decode,
    "resize": _resize, "lines": _parked, "store": _parked, "seat": _parked, "extend": _extend}


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
