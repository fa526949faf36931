"""A whole plan: the figures of a configuration on a slice, as plain numbers."""

import dataclasses
import time
from typing import Any

import jax

from dapo_jax import config
from dapo_jax.learner import features, packing
from dapo_jax.planning import (
    chips,
    compiled,
    compiler,
    estimate,
    fit,
    memory,
    meshes,
    programs,
    sources,
    spending,
    times,
)
from dapo_jax.rollout import programs as sampler
from dapo_jax.runtime import mesh as mesh_lib

COMPILES, MINUTES = 8, 4  # bounds of the search and of all that is compiled
RESERVED = 0.02  # of the memory, which the runtime and the programs themselves take
UNSEEN = 0.04  # more of it where bytes are counted: compilers took up to 7 % more than that


def planned(
    cfg: config.Config, chip: chips.Chip, shape: config.Mesh, *, length: int = 0,
    compiles: int = COMPILES, minutes: float = MINUTES, by_compiler: bool = True,
    say: spending.Say = lambda line: None,
) -> dict[str, Any]:
    """All figures of the page; bytes and seconds. ConfigError for a mesh that no slice has.

    `length`: mean tokens of a completion (0: the limit). `by_compiler`: ask the TPU compiler, and
    begin nothing that would end after so many `minutes`; `say` is told of each program.
    """
    begun, name = time.perf_counter(), chips.topology(chip, shape)
    sampling = chips.sampler_mesh(cfg, shape)
    plan = programs.plan(
        cfg, backend="tpu" if chip.slices else "gpu", parts=shape.data * shape.fsdp,
        sampling=sampling.data * sampling.fsdp)
    made = sources.of(plan, chips.shape_only(shape), chips.shape_only(sampling))
    counted = work = estimate.counted(plan, made)
    room = _room(chip, plan, made, sampling, spared=RESERVED + (0 if by_compiler else UNSEEN))
    asked = None
    if by_compiler:
        on = compiler.slice_mesh(chip, shape)
        there = sources.of(plan, on, mesh_lib.resplit(on, cfg.rollout.mesh))
        ask = spending.within(60 * minutes, begun=begun, say=say)
        work = compiled.all_of(plan, there, counted, ask=ask)

        def asked(what: str, slots: int) -> estimate.Estimate:
            return compiled.of(what, plan, there, counted[what], ask=ask, slots=slots)
    # Slots first: a token of few layers is compiled in seconds.
    slots = fit.slots(room, work, compiles=compiles, asked=asked)
    microbatch = fit.microbatch(room, work, compiles=compiles, asked=asked)
    notes = [*plan.notes, *mesh_lib.unsplit(made.trained, plan.spec)]
    return _page(plan, chip, shape, room, work) | {
        "notes": notes,
        "slice": name, "host": _host(plan, made),
        "counted": {name: one.temporary for name, one in counted.items()},
        "update": microbatch, "rollout": slots,
        "time": step_time(plan, chip, shape, work, room.part, length=length),
        "longest row": {"prompt": room.part.prompt, "completion": room.part.width,
                        "fits": bool(microbatch["largest slots"] and slots["one row fits"])},
        "minutes": minutes if by_compiler else None,
        "planned in seconds": time.perf_counter() - begun}


def _page(plan: programs.Plan, chip: chips.Chip, shape: config.Mesh, room: fit.Room,
          work: fit.Programs) -> dict[str, Any]:
    """What the plan is of, what is held, and its programs."""
    sampling = chips.sampler_mesh(plan.cfg, shape)
    return {
        "mesh": dataclasses.asdict(shape), "sampler": dataclasses.asdict(sampling),
        "model": plan.shape_from,
        "chip": dataclasses.asdict(chip) | {"slices": None}, "memory": chip.memory,
        "room": room.memory, "held": _held(room.held),
        "programs": {name: dataclasses.asdict(one) for name, one in work.items()},
        "meshes": meshes.others(room, work, shape, sampling)}


