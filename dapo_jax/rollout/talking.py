"""Samples of several turns: the host loop around the device's slots, with environments beside it.

A turn ends in a slot as a sample does in engine.py, and the slot takes up other work. After each
chunk the contexts of turns that ended are parked; samples whose reply has come go on in free slots,
before any that have not begun. The turns are handed over while the device draws the next chunk. So
the device waits for an environment only when all samples do.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax import types
from dapo_jax.rollout import engine as engines
from dapo_jax.rollout import ledger as ledgers
from dapo_jax.rollout import lobby as lobbies
from dapo_jax.rollout import parking, seating, turns
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a call of `serve` works with, and never changes."""

    engine: engines.Engine
    params: types.Tree
    weights: types.Tree
    table: types.PromptTable
    root: jax.Array
    step: int
    talk: turns.Talk


@dataclasses.dataclass(frozen=True)
class State:
    """Where it stands."""

    ledger: ledgers.Ledger
    hall: engines.Hall
    lobby: lobbies.Lobby
    pool: types.Parked
    clock: int = 0  # the ring's next column
    ended: tuple[turns.Ended, ...] = ()  # that are not handed over yet
    use: engines.Use = engines.Use()


def sample(
    engine: engines.Engine, params: types.Tree, plan: types.Plan, *, table: types.PromptTable,
    root: jax.Array, step: int, talk: turns.Talk,
) -> engines.Served:
    """`serve` with one plan."""
    nothing = jax.tree.map(lambda column: column[:0], plan)
    plans = itertools.chain([plan], itertools.repeat(nothing))
    return serve(engine, params, table=table, root=root, step=step, feed=lambda _: next(plans),
                 talk=talk)


def serve(
    engine: engines.Engine, params: types.Tree, *, table: types.PromptTable, root: jax.Array,
    step: int, feed: engines.Feed, talk: turns.Talk,
) -> engines.Served:
    """engine.serve for samples of several turns; the engine was compiled with `room`.

    In the samples, `loss_mask` is False and `logprobs` 0 at replies, `length` counts all tokens,
    `valid` is False where the episode failed, and `stopped` is that of the last turn. A sample's
    tokens depend on what it is told alone; the order in which groups are finished, and so what a
    feed is told, also on how fast replies come. ValueError for a reply that cannot be, RuntimeError
    if none comes within `talk.patience` while there is nothing else to do.
    """
    room = engines.parking(engine).room
    params = engine.move(params) if engine.move else params
    setting = Setting(engine, params, engine.programs.weights(params), table, root, step, talk)
    state = State(ledgers.new(engine.sampling.max_new_tokens), engines.empty_hall(),
                  lobbies.new(room.device, room.host, parts=engine.parts),
                  engines.parking(engine).empty(),
                  use=engines.Use(weights_bytes=engine.weights_bytes))
    finished = np.zeros(0, np.int32)
    for number in itertools.count():
        plan = feed(engines.boundary(engine, state.ledger, state.hall, number=number,
                                     finished=finished))
        if plan is None:
            break
        state = _admitted(setting, state, plan)
        state, replies = _looked(talk, state)
        finished = _answered(state, replies)
        state = _filled(setting, state)
        if state.hall.occupied:
            state = _parked(setting, *_drawn(setting, state))
        elif state.lobby.contexts:
            state, replies = _awaited(talk, _handed_over(talk, state))
            finished = np.concatenate([finished, _answered(state, replies)])
        elif not len(finished):
            break
    whole = state.ledger.missing == 0
    return engines.Served(ledgers.rows(state.ledger, np.flatnonzero(whole)),
                          ledgers.rows(state.ledger, np.flatnonzero(~whole)), state.use)


