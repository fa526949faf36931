"""From groups that are asked for to samples: the host loop around the device's slots.

The device draws tokens in chunks. While it does, the host writes down what the chunk before drew
and asks for further groups; of a chunk that runs it waits for one thing, which slots it left free,
to seat waiting groups in them and start the next.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax import types
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import draw, programs, resharding, seating
from dapo_jax.rollout import ledger as ledgers
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Engine:
    """Compiled programs and what they were compiled for."""

    sampling: draw.Sampling
    rows: int  # R
    share: int  # samples of a group that stream through one slot, at most
    slots: tuple[int, ...]  # the ladder of S
    buckets: tuple[int, ...]  # the ladder of P
    max_context: int  # tokens of prompt and completion; 0: no limit
    parts: int  # pieces that slots are split into over devices
    programs: programs.Programs
    move: Callable | None = None  # trained parameters -> those on the sampler's mesh; None: same
    weights_bytes: int = 0  # that devices receive before a call of serve draws


@dataclasses.dataclass(frozen=True)
class Use:
    """What a call of `serve` took."""

    live: int = 0  # rows that drew a token, summed over steps: the tokens drawn
    computed: int = 0  # rows that were computed, S * R summed over steps
    steps: int = 0  # passes of the model that draw
    chunks: int = 0
    prompt_tokens: int = 0  # run by prefills, without padding
    sizes: tuple[int, ...] = ()  # S of each chunk
    parked: int = 0  # contexts of samples that waited for a reply, kept on the device
    parked_host: int = 0
    unkept: int = 0  # contexts that neither had room for
    reply_tokens: int = 0  # run to append replies, each turn's last token included
    rerun_tokens: int = 0  # run again, of contexts that were not kept
    idle: float = 0.0  # seconds spent on replies with nothing on the device
    weights_bytes: int = 0  # that devices received to draw

    @property
    def row_use(self) -> float:
        """Live rows / rows computed; 1 where nothing was."""
        return self.live / self.computed if self.computed else 1.0


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What a feed is told between two chunks."""

    number: int  # chunks whose tokens have been looked at
    finished: types.Samples  # groups that became complete since the last boundary
    in_flight: np.ndarray  # i32[*] groups handed out that are not complete, in admission order
    waiting: int  # slots that they still wait for
    free: int  # slots of the largest size that nobody sits in or waits for


@dataclasses.dataclass(frozen=True)
class Served:
    """What `serve` hands back."""

    samples: types.Samples  # of complete groups, in admission order
    partial: types.Samples  # rows of groups that were dropped, as far as they got
    use: Use


Feed = Callable[[Boundary], types.Plan | None]


@dataclasses.dataclass(frozen=True)
class Hall:
    """The slots on the device, and on the host who sits in them and who waits."""

    slots: types.Slots | None
    seats: np.ndarray  # i32[S] place in the ledger, or NOBODY
    waiting: collections.deque[seating.Piece]

    @property
    def occupied(self) -> bool:
        """Whether anybody sits in a slot."""
        return bool((self.seats != seating.NOBODY).any())


def parking(engine: Engine) -> programs.Parking:
    """The programs for contexts that wait; ValueError: compiled for samples of one turn."""
    if engine.programs.parking is None:
        raise ValueError("compile the engine with `room` for samples of several turns")
    return engine.programs.parking


def compile_engine(
    spec: ModelSpec, sampling: draw.Sampling, mesh: Mesh, *, rows: int, slots: Sequence[int],
    buckets: Sequence[int], max_context: int = 0, share: int = 0, chunk: int = 32,
    gather: bool = True, room: programs.Room | None = None, split: Sequence[int] = (),
) -> Engine:
    """Compile every shape that a run can ask for.

    `share` is how many samples of a group stream through one slot (0: rows), `chunk` how many
    tokens a row draws before the host looks. `gather`: weights are whole on each device of fsdp
    while samples are drawn, or gathered for every token. `room`: for samples of several turns.
    `mesh` is that of the parameters; `split` (data, fsdp, tensor), if given, the sampler's over its
    devices.
    """
    if room is not None and rows != 1:
        raise ValueError(f"rows = {rows}: a sample of several turns needs a slot of its own")
    trained, mesh = mesh, mesh_lib.resplit(mesh, split)
    compiled = programs.compile_programs(
        spec, sampling, mesh, rows=rows, slots=slots, buckets=buckets,
        chunk=min(chunk, sampling.max_new_tokens), gather=gather, room=room)
    return Engine(sampling, rows, share or rows, tuple(slots), tuple(buckets), max_context,
                  mesh_lib.batch_parts(mesh), compiled,
                  resharding.compile_move(spec, trained, mesh), resharding.moved_bytes(
                      spec, trained, mesh, programs.weight_places(spec, mesh, gather=gather)))


