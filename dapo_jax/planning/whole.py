"""A whole plan: the figures of a configuration on a slice, as plain numbers."""

import dataclasses
import time
from typing import Any

from dapo_jax import config
from dapo_jax.planning import (
    chips,
    compiled,
    compiler,
    estimate,
    fit,
    memory,
    meshes,
    programs,
    times,
)

RESERVED = 0.02  # of the memory, which the runtime and the programs themselves take
UNSEEN = 0.04  # more of it where bytes are counted: compilers took up to 7 % more than that


def planned(cfg: config.Config, chip: chips.Chip, shape: config.Mesh, *, length: int = 0,
            compiles: int = 2, by_compiler: bool = True) -> dict[str, Any]:
    """All figures of the page; bytes and seconds. ConfigError for a mesh that no slice has.

    `length`: mean tokens of a completion (0: the limit). `by_compiler`: ask the TPU compiler.
    """
    begun, name = time.perf_counter(), chips.topology(chip, shape)
    plan = programs.plan(cfg, backend="tpu" if chip.slices else "gpu",
                         parts=shape.data * shape.fsdp)
    mesh = chips.shape_only(shape)
    update, rollout = programs.of_update(plan, mesh), programs.of_rollout(plan, mesh)
    held = memory.held(update, rollout)
    part = memory.split(programs.only(update.accumulate))
    counted = work = estimate.counted(plan, mesh, update=update, rollout=rollout)
    spared = RESERVED + (0 if by_compiler else UNSEEN)
    room = fit.Room(chip.memory * (1 - spared), held, part, plan)
    asked = None
    if by_compiler:
        on = compiler.slice_mesh(chip, shape)
        work = compiled.all_of(plan, on, counted)

        def asked(what: str, slots: int) -> estimate.Estimate:
            return compiled.of(what, plan, on, counted[what], slots=slots)
    update_fit = fit.microbatch(room, work, compiles=compiles, asked=asked)
    rollout_fit = fit.slots(room, work, compiles=compiles, asked=asked)
    return {
        "slice": name, "mesh": dataclasses.asdict(shape), "model": plan.shape_from,
        "notes": list(plan.notes),
        "chip": dataclasses.asdict(chip) | {"slices": None}, "memory": chip.memory,
        "room": room.memory,
        "held": dataclasses.asdict(held) | {"in update": held.in_update,
                                            "in rollout": held.in_rollout},
        "programs": {name: dataclasses.asdict(one) for name, one in work.items()},
        "counted": {name: one.temporary for name, one in counted.items()},
        "update": update_fit, "rollout": rollout_fit,
        "time": step_time(plan, chip, shape, work, part, length=length),
        "meshes": meshes.others(room, work, shape),
        "longest row": {"prompt": part.prompt, "completion": part.width,
                        "fits": bool(update_fit["largest slots"] and rollout_fit["one row fits"])},
        "planned in seconds": time.perf_counter() - begun}


def step_time(plan: programs.Plan, chip: chips.Chip, shape: config.Mesh, work: fit.Programs,
              part: memory.Split, *, length: int) -> dict[str, Any]:
    """Seconds of a step at best, rollout and update apart; every prompt asked for once."""
    sizes, runs = dataclasses.asdict(shape), _runs(plan, part, length)
    bounds = {name: times.bound(chip, flops=one.flops, moved=one.bytes, sent=one.sent, mesh=sizes)
              for name, one in work.items()}
    result: dict[str, Any] = {"mean completion": length or plan.cfg.rollout.max_new_tokens,
              "samples": plan.phase.prompts_per_step * plan.phase.samples_per_prompt}
    for side in ("rollout", "update"):
        parts = {name: (runs[name], bounds[name]) for name in work
                 if name in runs and (name in ROLLOUT) == (side == "rollout")}
        seconds, bound_by = times.sum_of(list(parts.values()))
        result[side] = {"seconds": seconds, "bound": bound_by, "parts": {
            name: {"runs": count, "seconds": count * one.seconds, "bound": one.limit,
                   "each": dataclasses.asdict(one)} for name, (count, one) in parts.items()}}
    return result


ROLLOUT = ("weights", "prefill", "admit", "decode")  # resizing is rare


def _runs(plan: programs.Plan, part: memory.Split, length: int) -> dict[str, float]:
    """How often a step runs each program."""
    phase, rollout = plan.phase, plan.cfg.rollout
    length, samples = length or rollout.max_new_tokens, (
        phase.prompts_per_step * phase.samples_per_prompt)
    rows = samples * length / part.width if phase.packed_prompts else samples
    passes = -(-rows // (part.parts * part.slots * part.rows))
    slots = rollout.slots[-1]
    drawn = slots * min(rollout.rows or phase.samples_per_prompt, phase.samples_per_prompt)
    at_once = max(part.parts, slots // 8 // part.parts * part.parts)
    admissions = -(-phase.prompts_per_step // at_once)
    return {"weights": 1, "prefill": admissions, "admit": admissions,
            "decode": -(-samples * length // drawn),
            "update": passes * phase.epochs_per_batch,
            "log-probs, old": passes, "log-probs, reference": passes,
            "apply": phase.updates_per_step * phase.epochs_per_batch}
