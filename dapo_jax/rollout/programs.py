"""The sampler's compiled programs, one of each kind for each shape of the ladders."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax import types
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import decode, draw, parked, seating
from dapo_jax.runtime import mesh as mesh_lib

SPLIT = PartitionSpec(("data", "fsdp"))


@dataclasses.dataclass(frozen=True)
class Room:
    """How many contexts of samples that wait for a reply are kept, and how replies are run."""

    device: int  # contexts kept there
    host: int  # beside those
    replies: tuple[int, ...] = (16, 256)  # the ladder of C, tokens that are appended at once


@dataclasses.dataclass(frozen=True)
class Parking:
    """Programs for contexts, A at once; see parked.py. Pools and slots are changed in place."""

    empty: Callable  # () -> pool
    lines: Mapping[int, Callable]  # by S; (slots, slot, column, count) -> contexts
    store: Callable  # (pool, entry, contexts) -> pool
    extend: Mapping[int, Callable]  # by C; (parameters, pool, entry, tokens, start, count) -> pool
    seat: Mapping[int, Callable]  # by S; (slots, pool, resumed) -> slots
    room: Room  # with `device` a multiple of the parts
    ring: int  # columns of a slot's own keys
    place: NamedSharding  # of contexts


@dataclasses.dataclass(frozen=True)
class Programs:
    """What runs on the device. Slots that `admit` and `decode` get are changed in place."""

    weights: Callable  # parameters -> weights of decode, once a call of serve
    empty: Mapping[int, Callable]  # by S; () -> slots
    prefill: Mapping[int, Callable]  # by P; (parameters, tokens, length) -> hidden, cache
    admit: Mapping[tuple[int, int], Callable]  # by (S, P); (slots, prompts, *prefill's) -> slots
    decode: Mapping[int, Callable]  # by S; (weights, slots, root, enough) -> slots, chunk
    resize: Mapping[tuple[int, int], Callable]  # by (S, S beside it); (slots, source) -> slots
    admitted: int  # A, prompts of one admission
    split: NamedSharding  # of prompts and sources
    whole: NamedSharding  # of single numbers
    parking: Parking | None = None  # None: samples are of one turn


def compile_programs(
    spec: ModelSpec, sampling: draw.Sampling, mesh: mesh_lib.AnyMesh, *, rows: int,
    slots: Sequence[int], buckets: Sequence[int], chunk: int, gather: bool,
    room: Room | None = None, build: mesh_lib.Build = mesh_lib.compiled,
) -> Programs:
    """Compile every shape that a run can ask for; see engine.compile_engine. `build` makes a
    program of a jitted function, the mesh and shapes of the arguments."""
    parts, admitted = mesh_lib.batch_parts(mesh), refill(slots[-1], mesh_lib.batch_parts(mesh))
    split, whole = NamedSharding(mesh, SPLIT), mesh_lib.replicated(mesh)
    params = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    params = mesh_lib.structs(params, mesh_lib.param_shardings(mesh, spec))
    shape: dict[str, Any] = {"rows": rows, "width": buckets[-1], "new": sampling.max_new_tokens}
    if room is not None:
        shape |= {"new": sampling.max_new_tokens + chunk, "turns": True}
    state = {count: _state(spec, mesh, slots=count, **shape) for count in slots}
    unstack = functools.partial(transformer.unstack, spec)
    prefill = functools.partial(transformer.prefill, spec)
    weights, made = weight_places(spec, mesh, gather=gather), functools.partial(_made, mesh, build)
    ran = {width: _prefilled(spec, mesh, admitted, width) for width in buckets}
    asked = {width: _prompts(admitted, width, split) for width in buckets}
    return Programs(
        weights=made(unstack, params, out=weights),
        empty={count: made(functools.partial(decode.empty, spec, slots=count, **shape),
                          out=_places(state[count])) for count in slots},
        prefill={width: made(prefill, params, asked[width].tokens, asked[width].length,
                       out=_places(ran[width])) for width in buckets},
        admit={(count, width): made(
            functools.partial(decode.admit, parts), state[count], asked[width], *ran[width],
            out=_places(state[count]), donate=0) for count in slots for width in buckets},
        decode=_decodes(functools.partial(decode.decode, spec, sampling, chunk), mesh, made,
                        _placed(jax.eval_shape(unstack, params), weights), state),
        resize=_resizes(mesh, made, state),
        admitted=admitted, split=split, whole=whole,
        parking=None if room is None else _parking(
            spec, mesh, made, params, state, admitted=admitted, room=room,
            length=buckets[-1] + sampling.max_new_tokens, ring=shape["new"]))


def _decodes(
    draws: Callable, mesh: mesh_lib.AnyMesh, made: Callable, weights: types.Tree,
    state: Mapping[int, types.Slots],
) -> dict[int, Callable]:
    """The programs that draw a chunk of tokens, by S."""
    whole = mesh_lib.replicated(mesh)
    root = mesh_lib.structs(jax.eval_shape(lambda: jax.random.key(0)), whole)
    enough = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    # Every process writes down what all of them drew.
    log = whole if jax.process_count() > 1 else NamedSharding(mesh, PartitionSpec(None, *SPLIT))
    chunk = types.Chunk(*(log,) * 4, steps=whole, free=whole)
    return {count: made(draws, weights, slots, root, enough, donate=1,
                        out=(_places(slots), chunk)) for count, slots in state.items()}


def _resizes(
    mesh: mesh_lib.AnyMesh, made: Callable, state: Mapping[int, types.Slots]
) -> dict[tuple[int, int], Callable]:
    """The programs that move slots to the size beside theirs on the ladder, up and down."""
    resize = functools.partial(decode.resize, mesh_lib.batch_parts(mesh))
    source = {count: jax.ShapeDtypeStruct((count,), jnp.int32, sharding=NamedSharding(mesh, SPLIT))
              for count in state}
    return {(size, beside): made(resize, state[size], source[beside], out=_places(state[beside]))
            for small, large in itertools.pairwise(state)
            for size, beside in ((small, large), (large, small))}


def _parking(
    spec: ModelSpec, mesh: mesh_lib.AnyMesh, made: Callable, params: types.Tree,
    state: Mapping[int, types.Slots], *, admitted: int, room: Room, length: int,
    ring: int,
) -> Parking:
    """The programs for contexts of up to `length` tokens. Beside those that are kept the pool has A
    entries, through which all others come back."""
    parts, place = mesh_lib.batch_parts(mesh), NamedSharding(
        mesh, PartitionSpec(None, *SPLIT, _heads(spec, mesh)))
    room = dataclasses.replace(room, device=-(-room.device // parts) * parts)
    entries, make = room.device + admitted, functools.partial(parked.empty, spec, length=length)
    pool, contexts = (mesh_lib.structs(jax.eval_shape(functools.partial(make, entries=count)),
                                       place) for count in (entries, admitted))
    split, bind = NamedSharding(mesh, SPLIT), functools.partial
    some = jax.ShapeDtypeStruct((admitted,), jnp.int32, sharding=split)
    return Parking(
        empty=made(bind(make, entries=entries), out=_places(pool)),
        lines={count: made(bind(parked.lines, parts, length), slots, some, some, some,
                           out=_places(contexts)) for count, slots in state.items()},
        store=made(bind(parked.store, parts), pool, some, contexts, out=_places(pool), donate=0),
        extend={width: made(
            bind(parked.extend, spec, parts), params, pool, some,
            jax.ShapeDtypeStruct((admitted, width), jnp.int32, sharding=split), some, some,
            out=_places(pool), donate=1) for width in sorted({min(w, length)
                                                              for w in room.replies})},
        seat={count: made(bind(parked.seat, parts), slots, pool, types.Resumed(*(some,) * 10),
                          out=_places(slots), donate=0) for count, slots in state.items()},
        room=room, ring=ring, place=place)


def weight_places(spec: ModelSpec, mesh: mesh_lib.AnyMesh, *, gather: bool) -> types.Tree:
    """Where the weights of decode lie: as the parameters, or whole over fsdp, so that no token
    waits for them."""
    def place(sharding: NamedSharding, skip: int = 0) -> NamedSharding:
        axes = (None if gather and axis == "fsdp" else axis for axis in sharding.spec[skip:])
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = mesh_lib.param_shardings(mesh, spec)
    block = jax.tree.map(functools.partial(place, skip=1), shardings["blocks"])
    rest = {name: place(leaf) for name, leaf in shardings.items() if name != "blocks"}
    return rest | {"blocks": [block] * spec.layers}


def refill(slots: int, parts: int) -> int:
    """Free slots that are worth a refill: an eighth, and as many in each part."""
    return parts * max(1, slots // parts // 8)


def _made(
    mesh: mesh_lib.AnyMesh, build: mesh_lib.Build, function: Callable, *arguments: types.Tree,
    out: types.Tree, donate: int | None = None,
) -> Callable:
    return build(jax.jit(function, donate_argnums=() if donate is None else donate,
                         out_shardings=out), mesh, *arguments)


def _placed(tree: types.Tree, shardings: types.Tree) -> types.Tree:
    return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype,
                                                                 sharding=where), tree, shardings)


def _places(tree: types.Tree) -> types.Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _prompts(count: int, width: int, split: NamedSharding) -> types.Prompts:
    def make(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
    return types.Prompts(make((count, width)), *(make((count,)) for _ in range(7)))


def _prefilled(
    spec: ModelSpec, mesh: mesh_lib.AnyMesh, count: int, width: int
) -> tuple[jax.ShapeDtypeStruct, types.PromptCache]:
    """What a prefill hands on: hidden states and a cache, split as the slots are."""
    params = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    number = jax.ShapeDtypeStruct((count,), jnp.int32)
    hidden, cache = jax.eval_shape(functools.partial(transformer.prefill, spec), params,
                                   jax.ShapeDtypeStruct((count, width), jnp.int32), number)
    split = NamedSharding(mesh, SPLIT)
    layered = NamedSharding(mesh, PartitionSpec(None, *SPLIT, _heads(spec, mesh)))
    return mesh_lib.structs(hidden, split), types.PromptCache(
        mesh_lib.structs(cache.keys, layered), mesh_lib.structs(cache.values, layered),
        mesh_lib.structs(cache.length, split))


def _heads(spec: ModelSpec, mesh: mesh_lib.AnyMesh) -> str | None:
    """The mesh axis that splits kv heads, where it can."""
    return "tensor" if spec.kv_heads % mesh.shape["tensor"] == 0 else None


def _state(spec: ModelSpec, mesh: mesh_lib.AnyMesh, **shape: Any) -> types.Slots:
    """Shapes of the state and where it lies: slots are split, and kv heads."""
    shapes = jax.eval_shape(functools.partial(decode.empty, spec, **shape))

    def place(tree: types.Tree, *axes: str | None) -> types.Tree:
        return mesh_lib.structs(tree, NamedSharding(mesh, PartitionSpec(*axes)))

    split = {name: place(value, *SPLIT) for name, value in vars(shapes).items()
             if name not in ("cache", "own", "clock")}
    heads, cache = _heads(spec, mesh), shapes.cache
    keys, values = (place(tree, *SPLIT, heads) for tree in (cache.keys, cache.values))
    return types.Slots(
        cache=types.PromptCache(keys, values, place(cache.length, *SPLIT)),
        own=place(shapes.own, *SPLIT, None, heads), clock=place(shapes.clock), **split)


def batches(
    compiled: Programs, chosen: Sequence[tuple[int, seating.Piece]], plan: types.Plan,
    table: types.PromptTable, *, size: int, parts: int, buckets: Sequence[int],
) -> Iterator[tuple[int, types.Prompts]]:
    """(P, prompts) of the admissions that seat the chosen pieces in `size` slots, long prompts
    first, so that few admissions need a large bucket."""
    def length(place: tuple[int, seating.Piece]) -> int:
        return len(table.tokens[plan.prompt[place[1].group]])

    each, wide = compiled.admitted // parts, size // parts
    queues = [sorted((place for place in chosen if place[0] // wide == part), key=length,
                     reverse=True) for part in range(parts)]
    for start in range(0, max(map(len, queues)), each):
        batch = [queue[start:start + each] for queue in queues]
        longest = max(length(place) for queue in batch for place in queue)
        width = next(bucket for bucket in buckets if bucket >= longest)
        prompts = types.Prompts(np.zeros((each * parts, width), np.int32), *(
            np.full(each * parts, number, np.int32) for number in (0, wide, 0, 0, 0, 0, 0)))
        for part, queue in enumerate(batch):
            for row, (slot, piece) in enumerate(queue, start=part * each):
                _write(prompts, row, slot % wide, piece, plan, table)
        yield width, prompts


def _write(
    prompts: types.Prompts, row: int, slot: int, piece: seating.Piece, plan: types.Plan,
    table: types.PromptTable,
) -> None:
    prompt, group, budget = plan.prompt[piece.group], piece.group, plan.budget
    assert budget is not None, "the ledger gives every group a budget"
    tokens = table.tokens[prompt]
    prompts.tokens[row, :len(tokens)] = tokens
    for name, value in {"length": len(tokens), "slot": slot, "prompt": prompt,
                        "visit": plan.visit[group], "sample": piece.first, "count": piece.count,
                        "budget": budget[group]}.items():
        getattr(prompts, name)[row] = value
