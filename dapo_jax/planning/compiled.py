"""Figures of a step's programs by the TPU compiler: temporary bytes and collectives. Operations and
bytes moved stay those counted in what the compiler was given, since it counts a loop's body once
and cannot see into a kernel."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dapo_jax.planning import compiler, estimate, programs
from dapo_jax.rollout import programs as sampler

Pick = Callable[[sampler.Programs], Any]  # one of the sampler's programs
PICK: Mapping[str, Pick] = {
    "weights": lambda made: made.weights, "admit": lambda made: programs.only(made.admit),
    "decode": lambda made: programs.only(made.decode)}


def all_of(
    planned: programs.Plan, mesh: jax.sharding.Mesh, counted: Mapping[str, estimate.Estimate]
) -> dict[str, estimate.Estimate]:
    """The counted estimates, with what the compiler says in its place. A program that it refuses,
    for it is too large, keeps its own, and its source says so."""
    result = {}
    for name, one in counted.items():
        try:
            result[name] = of(name, planned, mesh, one)
        except compiler.TooLarge as error:
            result[name] = dataclasses.replace(one, source=f"{one.source}; the compiler: {error}")
    return result


def of(name: str, planned: programs.Plan, mesh: jax.sharding.Mesh, counted: estimate.Estimate, *,
       slots: int = 0) -> estimate.Estimate:
    """One program's; `slots` instead of the configured ones. Raises compiler.TooLarge."""
    if name in PICK or name == "resize":
        return _by_layers(name, planned, mesh, counted, slots=slots)
    if name == "prefill":
        made: Any = programs.only(programs.of_rollout(planned, mesh, slots=slots).prefill)
    else:
        update = programs.of_update(planned, mesh, slots=slots)
        made = update.apply if name == "apply" else programs.only(
            update.accumulate if name == "update" else getattr(update, name.split(", ")[1]))
    figures = compiler.compiled(made, text=True)
    source = "TPU compiler"
    # An optimizer step's result is its argument.
    return _with(counted, figures, source, figures.temporary + figures.result)


def _with(counted: estimate.Estimate, figures: compiler.Figures, source: str, temporary: float
          ) -> estimate.Estimate:
    if figures.sent is None:
        return dataclasses.replace(counted, temporary=temporary, source=source)
    return dataclasses.replace(counted, temporary=temporary, source=source, sent=figures.sent,
                               sent_from=source)


def _by_layers(name: str, planned: programs.Plan, mesh: jax.sharding.Mesh,
               counted: estimate.Estimate, *, slots: int) -> estimate.Estimate:
    """From models of a few layers: these programs write out each one."""
    pick = PICK.get(name, estimate.resize_of)
    few = [min(number, planned.spec.layers) for number in estimate.FEW]
    figures = [compiler.compiled(pick(programs.of_rollout(
        planned, mesh, slots=slots, layers=number, beside=name == "resize")), text=True)
        for number in dict.fromkeys(few)]
    whole = figures[0] if len(figures) == 1 else compiler.by_layers(
        figures[0], figures[1], (few[0], few[1], planned.spec.layers))
    # Results that outlive their programs are counted once, as what is held, but for the slots
    # beside others.
    beside = {"admit": counted.temporary, "resize": counted.temporary}.get(name, 0.0)
    source = "TPU compiler" if len(figures) == 1 else (
        f"TPU compiler, continued from {few[0]} and {few[1]} layers")
    return _with(counted, whole, source, max(0.0, whole.temporary) + beside)
