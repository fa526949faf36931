"""The programs of a plan by name, each made once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.learner import features, update
from dapo_jax.planning import programs
from dapo_jax.rollout import programs as sampler
from dapo_jax.runtime import mesh as mesh_lib

UPDATE = ("states", "log-probs, old", "log-probs, reference", "update", "apply")
ROLLOUT = ("merge", "move", "weights", "prefill", "admit", "decode", "resize", "lines", "store",
           "extend", "seat")
# They write out each layer, and so are compiled with a few.
UNROLLED = ("weights", "admit", "decode", "resize", "lines", "seat")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Makers of a plan's programs for a pair of meshes."""

    trained: mesh_lib.AnyMesh
    sampling: mesh_lib.AnyMesh  # the same devices, perhaps split in another way
    update: Callable[..., update.Programs]  # (slots=), see programs.of_update
    rollout: Callable[..., sampler.Programs]  # (slots=, layers=, beside=)
    states: features.Programs | None  # where a selection reads hidden states
    move: programs.Program | None  # where the meshes differ
    merge: programs.Program | None  # where an adapter is trained


def of(planned: programs.Plan, trained: mesh_lib.AnyMesh, sampling: mesh_lib.AnyMesh) -> Sources:
    """The makers; what they make is kept."""
    return Sources(
        trained, sampling, functools.cache(functools.partial(programs.of_update, planned, trained)),
        functools.cache(functools.partial(programs.of_rollout, planned, sampling)),
        programs.of_states(planned, trained), programs.of_move(planned, trained, sampling),
        programs.of_merge(planned, trained))


def names(sources: Sources) -> tuple[str, ...]:
    """The programs that a step runs."""
    learner, rollout = sources.update(slots=0), sources.rollout(slots=0, layers=0, beside=False)
    there = {"states": sources.states, "log-probs, old": learner.old, "move": sources.move,
             "log-probs, reference": learner.reference, "merge": sources.merge,
             "resize": sources.rollout(slots=0, layers=0, beside=True).resize,
             **dict.fromkeys(("lines", "store", "extend", "seat"), rollout.parking)}
    return tuple(name for name in UPDATE + ROLLOUT if there.get(name, True))


def one(sources: Sources, name: str, *, slots: int = 0, layers: int = 0) -> programs.Program:
    """A program at its largest shape; `slots` and `layers` instead of the configured ones."""
    if name in _LEARNER:
        return _LEARNER[name](sources.update(slots=slots))
    if name in _SAMPLER:
        return _SAMPLER[name](sources.rollout(slots=slots, layers=layers,
                                              beside=name == "resize"))
    found: dict[str, Any] = {"states": sources.states and programs.only(sources.states.mean),
                             "move": sources.move, "merge": sources.merge}
    assert found[name] is not None, f"{name} is no program of this plan"
    return found[name]


# Of what `programs.program` built, where types speak of compiled functions.
_LEARNER: Mapping[str, Callable[[Any], programs.Program]] = {
    "update": lambda made: programs.only(made.accumulate),
    "log-probs, old": lambda made: programs.only(made.old),
    "log-probs, reference": lambda made: programs.only(made.reference),
    "apply": lambda made: made.apply}
_SAMPLER: Mapping[str, Callable[[Any], programs.Program]] = {
    "weights": lambda made: made.weights, "prefill": lambda made: programs.only(made.prefill),
    "admit": lambda made: programs.only(made.admit),
    "decode": lambda made: programs.only(made.decode),
    # From the smaller number of slots to the larger.
    "resize": lambda made: made.resize[min(made.resize)],
    "lines": lambda made: programs.only(made.parking.lines),
    "store": lambda made: made.parking.store,
    "extend": lambda made: made.parking.extend[max(made.parking.extend)],
    "seat": lambda made: programs.only(made.parking.seat)}
