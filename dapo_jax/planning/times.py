"""How long a step would take at best: operations, bytes and what is sent, at the chip's rates."""

import dataclasses
from collections.abc import Mapping, Sequence

from dapo_jax.planning import chips, collectives
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one run of a program if each resource alone were the limit."""

    compute: float
    memory: float
    links: float  # inside a node; of a TPU slice, all
    network: float = 0.0  # between nodes

    @property
    def seconds(self) -> float:
        """At least; what does not overlap adds to it."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """The name of the resource that is the limit."""
        seconds: dict[str, float] = vars(self)
        return max(seconds, key=lambda name: seconds[name])


def bound(
    chip: chips.Chip, *, flops: float, moved: float, sent: Sequence[collectives.Collective],
    mesh: Mapping[str, int],
) -> Bound:
    """Of a program's figures on each device; `mesh` has the size of each axis."""
    inside, beyond = sent_bytes(sent, mesh, node=chip.node)
    return Bound(flops / chip.flops, moved / chip.hbm, inside / chip.link, beyond / chip.network)


def sent_bytes(
    found: Sequence[collectives.Collective], mesh: Mapping[str, int], *, node: int
) -> tuple[float, float]:
    """Bytes that a device takes in from its node (of `node` devices; 0: of all), and from others.

    A group of g devices, k of them in each node, gathers B bytes at best so: the k share what comes
    from other nodes, B (1 - k / g), and then hand it and their own on to each other. An all-reduce
    is a reduce-scatter and a gather; what is permuted or all-to-all goes to its place once.
    """
    inside = beyond = 0.0
    for one in found:
        group, near = members(mesh, one.axes, node=node)
        times = 2 if one.kind == "all-reduce" else 1
        far = one.bytes * (1 - near / group)
        if one.kind in ("all-to-all", "collective-permute"):
            inside, beyond = inside + one.bytes * (near - 1) / group, beyond + far
        else:
            inside += times * one.bytes * (near - 1) / near
            beyond += times * far / near
    return inside, beyond


def members(mesh: Mapping[str, int], axes: Sequence[str], *, node: int) -> tuple[int, int]:
    """Devices that differ in these axes alone, and how many of them share a node; devices are
    numbered along the mesh, its last axis fastest, and a node holds consecutive ones."""
    group, near, stride = 1, 1, 1
    for axis in reversed(mesh_lib.AXES):
        size = mesh[axis]
        if axis in axes:
            group *= size
            near *= max(1, min(size, node // stride)) if node else size
        stride *= size
    return group, near


def sum_of(parts: Sequence[tuple[float, Bound]]) -> tuple[float, str]:
    """Seconds of programs that run so many times one after another, and what limits most of it."""
    by_limit: dict[str, float] = {}
    for times, one in parts:
        by_limit[one.limit] = by_limit.get(one.limit, 0.0) + times * one.seconds
    return sum(by_limit.values()), max(by_limit, key=lambda name: by_limit[name])