def _room(chip: chips.Chip, plan: programs.Plan, made: sources.Sources, sampling: config.Mesh, *,
          spared: float) -> fit.Room:
    parks = "store" in sources.names(made)
    return fit.Room(
        chip.memory * (1 - spared), memory.held(plan, made),
        memory.split(sources.one(made, "update")), sampling.data * sampling.fsdp, plan,
        estimate.contexts(made) if parks else 0)


def _held(held: memory.Held) -> dict[str, int]:
    return dataclasses.asdict(held) | {"in update": held.in_update, "in rollout": held.in_rollout}


def _host(plan: programs.Plan, made: sources.Sources) -> dict[str, float]:
    """What all hosts together keep for samples that wait for a reply: how many contexts at most,
    and their bytes."""
    if "store" not in sources.names(made):
        return {}
    contexts, most = sources.one(made, "store").arguments[2], plan.cfg.environment.parked_host
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(contexts)
               ) / contexts.keys.shape[1]
    return {"contexts": most, "bytes": most * each}


def step_time(plan: programs.Plan, chip: chips.Chip, shape: config.Mesh, work: fit.Programs,
              part: memory.Split, *, length: int) -> dict[str, Any]:
    """Seconds of a step at best, rollout and update apart; every prompt asked for once."""
    sampling, runs = chips.sampler_mesh(plan.cfg, shape), _runs(plan, shape, part, length)
    result: dict[str, Any] = {"mean completion": length or plan.cfg.rollout.max_new_tokens,
              "samples": plan.phase.prompts_per_step * plan.phase.samples_per_prompt,
              "turns": plan.cfg.environment.turns if plan.cfg.environment.name else 1}
    for side, names in (("rollout", sources.ROLLOUT), ("update", sources.UPDATE)):
        on = sampling if side == "rollout" else shape
        parts = {name: (runs[name], times.bound(
            chip, flops=work[name].flops, moved=work[name].bytes, sent=work[name].sent,
            mesh=dataclasses.asdict(shape if name in ("merge", "move") else on)))
            for name in names if name in work and name in runs}
        seconds, bound_by = times.sum_of(list(parts.values()))
        result[side] = {"seconds": seconds, "bound": bound_by, "parts": {
            name: {"runs": count, "seconds": count * one.seconds, "bound": one.limit,
                   "each": dataclasses.asdict(one)} for name, (count, one) in parts.items()}}
    return result


def _runs(plan: programs.Plan, shape: config.Mesh, part: memory.Split, length: int
          ) -> dict[str, float]:
    """How often a step runs each program; resizing is rare. Episodes have all their turns."""
    phase, rollout, environment = plan.phase, plan.cfg.rollout, plan.cfg.environment
    length, samples = length or rollout.max_new_tokens, (
        phase.prompts_per_step * phase.samples_per_prompt)
    rows = samples * length / part.width if phase.packed_prompts else samples
    passes = -(-rows // (part.parts * part.slots * part.rows))
    at_once = sampler.refill(rollout.slots[-1], _parts(chips.sampler_mesh(plan.cfg, shape)))
    share = phase.samples_per_prompt
    if environment.name:
        share = min(share, max(1, -(-samples // rollout.slots[-1])))
    admissions = -(-phase.prompts_per_step * -(-phase.samples_per_prompt // share) // at_once)
    replies = -(-samples * (environment.turns - 1) // at_once)
    states = programs.of_states(plan, chips.shape_only(shape))
    return {"merge": 1, "move": 1, "weights": 1, "prefill": admissions, "admit": admissions,
            "decode": -(-samples * length // (rollout.slots[-1] * programs.rows(plan))),
            **dict.fromkeys(("lines", "store", "extend", "seat"), replies),
            "states": -(-samples // _rows(states)) if states else 0,
            "update": passes * phase.epochs_per_batch,
            "log-probs, old": passes, "log-probs, reference": passes,
            "apply": phase.updates_per_step * phase.epochs_per_batch}


def _parts(shape: config.Mesh) -> int:
    return shape.data * shape.fsdp


def _rows(states: features.Programs) -> int:
    """Of a microbatch of completions whose states are made."""
    pack = states.pack
    slots = packing.slots_of(pack, pack.prompt_buckets[-1], pack.completion_buckets[-1])
    return slots * pack.rows
