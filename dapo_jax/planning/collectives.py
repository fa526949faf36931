"""What chips send each other, read from the text of a compiled program (HLO)."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
         "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_LOOP = re.compile(r" while\(.*body=%?([\w.\-]+)")
_CALL = re.compile(r"(?:to_apply|calls|branch_computations=\{|true_computation|false_computation)"
                   r"=?%?([\w.\-]+)")
_TIMES = re.compile(r'known_trip_count":?\s*\{"n":"(\d+)"')
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program that go over the same axes of the mesh."""

    kind: str
    axes: tuple[str, ...]  # along which the devices of a group differ
    count: float  # how often one is run
    bytes: float  # of each one's larger side, what goes in or comes out on a device, all together


def found(text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives of a program compiled for a mesh of these sizes, those inside loops as often
    as the loops run; a loop of unknown length counts once."""
    bodies = _bodies(text)
    runs = _runs(bodies)
    count: collections.Counter[tuple[int, tuple[str, ...]]] = collections.Counter()
    moved: collections.Counter[tuple[int, tuple[str, ...]]] = collections.Counter()
    for name, lines in bodies.items():
        for line in lines:
            if one := re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
                group = _group(line) or tuple(range(math.prod(mesh.values())))
                # So the TPU compiler writes what it sends as a reduce-scatter.
                scatters = name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scatters else one[2]
                key = KINDS.index(kind), _axes(line, group, mesh)
                count[key] += runs[name]
                times = len(group) if one[2] == "reduce-scatter" else 1
                moved[key] += runs[name] * times * _result(one[1], start=bool(one[3]))
    return tuple(Collective(KINDS[kind], axes, count[kind, axes], moved[kind, axes])
                 for kind, axes in sorted(count) if count[kind, axes] and axes)


def axes_of(group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in which devices of these numbers differ; the last axis is numbered fastest."""
    places = np.unravel_index(np.asarray(group), tuple(mesh.values()))
    return tuple(axis for axis, at in zip(mesh, places) if np.ptp(at))


def _axes(line: str, group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Of a group, or of all pairs of a permutation: in some of these nothing moves."""
    listed = re.search(r"source_target_pairs=\{(\{[\d,{}]+\})\}", line)
    if not listed:
        return axes_of(group, mesh)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1])
    differ = {axis for pair in pairs for axis in axes_of([int(end) for end in pair], mesh)}
    return tuple(axis for axis in mesh if axis in differ)


def _result(shapes: str, *, start: bool) -> int:
    """Bytes of a result; what starts one hands on its operand too, so the largest counts."""
    sizes = [BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(","))))
             for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)]
    return max(sizes, default=0) if start else sum(sizes)


def _group(line: str) -> tuple[int, ...]:
    """The devices of the first exchange; none are named where all take part."""
    if named := _NAMED.search(line):
        return _of_axes(*named.groups())
    if short := _IOTA.search(line):
        rows, of, order = ([int(x) for x in part.split(",")] if part else []
                           for part in short.groups())
        numbers = np.arange(math.prod(of)).reshape(of).transpose(order or range(len(of)))
        return tuple(numbers.reshape(rows)[(0,) * (len(rows) - 1)].tolist())
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    return tuple(map(int, listed[1].split(","))) if listed else ()


def _of_axes(mesh: str, order: str | None, axes: str) -> tuple[int, ...]:
    """Devices along axes of a mesh as XLA writes both, 'a'=4,'b'=2 and 'b','a':(2)2: of an axis
    whole or, of sizes in brackets and after them, the second of the parts that it is cut into.
    `order`: the devices as they lie in the mesh, 0,2,1,3 or [2,2]T(1,0); None: as numbered."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    chosen = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in
              re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if turned := re.fullmatch(r"\[([\d,]+)\]T\(([\d,]+)\)", order or ""):
        of, axis = ([int(x) for x in part.split(",")] for part in turned.groups())
        numbers = numbers.reshape(of).transpose(axis)
    elif order:
        numbers = np.asarray([int(x) for x in order.split(",")])
    numbers = numbers.reshape(tuple(sizes.values()))
    places = [np.arange(size) * (whole // (before * size)) for whole, (before, size) in (
        (whole, chosen.get(name, (1, 1))) for name, whole in sizes.items())]
    return tuple(numbers[np.ix_(*places)].ravel().tolist())


def _bodies(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _COMPUTATION.match(line)):
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies


def _runs(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs."""
    runs: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int, depth: int) -> None:
        runs[name] += times
        if depth > 64:  # computations cannot hold each other; a text that says so is not read on
            return
        for line in bodies.get(name, ()):
            if loop := _LOOP.search(line):
                visit(loop[1], times * _length(line, bodies), depth + 1)
            else:
                for inner in _CALL.findall(line):
                    visit(inner, times, depth + 1)
    visit("ENTRY", 1, 0)
    return runs


def _length(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop runs: as it says itself, or up to the number that its condition compares
    with, as loops over an array's parts do; 1 where neither is there."""
    if known := _TIMES.search(line):
        return int(known[1])
    condition = "\n".join(bodies.get((_CONDITION.search(line) or ("", ""))[1], ()))
    if not (limit := _LIMIT.search(condition)):
        return 1
    number = re.search(rf"%{re.escape(limit[1])} = s32\[\]\S* constant\((\d+)\)", condition)
    return int(number[1]) if number else 1


def by_layers(few: Sequence[Collective], more: Sequence[Collective],
              line: Callable[[float, float], float]) -> Iterable[Collective]:
    """Of a deeper model, from two of fewer layers; `line` continues a figure."""
    first, second = ({(one.kind, one.axes): one for one in side} for side in (few, more))
    for key, b in second.items():
        a = first.get(key, Collective(*key, 0, 0))
        yield Collective(*key, line(a.count, b.count), line(a.bytes, b.bytes))


def of_update(
    *, parameters: float, table: float, tokens: float, d_model: int, layers: int, size: int,
    mesh: Mapping[str, int],
) -> tuple[Collective, ...]:
    """A microbatch's collectives as FSDP needs them, counted from the shape: each matrix is
    gathered for its forward and for its backward pass, and its gradient exchanged once, in the
    compute dtype, but that of the head's `table` in float32; over tensor go five sums a layer of
    the device's `tokens`: two forward, one of them again where blocks are run again, two backward.
    `parameters` and `table` are numbers in all."""
    whole, sums = parameters / mesh["tensor"], 5 * layers
    gradients = whole * size + table / mesh["tensor"] * (4 - size)
    return tuple(one for one in (
        Collective("all-gather", ("fsdp",), 2 * layers, 2 * whole * size),
        Collective("reduce-scatter", ("fsdp",), layers, gradients),
        Collective("all-reduce", ("data",), layers, gradients / mesh["fsdp"]),
        Collective("all-reduce", ("tensor",), sums, sums * tokens * d_model * size),
    ) if mesh[one.axes[0]] > 1)


def of_forward(*, parameters: float, tokens: float, d_model: int, layers: int, size: int,
               mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Those of a pass without a gradient: each matrix gathered once."""
    whole, sums = parameters / mesh["tensor"], 2 * layers + 1
    return tuple(one for one in (
        Collective("all-gather", ("fsdp",), layers, whole * size),
        Collective("all-reduce", ("tensor",), sums, sums * tokens * d_model * size),
    ) if mesh[one.axes[0]] > 1)


def of_token(*, gather: bool, **shape: Any) -> tuple[Collective, ...]:
    """What drawing a token sends, of the same `shape` as `of_forward`; weights that are whole while
    samples are drawn (`gather`) are not sent."""
    return tuple(one for one in of_forward(**shape) if one.axes == ("tensor",) or not gather)
