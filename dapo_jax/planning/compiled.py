"""Figures of a step's programs by the TPU compiler: temporary bytes and collectives. Operations and
bytes moved stay those counted in what the compiler was given, since it counts a loop's body once
and cannot see into a kernel."""

import dataclasses
import functools
from collections.abc import Mapping

from dapo_jax.planning import compiler, estimate, programs, sources, spending

# The most telling first, should time run out.
ORDER = ("update", "decode", "weights", "prefill", "move", "merge", "extend", "seat", "lines",
         "store", "states", "resize")
HELD = ("weights", "move", "merge", "resize")  # their results are counted with what is held


def all_of(
    planned: programs.Plan, made: sources.Sources, counted: Mapping[str, estimate.Estimate], *,
    ask: spending.Ask,
) -> dict[str, estimate.Estimate]:
    """The counted estimates, with what the compiler says in its place. A program that it refuses,
    for it is too large, or that there is no time for keeps its own, and its source says so."""
    result = dict(counted)
    for name in sorted(counted, key=lambda name: (*ORDER, name).index(name)):
        try:
            result[name] = of(name, planned, made, counted[name], ask=ask)
        except compiler.TooLarge as error:
            result[name] = dataclasses.replace(
                counted[name], source=f"{counted[name].source}; the compiler: {error}")
        except spending.OutOfTime:
            result[name] = dataclasses.replace(
                counted[name], source=f"{counted[name].source}; not compiled: time")
    return result


def of(name: str, planned: programs.Plan, made: sources.Sources, counted: estimate.Estimate, *,
       ask: spending.Ask, slots: int = 0) -> estimate.Estimate:
    """One program's; `slots` instead of the configured ones. Raises compiler.TooLarge and
    spending.OutOfTime."""
    whole = planned.spec.layers
    few = sorted({min(number, whole) for number in estimate.FEW}) if name in sources.UNROLLED else (
        [0])
    found = [ask(spending.Key(name, slots, layers), functools.partial(
        sources.one, made, name, slots=slots, layers=layers)) for layers in few]
    if len(found) == 1:
        return _with(counted, name, found[0], "TPU compiler")
    return _with(counted, name, compiler.by_layers(found[0], found[1], (few[0], few[1], whole)),
                 f"TPU compiler, continued from {few[0]} and {few[1]} layers")


def _with(counted: estimate.Estimate, name: str, figures: compiler.Figures, source: str
          ) -> estimate.Estimate:
    temporary = max(0, figures.temporary) + counted.beside + (
        0 if name in HELD else figures.result)
    if figures.sent is None:
        return dataclasses.replace(counted, temporary=temporary, source=source)
    return dataclasses.replace(counted, temporary=temporary, source=source, sent=figures.sent,
                               sent_from=source)
