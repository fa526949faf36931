"""What chips send each other, read from the text of a compiled program (HLO)."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
         "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_LOOP = re.compile(r" while\(.*body=%?([\w.\-]+)")
_CALL = re.compile(r"(?:to_apply|calls|branch_computations=\{|true_computation|false_computation)"
                   r"=?%?([\w.\-]+)")
_TIMES = re.compile(r'known_trip_count":?\s*\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program."""

    kind: str
    count: float  # how often one is run
    bytes: float  # of each one's larger side, what goes in or comes out on a device, all together


def found(text: str, scale: Callable[[int], int] = lambda times: times) -> tuple[Collective, ...]:
    """The collectives of a program, those inside loops as often as the loops run; a loop of unknown
    length counts once. `scale` gives the length that a loop of a certain length stands for."""
    bodies = _bodies(text)
    runs = _runs(bodies, scale)
    count, moved = collections.Counter(), collections.Counter()
    for name, lines in bodies.items():
        for line in lines:
            if one := re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
                count[one[2]] += runs[name]
                times = _group(line) if one[2] == "reduce-scatter" else 1
                moved[one[2]] += runs[name] * times * _result(one[1], start=bool(one[3]))
    return tuple(Collective(kind, count[kind], moved[kind]) for kind in KINDS if count[kind])


def _result(shapes: str, *, start: bool) -> int:
    """Bytes of a result; what starts one hands on its operand too, so the largest counts."""
    sizes = [BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(","))))
             for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)]
    return max(sizes, default=0) if start else sum(sizes)


def _group(line: str) -> int:
    """Devices that take part in one exchange."""
    if short := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(short[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return listed[1].count(",") + 1 if listed else 1


def _bodies(text: str) -> dict[str, list[str]]:
    bodies, name = {}, ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _COMPUTATION.match(line)):
            name = "ENTRY" if line.startswith("ENTRY") else head[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies


def _runs(bodies: dict[str, list[str]], scale: Callable[[int], int]) -> dict[str, int]:
    """How often each computation runs."""
    runs = collections.Counter()

    def visit(name: str, times: int, depth: int) -> None:
        runs[name] += times
        if depth > 64:  # computations cannot hold each other; a text that says so is not read on
            return
        for line in bodies.get(name, ()):
            if loop := _LOOP.search(line):
                known = _TIMES.search(line)
                visit(loop[1], times * (scale(int(known[1])) if known else 1), depth + 1)
            else:
                for inner in _CALL.findall(line):
                    visit(inner, times, depth + 1)
    visit("ENTRY", 1, 0)
    return runs


def by_layers(few: Sequence[Collective], more: Sequence[Collective],
              line: Callable[[float, float], float]) -> Iterable[Collective]:
    """Of a deeper model, from two of fewer layers; `line` continues a figure."""
    nothing = {kind: Collective(kind, 0, 0) for kind in KINDS}
    first, second = (nothing | {one.kind: one for one in side} for side in (few, more))
    for kind in KINDS:
        a, b = first[kind], second[kind]
        if b.count:
            yield Collective(kind, line(a.count, b.count), line(a.bytes, b.bytes))


def of_update(*, parameters: float, tokens: float, d_model: int, layers: int, size: int,
              mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """A microbatch's collectives as FSDP needs them, counted from the shape: each matrix is
    gathered for its forward and for its backward pass, each gradient (float32) exchanged once, and
    over tensor two sums a layer and pass of the device's `tokens`. `parameters` numbers in all."""
    whole = parameters / mesh["tensor"]
    passes = 3 if mesh["tensor"] > 1 else 0  # forward, that again, backward
    gathers = 2 * layers if mesh["fsdp"] > 1 else 0
    exchanges = layers if mesh["fsdp"] > 1 else 0
    sums = 2 * passes * layers
    reduced = sums * tokens * d_model * size
    if mesh["data"] > 1:
        sums, reduced = sums + layers, reduced + 4 * whole / mesh["fsdp"]
    made = (Collective("all-gather", gathers, 2 * whole * size if gathers else 0),
            Collective("all-reduce", sums, reduced),
            Collective("reduce-scatter", exchanges, 4 * whole if exchanges else 0))
    return tuple(one for one in made if one.count)


def of_token(*, weights: float, rows: float, d_model: int, layers: int, size: int, gather: bool,
             mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """What drawing a token sends: over tensor two sums a layer and one more; and, where weights are
    not whole while samples are drawn, all `weights` numbers."""
    made = []
    if mesh["tensor"] > 1:
        made += [Collective("all-reduce", 2 * layers + 1,
                            (2 * layers + 1) * rows * d_model * size)]
    if mesh["fsdp"] > 1 and not gather:
        made += [Collective("all-gather", layers, weights * size / mesh["tensor"])]
    return tuple(made)
