"""What is held while a step's programs run, and the largest microbatch and the most slots that fit,
of those that a step can use: guessed from shapes, then searched by compiling, a bounded number of
times."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.planning import compiler, estimate, memory, programs, sources, spending
from dapo_jax.planning.memory import Held, Split

Programs = Mapping[str, estimate.Estimate]
Compile = Callable[[str, int], estimate.Estimate]  # of a program at so many slots


@dataclasses.dataclass(frozen=True)
class Room:
    """What there is, and what is in it already."""

    memory: float  # bytes of a device that may be used
    held: Held
    part: Split  # of the update
    parts: int  # that the sampler's slots are split over
    plan: programs.Plan
    contexts: int = 0  # bytes of the entries of a pool through which others come back


def in_update(held: memory.Held, work: Programs) -> dict[str, float]:
    """Bytes of a device while each program of the update runs; before the first microbatch there
    are no gradients."""
    return {name: work[name].temporary + (
        held.in_update if name in ("update", "apply") else held.always)
        for name in sources.UPDATE if name in work}


def in_rollout(held: memory.Held, work: Programs) -> dict[str, float]:
    """Bytes of a device while each program of the rollout runs. Weights are merged, moved and made
    for the sampler one after another, before there are caches."""
    before = {"merge": held.always + held.merged}
    before["move"] = before["merge"] + held.moved
    before["weights"] = before["move"] + held.weights
    return {name: before.get(name, held.in_rollout) + work[name].temporary
            for name in sources.ROLLOUT if name in work}


def microbatch(room: Room, work: Programs, *, compiles: int, asked: Compile | None
               ) -> dict[str, Any]:
    """Bytes of the configured update, and the most slots of its shape on a device."""
    figures, part, held = work["update"], room.part, room.held
    chunk = estimate.head_chunk(room.plan)

    def counted(slots: int) -> float:
        return sum(memory.accumulate_temporary(
            room.plan.spec, dataclasses.replace(part, slots=slots), head_chunk=chunk,
            saved=figures.saved).values())
    # The compiler takes more than is counted, and more of it the more there is.
    ratio = figures.temporary / counted(part.slots)
    most, left = _useful(room), room.memory - held.in_update
    guess = estimate.largest(lambda slots: counted(slots) * ratio <= left, least=1, most=most)

    def compile_at(slots: int) -> float:
        assert asked is not None
        return asked("update", slots * part.parts).temporary
    largest, how = searched(guess, compile_at if asked else None,
                            _known(work, part.slots, figures.temporary, ("update",)), room=left,
                            compiles=compiles, most=most)
    tokens = part.prompt + part.rows * part.width
    return {"temporary": figures.temporary, "peak": max(in_update(held, work).values()),
            "slots": part.slots, "rows": part.rows, "tokens of a slot": tokens,
            "largest slots": largest, "largest tokens": largest * tokens, "usable slots": most,
            "by shapes": guess, "found by": how}


def _known(work: Programs, slots: int, size: float, names: Sequence[str]) -> dict[int, float]:
    """What the compiler said already: nothing if it was not asked for one of these."""
    by_compiler = all(estimate.COUNTED not in work[name].source for name in names)
    return {slots: size} if by_compiler else {}


def slots(room: Room, work: Programs, *, compiles: int, asked: Compile | None) -> dict[str, Any]:
    """Bytes of the configured rollout, and the most slots on a device: caches and the prompts that
    are run for an eighth of them grow with the slots; making the sampler's weights does not."""
    plan, held, parts = room.plan, room.held, room.parts
    now, rows = plan.cfg.rollout.slots[-1] // parts, programs.rows(plan)
    caches, peaks = held.prompt_cache + held.sample_cache + room.contexts, in_rollout(held, work)
    made, fixed = max(peaks[name] for name in MADE if name in work), held.in_rollout - caches
    others = max(work[name].temporary for name in GROWING if name in work)
    growing = caches + max(work["decode"].temporary, others)
    left = room.memory - fixed if made <= room.memory else 0.0
    most = max(now, -(-2 * plan.phase.prompts_per_step * _pieces(plan) // parts))
    guess = min(most, int(max(0.0, left) * now / growing))

    def compile_at(count: int) -> float:
        assert asked is not None
        return caches * count / now + max(asked("decode", count * parts).temporary,
                                          others * count / now)
    largest, how = searched(guess, compile_at if asked else None,
                            _known(work, now, growing, ("decode",)), room=left,
                            compiles=compiles if left else 0, most=most)
    running = max(work[name].temporary for name in ("prefill", "admit", "decode"))
    least = max(made, fixed + (held.prompt_cache + held.sample_cache / rows + room.contexts
                               + running) / now)
    return {"temporary": max(peaks.values()) - held.in_rollout, "peak": max(peaks.values()),
            "slots": now, "rows": rows, "largest slots": largest, "usable slots": most,
            "by shapes": guess, "found by": how, "peak of one row": least,
            "one row fits": least <= room.memory}


MADE = ("merge", "move", "weights")  # once a call of the sampler
# They run an eighth of the slots at once, or hold two numbers of slots.
GROWING = ("prefill", "admit", "resize", "lines", "store", "extend", "seat")


def _pieces(plan: programs.Plan) -> int:
    """Slots that a group can use: samples of several turns take one each."""
    return plan.phase.samples_per_prompt if plan.cfg.environment.name else 1


def _useful(room: Room) -> int:
    """Slots of a device that hold all of an update's samples, or those that are configured."""
    phase, part = room.plan.phase, room.part
    rows = phase.prompts_per_step // phase.updates_per_step * phase.samples_per_prompt
    return max(part.slots, -(-rows // (part.rows * part.parts)))


def searched(guess: int, compile_at: Callable[[int], float] | None, known: Mapping[int, float], *,
             room: float, compiles: int, most: int) -> tuple[int, str]:
    """The largest number up to `most` whose bytes by the compiler, `compile_at(number)`, are at
    most `room`, and how it was found: from `guess` on, at most `compiles` further ones than those
    that are `known` are compiled, and none that there is no time for. Without a compiler, or if
    nothing was compiled, the guess is all there is."""
    if compile_at is None:
        return guess, estimate.COUNTED
    known, why = dict(known), f"--compiles={compiles}"
    for _ in range(compiles):
        if guess in known:
            guess = _next(known, room, most)
        if guess in known or not 1 <= guess <= most:
            break
        try:
            known[guess] = compile_at(guess)
        except compiler.TooLarge:
            known[guess] = float("inf")
        except spending.OutOfTime:
            why = "time"
            break
    if not known:
        return guess, f"{estimate.COUNTED}; none compiled: {why}"
    fits, above = _bounds(known, room, most)
    tried = f"compiled for {', '.join(map(str, sorted(known)))}"
    if above - fits == 1:
        return fits, tried
    return fits, f"{tried}; {fits + 1} to {above - 1} not tried: {why}"


def _bounds(known: Mapping[int, float], room: float, most: int) -> tuple[int, int]:
    """The largest number that is known to fit, and the smallest above it that does not."""
    fits = max((number for number, size in known.items() if size <= room), default=0)
    return fits, min((number for number, size in known.items() if size > room), default=most + 1)


def _next(known: Mapping[int, float], room: float, most: int) -> int:
    """What to try next: where the line through the largest numbers known meets the room."""
    fits, above = _bounds(known, room, most)
    sizes = sorted((number, size) for number, size in known.items() if size < float("inf"))
    if above - fits == 1 or not sizes:
        return fits if sizes else above // 2
    number, size = sizes[-1]
    before = sizes[-2] if len(sizes) > 1 else (0, 0.0)
    slope = max(1.0, (size - before[1]) / (number - before[0]))
    return min(max(number + int((room - size) // slope), fits + 1), above - 1)