def run(
    engine: Engine, params: types.Tree, plan: types.Plan, *, table: types.PromptTable,
    root: jax.Array, step: int,
) -> types.Samples:
    """Sample every group of the plan; rows come back in plan order, not yet scored.

    A group larger than the engine's share takes several slots. `root` lies on the device.
    """
    return sample(engine, params, plan, table=table, root=root, step=step).samples


def sample(
    engine: Engine, params: types.Tree, plan: types.Plan, *, table: types.PromptTable,
    root: jax.Array, step: int,
) -> Served:
    """`run`, and what it took."""
    nothing = jax.tree.map(lambda column: column[:0], plan)
    plans = itertools.chain([plan], itertools.repeat(nothing))
    return serve(engine, params, table=table, root=root, step=step, feed=lambda _: next(plans))


def serve(
    engine: Engine, params: types.Tree, *, table: types.PromptTable, root: jax.Array, step: int,
    feed: Feed,
) -> Served:
    """Sample the groups that `feed` hands out, until it has no more.

    `feed(boundary)` is called once before the first chunk, and then after each chunk whose tokens
    have been written down: a chunk behind the device, which meanwhile runs the next. It returns
    groups to admit after those before; they get slots in that order, as slots come free. A plan of
    no groups admits none now, and ends the call if no group is in flight: the last boundary before
    that has `in_flight` empty, and a feed that waits for something (a score) waits there. None ends
    the call at once: groups in flight are dropped, and come back as `partial`.

    What a feed is told depends on tokens alone, never on time. A sample depends on neither: see
    draw.py. `root` lies on the device; ValueError names a group that cannot be sampled.
    """
    params = engine.move(params) if engine.move else params
    weights = engine.programs.weights(params)
    ledger, hall = ledgers.new(engine.sampling.max_new_tokens), empty_hall()
    use = Use(weights_bytes=engine.weights_bytes)
    flying, finished = None, np.zeros(0, np.int32)
    for number in itertools.count():
        plan = feed(boundary(engine, ledger, hall, number=number, finished=finished))
        if plan is None:
            break
        ledger, hall = admitted(engine, ledger, hall, plan, table, step, share=engine.share)
        if flying is not None:
            free = mesh_lib.fetch(flying[0].free)
            hall = dataclasses.replace(hall, seats=np.where(free, seating.NOBODY, hall.seats))
        landed, flying = flying, None
        hall = sized(engine, hall, len(hall.waiting))
        hall, tokens = fill(engine, params, ledger.plan, hall, table)
        if hall.occupied:
            hall, flying = launch(engine, weights, hall, root, waiting=bool(hall.waiting))
        if landed is None and flying is None:
            break
        finished, use = _land(engine, ledger, landed, use)
        use = dataclasses.replace(use, prompt_tokens=use.prompt_tokens + tokens)
    whole = ledger.missing == 0
    return Served(ledgers.rows(ledger, np.flatnonzero(whole)),
                  ledgers.rows(ledger, np.flatnonzero(~whole)), use)


def empty_hall() -> Hall:
    """No slots, and nobody who waits."""
    return Hall(None, np.zeros(0, np.int32), collections.deque())


def boundary(
    engine: Engine, ledger: ledgers.Ledger, hall: Hall, *, number: int, finished: np.ndarray
) -> Boundary:
    """What a feed is told; `finished` are places of groups in the ledger."""
    seated = int((hall.seats != seating.NOBODY).sum())
    return Boundary(number, ledgers.rows(ledger, finished), ledger.plan.group[ledger.missing > 0],
                    len(hall.waiting), max(0, engine.slots[-1] - seated - len(hall.waiting)))


