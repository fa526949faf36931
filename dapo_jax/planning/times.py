"""How long a step would take at best: operations, bytes and what is sent, at the chip's rates."""

import dataclasses
from collections.abc import Sequence

from dapo_jax.planning import chips, collectives


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one run of a program if each resource alone were the limit."""

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """At least; what does not overlap adds to it."""
        return max(self.compute, self.memory, self.links)

    @property
    def limit(self) -> str:
        """The name of the resource that is the limit."""
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


def bound(chip: chips.Chip, *, flops: float, moved: float, sent: float, group: int) -> Bound:
    """Of a program's figures on each device; `group` devices take part in its collectives."""
    rate = chip.link if not chip.node or group <= chip.node else chip.network
    return Bound(flops / chip.flops, moved / chip.hbm, sent / rate)


def sent_bytes(found: Sequence[collectives.Collective]) -> float:
    """Bytes that a device sends: in a ring all but its own part of the larger side, here counted
    whole; an all-reduce is two such passes."""
    return sum(one.bytes * (2 if one.kind == "all-reduce" else 1) for one in found)


def sum_of(parts: Sequence[tuple[float, Bound]]) -> tuple[float, str]:
    """Seconds of programs that run so many times one after another, and what limits most of it."""
    by_limit: dict[str, float] = {}
    for times, one in parts:
        by_limit[one.limit] = by_limit.get(one.limit, 0.0) + times * one.seconds
    return sum(by_limit.values()), max(by_limit, key=by_limit.get)
