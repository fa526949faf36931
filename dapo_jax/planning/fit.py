"""The largest microbatch and the most slots that fit, of those that a step can use: continued from
the figures of the configured ones, then confirmed by compiling, a bounded number of times."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dapo_jax.planning import compiler, estimate, memory, programs


@dataclasses.dataclass(frozen=True)
class Room:
    """What there is, and what is in it already."""

    memory: float  # bytes of a device that may be used
    held: memory.Held
    part: memory.Split
    plan: programs.Plan
    parts: int  # devices that slots are split over


@dataclasses.dataclass(frozen=True)
class Asked:
    """The compiler: estimates of an update's microbatch, of drawing a token, for so many slots."""

    update: Callable[[int], estimate.Estimate]
    decode: Callable[[int], estimate.Estimate]


def microbatch(room: Room, figures: estimate.Estimate, *, compiles: int, asked: Asked | None
               ) -> dict[str, Any]:
    """Bytes of the configured update, and the most slots of its shape on a device."""
    def temporary(slots: int) -> float:
        part = dataclasses.replace(room.part, slots=slots)
        return sum(memory.accumulate_temporary(
            room.plan.spec, part, head_chunk=room.plan.cfg.model.head_chunk).values())
    more = figures.temporary - temporary(room.part.slots)  # than was counted

    def fits(slots: int) -> bool:
        return room.held.in_update + temporary(slots) + more <= room.memory
    most = estimate.largest(fits, parts=1, least=1, most=_useful(room))
    compile_at = asked and (lambda count: asked.update(count * room.parts).temporary)
    known = {room.part.slots: figures.temporary} if asked else {}
    most, how = confirmed(most, compile_at, known, compiles=compiles,
                          room=room.memory - room.held.in_update)
    tokens = room.part.prompt + room.part.rows * room.part.width
    return {"temporary": figures.temporary, "peak": room.held.in_update + figures.temporary,
            "slots": room.part.slots, "rows": room.part.rows, "tokens of a slot": tokens,
            "largest slots": most, "largest tokens": most * tokens, "found by": how}


def slots(room: Room, prefill: estimate.Estimate, decode: estimate.Estimate, *, compiles: int,
          asked: Asked | None) -> dict[str, Any]:
    """Bytes of the configured rollout, and the most slots on a device: caches and the prompts that
    are run for an eighth of them grow with the slots."""
    now = room.plan.cfg.rollout.slots[-1] / room.parts
    caches = room.held.prompt_cache + room.held.sample_cache
    fixed, temporary = room.held.in_rollout - caches, max(prefill.temporary, decode.temporary)
    most = int(max(0.0, room.memory - fixed) * now / (caches + temporary))
    most = min(most, max(int(now), -(-2 * room.plan.phase.prompts_per_step // room.parts)))

    compile_at = asked and (lambda count: max(
        asked.decode(count * room.parts).temporary, prefill.temporary * count / now)
        + caches * count / now)
    known = {now: temporary + caches} if asked else {}
    most, how = confirmed(most, compile_at, known, compiles=compiles,
                          room=room.memory - fixed)
    rows = programs.rows(room.plan)
    least = fixed + (room.held.prompt_cache + room.held.sample_cache / rows + temporary) / now
    return {"temporary": temporary, "peak": room.held.in_rollout + temporary, "slots": now,
            "rows": rows, "largest slots": most, "found by": how,
            "peak of one row": least, "one row fits": least <= room.memory}


def _useful(room: Room) -> int:
    """Slots of a device that hold all of an update's samples, or those that are configured."""
    phase, part = room.plan.phase, room.part
    rows = phase.prompts_per_step // phase.updates_per_step * phase.samples_per_prompt
    return max(part.slots, -(-rows // (part.rows * room.parts)))


def confirmed(most: int, compile_at: Callable[[int], float] | None, known: dict[float, float], *,
              room: float, compiles: int) -> tuple[int, str]:
    """The largest number, `most` at first, whose bytes by the compiler, `compile_at(number)`, are
    at most `room`, and how it was found; `known` holds bytes of numbers already compiled."""
    known = dict(known)
    if compile_at is None:
        return most, "counted"
    for _ in range(compiles):
        if not most or most in known:
            break
        try:
            known[most] = compile_at(most)
        except compiler.TooLarge:
            known[most] = float("inf")
        if known[most] > room:
            most -= 1
    if most in known and known[most] <= room:
        return most, "compiled"
    return most, "counted"