def admitted(
    engine: Engine, ledger: ledgers.Ledger, hall: Hall, plan: types.Plan,
    table: types.PromptTable, step: int, *, share: int,
) -> tuple[ledgers.Ledger, Hall]:
    """The plan's groups in the ledger, and their pieces of up to `share` samples at the end of
    those that wait."""
    count, begun = len(plan.size), len(ledger)
    first = np.zeros(count, np.int32) if plan.first is None else plan.first
    plan = dataclasses.replace(plan, first=first, budget=ledgers.budgets(
        plan, table, limit=engine.sampling.max_new_tokens, longest=engine.buckets[-1],
        max_context=engine.max_context))
    waiting = hall.waiting + collections.deque(itertools.chain.from_iterable(
        seating.pieces(begun + place, first=int(first[place]), size=int(plan.size[place]),
                       share=share) for place in range(count)))
    return ledgers.add(ledger, plan, step=step), dataclasses.replace(hall, waiting=waiting)


def sized(engine: Engine, hall: Hall, waiting: int) -> Hall:
    """As many slots as those who sit and so many who wait need."""
    size = seating.size_for(hall.seats, waiting, ladder=engine.slots, parts=engine.parts)
    change = size != len(hall.seats) and (waiting or hall.occupied)
    return _resized(engine, hall, size) if change else hall


def fill(
    engine: Engine, params: types.Tree, plan: types.Plan, hall: Hall, table: types.PromptTable
) -> tuple[Hall, int]:
    """Waiting pieces in the free slots, and the prompt tokens run; `plan` is the ledger's."""
    chosen = seating.seat(hall.seats, hall.waiting, parts=engine.parts)
    waiting = collections.deque(itertools.islice(hall.waiting, len(chosen), None))
    seats, slots, tokens = hall.seats.copy(), hall.slots, 0
    for slot, piece in chosen:
        seats[slot] = piece.group
    for width, batch in programs.batches(engine.programs, chosen, plan, table, size=len(seats),
                                         parts=engine.parts, buckets=engine.buckets):
        tokens += int(batch.length.sum())
        batch = mesh_lib.put(batch, engine.programs.split)
        ran = engine.programs.prefill[width](params, batch.tokens, batch.length)
        slots = engine.programs.admit[len(seats), width](slots, batch, *ran)
    return Hall(slots, seats, waiting), tokens


def _resized(engine: Engine, hall: Hall, size: int) -> Hall:
    if hall.slots is None:
        return dataclasses.replace(hall, slots=engine.programs.empty[size](),
                                   seats=np.full(size, seating.NOBODY, np.int32))
    at, to = engine.slots.index(len(hall.seats)), engine.slots.index(size)
    slots, seats = hall.slots, hall.seats
    for rung in range(at, to, 1 if to > at else -1):
        beside = engine.slots[rung + (1 if to > at else -1)]
        source = seating.moves(seats, beside, parts=engine.parts)
        slots = engine.programs.resize[len(seats), beside](
            slots, mesh_lib.put(source, engine.programs.split))
        seats = seating.moved(seats, source, parts=engine.parts)
    return dataclasses.replace(hall, slots=slots, seats=seats)


def launch(
    engine: Engine, weights: types.Tree, hall: Hall, root: jax.Array, *, waiting: bool
) -> tuple[Hall, tuple[types.Chunk, np.ndarray]]:
    """Start a chunk; it ends early once a refill, or a move to fewer slots, is worth it."""
    size, free = len(hall.seats), int((hall.seats == seating.NOBODY).sum())
    smaller = max((s for s in engine.slots if s < size), default=0)
    worth = size - smaller
    if waiting:
        worth = free + programs.refill(size, engine.parts)
    enough = mesh_lib.put(np.int32(max(worth, free + 1)), engine.programs.whole)
    slots, chunk = engine.programs.decode[size](weights, hall.slots, root, enough)
    return dataclasses.replace(hall, slots=slots), (chunk, hall.seats)


def _land(
    engine: Engine, ledger: ledgers.Ledger, landed: tuple[types.Chunk, np.ndarray] | None, use: Use
) -> tuple[np.ndarray, Use]:
    """Write down a finished chunk; the groups that it completed."""
    if landed is None:
        return np.zeros(0, np.int32), use
    chunk, seats = mesh_lib.fetch(landed[0]), landed[1]
    finished = ledgers.write(ledger, chunk, seats, stop_ids=engine.sampling.stop_ids)
    return finished, counted(engine, use, chunk, len(seats))


def counted(engine: Engine, use: Use, chunk: types.Chunk, size: int) -> Use:
    """The use with a chunk of `size` slots."""
    steps = int(chunk.steps)
    return dataclasses.replace(
        use, live=use.live + int((chunk.sample[:steps] >= 0).sum()),
        computed=use.computed + steps * size * engine.rows, steps=use.steps + steps,
        chunks=use.chunks + 1, sizes=(*use.sizes, size))