def _admitted(setting: Setting, state: State, plan: types.Plan) -> State:
    """Groups in pieces that are as long as they may be without leaving slots idle."""
    engine = setting.engine
    share = min(engine.share, max(1, -(-int(plan.size.sum()) // engine.slots[-1])))
    ledger, hall = engines.admitted(engine, state.ledger, state.hall, plan, setting.table,
                                    setting.step, share=share)
    lobby = lobbies.add(state.lobby, ledger, first_budget=setting.talk.first_budget)
    return dataclasses.replace(state, ledger=ledger, hall=hall, lobby=lobby)


def _answered(state: State, replies: Sequence[turns.Reply]) -> np.ndarray:
    """Write replies down; the groups that are complete with them."""
    over = [lobbies.answer(state.ledger, state.lobby, reply) for reply in replies]
    return ledgers.complete(state.ledger, np.array([one for one in over if one is not None],
                                                   np.int32))


def _filled(setting: Setting, state: State) -> State:
    """Free slots taken: by samples that go on, then by first turns."""
    engine, lobby = setting.engine, state.lobby
    hall = engines.sized(engine, state.hall, len(state.hall.waiting) + len(lobby.ready))
    if hall.slots is None or not len(hall.seats):
        return dataclasses.replace(state, hall=hall)
    chosen = lobbies.going(state.ledger, lobby, hall.seats, setting.table)
    slots, pool, use = parking.resume(engine, setting.params, hall.slots, state.pool,
                                      size=len(hall.seats), chosen=chosen, use=state.use)
    seats = hall.seats.copy()
    for one in chosen:
        seats[one.slot] = lobby.places[int(state.ledger.samples.group[one.row])]
        lobbies.leave(lobby, one.row)
    plan = dataclasses.replace(state.ledger.plan,
                               budget=lobbies.budgets(state.ledger, setting.talk.first_budget))
    hall, tokens = engines.fill(engine, setting.params, plan,
                                dataclasses.replace(hall, slots=slots, seats=seats), setting.table)
    return dataclasses.replace(
        state, hall=hall, pool=pool,
        use=dataclasses.replace(use, prompt_tokens=use.prompt_tokens + tokens))


def _drawn(setting: Setting, state: State) -> tuple[State, types.Chunk]:
    """A chunk, which the host waits for: turns that end in it are parked before the next."""
    hall, (chunk, _) = engines.launch(setting.engine, setting.weights, state.hall, setting.root,
                                      waiting=bool(state.hall.waiting or state.lobby.ready))
    state = _handed_over(setting.talk, dataclasses.replace(state, hall=hall))
    while not mesh_lib.ready(chunk):  # bounded by the chunk's steps
        setting.talk.attend(turns.BEAT)
    chunk = mesh_lib.fetch(chunk)
    use = engines.counted(setting.engine, state.use, chunk, len(hall.seats))
    return dataclasses.replace(state, use=use), chunk


def _handed_over(talk: turns.Talk, state: State) -> State:
    if state.ended:
        talk.ended(state.ended)
    return dataclasses.replace(state, ended=())


def _parked(setting: Setting, state: State, chunk: types.Chunk) -> State:
    """What the chunk drew, in the ledger; and the turns that ended, parked."""
    engine, hall, ledger = setting.engine, state.hall, state.ledger
    assert hall.slots is not None, "a chunk was drawn in slots"
    drawn = ledgers.fill(ledger, chunk, hall.seats, stop_ids=engine.sampling.stop_ids)
    ring = engines.parking(engine).ring
    leaving, ended = lobbies.ended(ledger, state.lobby, drawn, clock=state.clock, ring=ring,
                                   table=setting.table)
    pool, use = parking.park(engine, hall.slots, state.lobby, state.pool, size=len(hall.seats),
                             leaving=leaving, use=state.use)
    seats = np.where(chunk.free, seating.NOBODY, hall.seats)
    clock = (state.clock + int(chunk.steps)) % ring
    return dataclasses.replace(state, hall=dataclasses.replace(hall, seats=seats), pool=pool,
                               use=use, clock=clock, ended=tuple(ended))


def _looked(talk: turns.Talk, state: State) -> tuple[State, list[turns.Reply]]:
    """Replies that are there; the device stands still meanwhile."""
    begun = time.monotonic()
    replies = talk.replies(0.0)
    idle = state.use.idle + time.monotonic() - begun
    return dataclasses.replace(state, use=dataclasses.replace(state.use, idle=idle)), replies


def _awaited(talk: turns.Talk, state: State) -> tuple[State, list[turns.Reply]]:
    """Replies, waited for since nothing else is to be done."""
    begun = time.monotonic()
    while time.monotonic() - begun < talk.patience:
        replies = talk.replies(min(turns.LOOK, talk.patience))
        if replies:
            use = dataclasses.replace(state.use, idle=state.use.idle + time.monotonic() - begun)
            return dataclasses.replace(state, use=use), replies
        if not talk.waiting():
            break
    raise RuntimeError(
        f"{len(state.lobby.contexts)} samples wait for replies to their turns, and none has come "
        f"in {time.monotonic() - begun:.0f} s; the environments still have {talk.waiting()} turns")
