"""On the host: samples of several turns that are under way, and where their contexts are kept.

A sample is in a slot, or it waits for a reply, or it has one and waits for a slot. Its row of the
ledger is what it is known by here. All of it is plain numbers.
"""

import dataclasses

import numpy as np

from dapo_jax import types
from dapo_jax.rollout import ledger as ledgers
from dapo_jax.rollout import seating, turns

NOWHERE = -1


@dataclasses.dataclass(frozen=True)
class Context:
    """What is kept of a sample that is out of its slot."""

    keys: int = 0  # tokens of prompt and sample, from the first, whose keys are kept
    part: int = NOWHERE  # of its entry on the device
    entry: int = NOWHERE  # within the part
    held: types.Parked | None = None  # on the host: [N, K, E, L], [N, K, L, E]


@dataclasses.dataclass(frozen=True)
class Lobby:
    """Its containers and arrays are its own, and change."""

    free: tuple[list[int], ...]  # entries on the device without a context, by part
    host: int  # contexts that the host holds at most
    contexts: dict[int, Context]  # of samples out of their slots, by row
    ready: dict[int, None]  # rows whose reply has come, in that order
    places: dict[int, int]  # place in the ledger of each group
    turn: np.ndarray  # i32[n] the turn of each row that is under way, or comes
    begun: np.ndarray  # i32[n] tokens of the sample before it
    limit: np.ndarray  # i32[n] tokens of the sample at which it ends


@dataclasses.dataclass(frozen=True)
class Leaving:
    """A sample whose turn ended in a slot. Its last token has no key yet."""

    row: int
    slot: int
    column: int  # of the ring, in which its newest key stands
    count: int  # keys of its own
    keys: int  # those and the prompt's


@dataclasses.dataclass(frozen=True)
class Going:
    """A sample that goes on in a slot."""

    row: int
    slot: int
    context: Context
    tokens: np.ndarray  # i32[*] of prompt and sample
    prompt_length: int
    labels: dict[str, int]  # the fields of types.Resumed that only name it

    @property
    def missing(self) -> int:
        """Tokens whose keys have to be made; the last one's are made as it is drawn after."""
        return len(self.tokens) - 1 - self.context.keys


def new(entries: int, host: int, *, parts: int) -> Lobby:
    """Nobody; so many entries on the device."""
    none, each = np.zeros(0, np.int32), entries // parts
    return Lobby(tuple(list(range(each))[::-1] for _ in range(parts)), host, {}, {}, {}, none, none,
                 none)


def add(lobby: Lobby, ledger: ledgers.Ledger, *, first_budget: int) -> Lobby:
    """The lobby with rows for the groups that the ledger has more."""
    known, rows = len(lobby.places), len(lobby.turn)
    for place in range(known, len(ledger)):
        lobby.places[int(ledger.plan.group[place])] = place
    zeros = np.zeros(len(ledger.samples) - rows, np.int32)
    first = np.repeat(budgets(ledger, first_budget)[known:], ledger.plan.size[known:])
    join = lambda old, more: np.concatenate([old, more.astype(np.int32)])  # noqa: E731
    return dataclasses.replace(lobby, turn=join(lobby.turn, zeros), begun=join(lobby.begun, zeros),
                               limit=join(lobby.limit, first))


def budgets(ledger: ledgers.Ledger, first_budget: int) -> np.ndarray:
    """i32[groups]: tokens of the first turn of each group's samples."""
    return np.minimum(ledger.budget, first_budget).astype(np.int32)


def ended(
    ledger: ledgers.Ledger, lobby: Lobby, drawn: ledgers.Drawn, *, clock: int, ring: int,
    table: types.PromptTable,
) -> tuple[list[Leaving], list[turns.Ended]]:
    """Turns that ended in a chunk, and their samples as they leave their slots; the chunk began at
    column `clock` of the ring."""
    over = np.flatnonzero(drawn.stopped | (drawn.position + 1 >= lobby.limit[drawn.row])).tolist()
    leaving = []
    for at in over:
        row, count = int(drawn.row[at]), int(drawn.position[at])
        prompt = len(table.tokens[ledger.samples.prompt[row]])
        leaving.append(Leaving(row, int(drawn.slot[at]), (clock + int(drawn.column[at])) % ring,
                               count, prompt + count))
    return leaving, [_ended(ledger, lobby, one.row) for one in leaving]


