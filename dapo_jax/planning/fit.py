"""What is held while a step's programs run, and the largest microbatch and the most slots that fit,
of those that a step can use: guessed from shapes, then searched by compiling, a bounded number of
times."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.planning import compiler, estimate, memory, programs
from dapo_jax.planning.memory import Held, Split

Programs = Mapping[str, estimate.Estimate]
Compile = Callable[[str, int], estimate.Estimate]  # of a program at so many slots


@dataclasses.dataclass(frozen=True)
class Room:
    """What there is, and what is in it already."""

    memory: float  # bytes of a device that may be used
    held: Held
    part: Split
    plan: programs.Plan


def in_update(held: memory.Held, work: Programs) -> dict[str, float]:
    """Bytes of a device while each program of the update runs."""
    return {name: held.in_update - (held.gradients if name.startswith("log-probs") else 0)
            + one.temporary for name, one in work.items()
            if name in ("update", "apply") or name.startswith("log-probs")}


def in_rollout(held: memory.Held, work: Programs) -> dict[str, float]:
    """Bytes of a device while each program of the rollout runs; the sampler's weights are made
    before there are caches."""
    caches = held.prompt_cache + held.sample_cache
    return {name: held.in_rollout + work[name].temporary - (caches if name == "weights" else 0)
            for name in ("weights", "prefill", "admit", "decode", "resize") if name in work}


def microbatch(room: Room, work: Programs, *, compiles: int, asked: Compile | None
               ) -> dict[str, Any]:
    """Bytes of the configured update, and the most slots of its shape on a device."""
    figures, part, held = work["update"], room.part, room.held
    chunk = estimate.head_chunk(room.plan)

    def temporary(slots: int) -> float:
        return sum(memory.accumulate_temporary(
            room.plan.spec, dataclasses.replace(part, slots=slots), head_chunk=chunk,
            saved=figures.saved).values())
    more = figures.temporary - temporary(part.slots)  # than was counted
    most, left = _useful(room), room.memory - held.in_update
    guess = estimate.largest(lambda slots: temporary(slots) + more <= left, least=1, most=most)

    def compile_at(slots: int) -> float:
        assert asked is not None
        return asked("update", slots * part.parts).temporary
    largest, how = searched(guess, compile_at if asked else None,
                            {part.slots: figures.temporary} if asked else {}, room=left,
                            compiles=compiles, most=most)
    tokens = part.prompt + part.rows * part.width
    return {"temporary": figures.temporary, "peak": max(in_update(held, work).values()),
            "slots": part.slots, "rows": part.rows, "tokens of a slot": tokens,
            "largest slots": largest, "largest tokens": largest * tokens, "usable slots": most,
            "found by": how}


def slots(room: Room, work: Programs, *, compiles: int, asked: Compile | None) -> dict[str, Any]:
    """Bytes of the configured rollout, and the most slots on a device: caches and the prompts that
    are run for an eighth of them grow with the slots; making the sampler's weights does not."""
    plan, held, parts = room.plan, room.held, room.part.parts
    now = plan.cfg.rollout.slots[-1] // parts
    caches, peaks = held.prompt_cache + held.sample_cache, in_rollout(held, work)
    made, fixed = peaks["weights"], held.in_rollout - caches
    others = max(work[name].temporary for name in ("prefill", "admit", "resize") if name in work)
    growing = caches + max(work["decode"].temporary, others)
    left = room.memory - fixed if made <= room.memory else 0.0
    most = max(now, -(-2 * plan.phase.prompts_per_step // parts))

    def compile_at(count: int) -> float:
        assert asked is not None
        return caches * count / now + max(asked("decode", count * parts).temporary,
                                          others * count / now)
    largest, how = searched(
        min(most, int(max(0.0, left) * now / growing)), compile_at if asked else None,
        {now: growing} if asked else {}, room=left, compiles=compiles if left else 0, most=most)
    rows = programs.rows(plan)
    running = max(work[name].temporary for name in ("prefill", "admit", "decode"))
    least = max(made, fixed + (held.prompt_cache + held.sample_cache / rows + running) / now)
    return {"temporary": max(peaks.values()) - held.in_rollout, "peak": max(peaks.values()),
            "slots": now, "rows": rows, "largest slots": largest, "usable slots": most,
            "found by": how, "peak of one row": least, "one row fits": least <= room.memory}


def _useful(room: Room) -> int:
    """Slots of a device that hold all of an update's samples, or those that are configured."""
    phase, part = room.plan.phase, room.part
    rows = phase.prompts_per_step // phase.updates_per_step * phase.samples_per_prompt
    return max(part.slots, -(-rows // (part.rows * part.parts)))


def searched(guess: int, compile_at: Callable[[int], float] | None, known: Mapping[int, float], *,
             room: float, compiles: int, most: int) -> tuple[int, str]:
    """The largest number up to `most` whose bytes by the compiler, `compile_at(number)`, are at
    most `room`, and how it was found: from `guess` on, at most `compiles` further ones than those
    that are `known` are compiled. Without a compiler the guess is all there is."""
    if compile_at is None:
        return guess, estimate.COUNTED
    known = dict(known)
    for _ in range(compiles):
        if not 1 <= guess <= most or guess in known:
            break
        try:
            known[guess] = compile_at(guess)
        except compiler.TooLarge:
            known[guess] = float("inf")
        guess = _next(known, room, most)
    fits, above = _bounds(known, room, most)
    tried = f"compiled for {', '.join(map(str, sorted(known)))}"
    return fits, tried if above - fits == 1 else f"{tried}; {fits + 1} to {above - 1} not tried"


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
