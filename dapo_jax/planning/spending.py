"""Compiling within a bound of time: nothing twice, nothing that would not end in time as far as
what was compiled before it tells, and what takes longer than that is waited for no further."""

import dataclasses
import threading
import time
from collections.abc import Callable

from dapo_jax.planning import compiler, programs


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


Result = compiler.Figures | Exception
Ask = Callable[[Key, Callable[[], programs.Program]], compiler.Figures]
Say = Callable[[str], None]


class OutOfTime(Exception):
    """There is too little time for a program."""


def within(seconds: float, *, begun: float, say: Say, clock: Callable[[], float] = time.perf_counter
           ) -> Ask:
    """A function (key, build) that compiles what `build()` makes and tells of it by `say`.

    It raises OutOfTime for what would end more than `seconds` after `begun` by the `clock` if it
    took as long as the last of its kind, for what does not end by then, and for all that is asked
    after that: a compile cannot be stopped, so it runs on in a thread (`runs_on`). What else a
    compile raises, compiler.TooLarge for one, comes through, and again if it is asked for again.
    """
    took: dict[str, float] = {}
    found: dict[Key, Result] = {}

    def ask(key: Key, build: Callable[[], programs.Program]) -> compiler.Figures:
        if key not in found:
            start = clock()
            left = begun + seconds - start
            if runs_on() or took.get(key.kind, 0.0) >= left:
                raise OutOfTime(str(key))
            found[key] = _awaited(build, left)
            took[key.kind] = clock() - start
            say(f"{key}: {_how(found[key])} in {took[key.kind]:.0f} s ({clock() - begun:.0f} of "
                f"{seconds:.0f} s)")
        result = found[key]
        if isinstance(result, Exception):
            raise result
        return result
    return ask


NAME = "planned program"  # of the thread that compiles one


def runs_on() -> bool:
    """Whether a compile is under way that nobody waits for any more; Python's usual exit, which
    takes the compiler apart, would then end in a crash."""
    return any(one.name == NAME for one in threading.enumerate())


def _awaited(build: Callable[[], programs.Program], seconds: float) -> Result:
    found: list[Result] = []

    def work() -> None:
        try:
            found.append(compiler.compiled(build(), text=True))
        except Exception as error:  # the caller raises it
            found.append(error)
    thread = threading.Thread(target=work, name=NAME, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else OutOfTime("not done in time")


def _how(result: Result) -> str:
    if isinstance(result, compiler.Figures):
        return "compiled"
    return "too large" if isinstance(result, compiler.TooLarge) else "not done"