def _ended(ledger: ledgers.Ledger, lobby: Lobby, row: int) -> turns.Ended:
    samples, length = ledger.samples, int(ledger.samples.length[row])
    of_turn = slice(int(lobby.begun[row]), length)
    return turns.Ended(
        int(samples.group[row]), int(samples.sample[row]), int(samples.prompt[row]),
        int(samples.visit[row]), turn=int(lobby.turn[row]),
        tokens=samples.tokens[row, of_turn].copy(), logprobs=samples.logprobs[row, of_turn].copy(),
        length=length, stopped=bool(samples.stopped[row]))


def keep(lobby: Lobby, one: Leaving, *, part: int) -> Context:
    """Give the context of a sample that leaves a slot of `part` an entry there, if one is free;
    else nothing is kept of it until the host may hold it."""
    free = lobby.free[part]
    lobby.contexts[one.row] = Context(one.keys, part, free.pop()) if free else Context()
    return lobby.contexts[one.row]


def hold(lobby: Lobby, one: Leaving, context: types.Parked) -> None:
    """The host holds a context."""
    lobby.contexts[one.row] = Context(one.keys, held=context)


def holds(lobby: Lobby) -> int:
    """Contexts that the host holds."""
    return sum(one.held is not None for one in lobby.contexts.values())


def answer(ledger: ledgers.Ledger, lobby: Lobby, reply: turns.Reply) -> int | None:
    """Write a reply down; the group's place in the ledger if the sample is over with it.

    ValueError for a reply to nothing, or one after which the model could not go on.
    """
    row = _row(ledger, lobby, reply)
    samples, place = ledger.samples, lobby.places[reply.group]
    if reply.over:
        samples.valid[row] = reply.valid
        leave(lobby, row)
        return place
    begun, end = int(samples.length[row]), int(samples.length[row]) + len(reply.tokens)
    limit = min(reply.budget, int(ledger.budget[place]))
    if not len(reply.tokens) or end >= limit:
        raise ValueError(
            f"group {reply.group}, sample {reply.sample}: a reply of {len(reply.tokens)} tokens "
            f"after {begun}, and {limit} allowed; one after which the model goes on has at least "
            "one token and leaves room for one more, else it must be over")
    samples.tokens[row, begun:end] = reply.tokens
    samples.length[row], samples.stopped[row] = end, False
    lobby.turn[row] += 1
    lobby.begun[row], lobby.limit[row] = end, limit
    lobby.ready[row] = None
    return None


def _row(ledger: ledgers.Ledger, lobby: Lobby, reply: turns.Reply) -> int:
    place = lobby.places.get(reply.group)
    row = None if place is None else int(
        ledger.start[place] + reply.sample - ledger.first[place])
    if row not in lobby.contexts or row in lobby.ready:
        raise ValueError(f"group {reply.group}, sample {reply.sample}: a reply, but no turn of it "
                         "waits for one")
    return row


def leave(lobby: Lobby, row: int) -> None:
    """A sample is over, or in a slot again: its entry is free."""
    context = lobby.contexts.pop(row)
    lobby.ready.pop(row, None)
    if context.entry != NOWHERE:
        lobby.free[context.part].append(context.entry)


def going(
    ledger: ledgers.Ledger, lobby: Lobby, seats: np.ndarray, table: types.PromptTable
) -> list[Going]:
    """Samples with a reply, the longest there first, and free slots for them, as far as there are.

    A context on the device goes on in its part of the slots, any other in the part with the most
    free ones; `seats` as in seating.seat.
    """
    parts = len(lobby.free)
    free = seating.free(seats, parts=parts)
    chosen = []
    for row in lobby.ready:
        if not any(free):
            break
        part = lobby.contexts[row].part
        if part == NOWHERE:
            part = max(range(parts), key=lambda number: len(free[number]))
        if free[part]:
            chosen.append(_going(ledger, lobby, row, free[part].pop(0), table))
    return chosen


def _going(
    ledger: ledgers.Ledger, lobby: Lobby, row: int, slot: int, table: types.PromptTable
) -> Going:
    samples = ledger.samples
    prompt, length = table.tokens[samples.prompt[row]], int(samples.length[row])
    labels = {name: int(getattr(samples, name)[row]) for name in ("prompt", "visit", "sample")}
    return Going(
        row, slot, lobby.contexts[row], np.concatenate([prompt, samples.tokens[row, :length]]),
        len(prompt), labels | {"turn": int(lobby.turn[row]), "budget": int(lobby.limit[row])})
