"""Contexts of samples that wait for a reply: out of slots and back, as many as a program takes.

What is kept where the lobby decides; here the device is told. A context that neither device nor
host had room for is made again when its sample goes on, as one long reply to nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax import types
from dapo_jax.rollout import engine as engines
from dapo_jax.rollout import lobby as lobbies
from dapo_jax.runtime import mesh as mesh_lib


def park(
    engine: engines.Engine, slots: types.Slots, lobby: lobbies.Lobby, pool: types.Parked, *,
    size: int, leaving: Sequence[lobbies.Leaving], use: engines.Use,
) -> tuple[types.Parked, engines.Use]:
    """Keep the contexts of samples that leave their slots, of `size`; where, the lobby is told."""
    wide = size // engine.parts
    for batch in _batches(leaving, lambda one: one.slot // wide, engine=engine):
        places, group = [place for place, _ in batch], [one for _, one in batch]
        columns = ([one.slot % wide for one in group], [one.column for one in group],
                   [one.count for one in group])
        contexts = engines.parking(engine).lines[size](
            slots, *_put(engine, tuple(_column(engine, places, one) for one in columns)))
        kept = [lobbies.keep(lobby, one, part=one.slot // wide) for one in group]
        pool = _stored(engine, pool, contexts, places, [one.entry for one in kept])
        use = _held(engine, lobby, contexts, batch, use)
    return pool, use


def _batches(
    items: Sequence[Any], part_of: Callable[[Any], int], *, engine: engines.Engine
) -> Iterator[list[tuple[int, Any]]]:
    """(place in the batch, item) for batches that hold items at the places of their part."""
    parts, each = engine.parts, engine.programs.admitted // engine.parts
    queues = [[item for item in items if part_of(item) == part] for part in range(parts)]
    for start in range(0, max(map(len, queues)), each):
        yield [(part * each + at, item) for part, queue in enumerate(queues)
               for at, item in enumerate(queue[start:start + each])]


def _column(
    engine: engines.Engine, places: Sequence[int], values: Sequence[int] | np.ndarray, *,
    idle: int = 0,
) -> np.ndarray:
    """i32[A] with values at their places in the batch."""
    column = np.full(engine.programs.admitted, idle, np.int32)
    column[places] = values
    return column


def _put(engine: engines.Engine, columns: types.Tree) -> types.Tree:
    return mesh_lib.put(columns, engine.programs.split)


def _passage(engine: engines.Engine, place: int) -> int:
    """The entry, after those that are kept, through which a context comes back that is not on the
    device: one for each place of a batch."""
    each = engine.programs.admitted // engine.parts
    return engines.parking(engine).room.device // engine.parts + place % each


def _entries(engine: engines.Engine) -> int:
    """All entries of a part of the pool; a number beyond them is nowhere."""
    return (engines.parking(engine).room.device + engine.programs.admitted) // engine.parts


def _stored(
    engine: engines.Engine, pool: types.Parked, contexts: types.Parked, places: Sequence[int],
    entries: Sequence[int],
) -> types.Parked:
    nowhere = _entries(engine)
    where = [nowhere if entry == lobbies.NOWHERE else entry for entry in entries]
    if all(entry == nowhere for entry in where):
        return pool
    return engines.parking(engine).store(
        pool, _put(engine, _column(engine, places, where, idle=nowhere)), contexts)


def _held(
    engine: engines.Engine, lobby: lobbies.Lobby, contexts: types.Parked,
    batch: Sequence[tuple[int, lobbies.Leaving]], use: engines.Use,
) -> engines.Use:
    """Let the host hold what the device has no entry for, as far as it may."""
    left = [one for one in batch if lobby.contexts[one[1].row].entry == lobbies.NOWHERE]
    held = left[:max(0, lobby.host - lobbies.holds(lobby))]
    if held:
        arrays = mesh_lib.fetch(contexts)
        for place, one in held:
            # Copies, or one of them would hold the whole batch.
            lobbies.hold(lobby, one, types.Parked(arrays.keys[:, place].copy(),
                                                  arrays.values[:, place].copy()))
    return dataclasses.replace(
        use, parked=use.parked + len(batch) - len(left), parked_host=use.parked_host + len(held),
        unkept=use.unkept + len(left) - len(held))


def resume(
    engine: engines.Engine, params: types.Tree, slots: types.Slots, pool: types.Parked, *,
    size: int, chosen: Sequence[lobbies.Going], use: engines.Use,
) -> tuple[types.Slots, types.Parked, engines.Use]:
    """Seat samples that go on in their slots, of `size`, with the tokens that they were told
    appended to their contexts."""
    wide = size // engine.parts
    chosen = sorted(chosen, key=lambda one: -one.missing)  # alike together: few long programs
    for batch in _batches(chosen, lambda one: one.slot // wide, engine=engine):
        places, group = [place for place, _ in batch], [one for _, one in batch]
        entries = [_passage(engine, place) if one.context.entry == lobbies.NOWHERE
                   else one.context.entry for place, one in batch]
        pool = _loaded(engine, pool, batch, entries)
        entry = _put(engine, _column(engine, places, entries, idle=_entries(engine)))
        pool = _extended(engine, params, pool, entry, batch)
        slots = engines.parking(engine).seat[size](
            slots, pool, _put(engine, _resumed(engine, batch, entries, wide=wide)))
        rerun = sum(one.missing for one in group if not one.context.keys)
        use = dataclasses.replace(
            use, rerun_tokens=use.rerun_tokens + rerun,
            reply_tokens=use.reply_tokens + sum(one.missing for one in group) - rerun)
    return slots, pool, use


def _loaded(
    engine: engines.Engine, pool: types.Parked, batch: Sequence[tuple[int, lobbies.Going]],
    entries: Sequence[int],
) -> types.Parked:
    """The pool with what the host held."""
    held = [(place, one.context.held, entry) for (place, one), entry
            in zip(batch, entries, strict=True) if one.context.held is not None]
    if not held:
        return pool
    arrays = jax.tree.map(lambda x: np.zeros((len(x), engine.programs.admitted, *x.shape[1:]),
                                             x.dtype), held[0][1])
    for place, context, _ in held:
        arrays.keys[:, place], arrays.values[:, place] = context.keys, context.values
    contexts = mesh_lib.put(arrays, engines.parking(engine).place)
    return _stored(engine, pool, contexts, [place for place, *_ in held],
                   [entry for *_, entry in held])


def _extended(
    engine: engines.Engine, params: types.Tree, pool: types.Parked, entry: jax.Array,
    batch: Sequence[tuple[int, lobbies.Going]],
) -> types.Parked:
    """The pool with all keys but those of last tokens, a piece of the ladder at a time."""
    ladder = engines.parking(engine).extend
    done = {place: one.context.keys for place, one in batch}
    while (longest := max(len(one.tokens) - 1 - done[place] for place, one in batch)) > 0:
        width = next((size for size in ladder if size >= longest), max(ladder))
        tokens = np.zeros((engine.programs.admitted, width), np.int32)
        start, count = _column(engine, [], []), _column(engine, [], [])
        for place, one in batch:
            piece = one.tokens[done[place]:-1][:width]
            tokens[place, :len(piece)] = piece
            start[place], count[place] = done[place], len(piece)
            done[place] += len(piece)
        pool = ladder[width](params, pool, entry, *_put(engine, (tokens, start, count)))
    return pool


def _resumed(
    engine: engines.Engine, batch: Sequence[tuple[int, lobbies.Going]], entries: Sequence[int], *,
    wide: int,
) -> types.Resumed:
    places, group = [place for place, _ in batch], [one for _, one in batch]
    columns: dict[str, Sequence[int]] = {
        "entry": entries, "length": [one.prompt_length for one in group],
        "position": [len(one.tokens) - one.prompt_length for one in group],
        "token": [one.tokens[-1] for one in group],
        **{name: [one.labels[name] for one in group] for name in group[0].labels}}
    return types.Resumed(
        slot=_column(engine, places, [one.slot % wide for one in group], idle=wide),
        **{name: _column(engine, places, values) for name, values in columns.items()})
