"""Compiling within a bound of time: nothing twice, and nothing that would not end in time, as far
as what was compiled before it tells."""

import dataclasses
import time
from collections.abc import Callable

from dapo_jax.planning import compiler, programs

# Of the time that the last program of the kind took: a larger one takes longer.
MARGIN = 1.5


@dataclasses.dataclass(frozen=True)
class Key:
    """Which program; two of equal keys are one."""

    kind: str
    slots: int = 0  # 0: those that are configured
    layers: int = 0  # 0: all

    def __str__(self) -> str:
        more = [f"{self.slots} slots"] * bool(self.slots) + [f"{self.layers} layers"] * bool(
            self.layers)
        return ", ".join([self.kind, *more])


Ask = Callable[[Key, Callable[[], programs.Program]], compiler.Figures]
Say = Callable[[str], None]


class OutOfTime(Exception):
    """Too little time is left for a program."""


def within(seconds: float, *, begun: float, say: Say, clock: Callable[[], float] = time.perf_counter
           ) -> Ask:
    """A function (key, build) that compiles what `build()` makes and tells of it by `say`.

    It begins nothing whose kind last took so long that it would end more than `seconds` after
    `begun` by the `clock`, and nothing after that: it raises OutOfTime. compiler.TooLarge comes
    through, and again where the same program is asked for again.
    """
    took: dict[str, float] = {}
    found: dict[Key, compiler.Figures | compiler.TooLarge] = {}

    def ask(key: Key, build: Callable[[], programs.Program]) -> compiler.Figures:
        if key not in found:
            start = clock()
            if start + MARGIN * took.get(key.kind, 0.0) >= begun + seconds:
                raise OutOfTime(str(key))
            found[key] = _tried(build)
            took[key.kind] = clock() - start
            say(f"{key}: {_how(found[key])} in {took[key.kind]:.0f} s ({clock() - begun:.0f} of "
                f"{seconds:.0f} s)")
        result = found[key]
        if isinstance(result, compiler.TooLarge):
            raise result
        return result
    return ask


def _tried(build: Callable[[], programs.Program]) -> compiler.Figures | compiler.TooLarge:
    try:
        return compiler.compiled(build(), text=True)
    except compiler.TooLarge as error:
        return error


def _how(result: compiler.Figures | compiler.TooLarge) -> str:
    return "too large" if isinstance(result, compiler.TooLarge) else "compiled"
