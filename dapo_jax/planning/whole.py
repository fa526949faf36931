"""A whole plan: the figures of a configuration on a slice, as plain numbers."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from dapo_jax import config
from dapo_jax.planning import chips, compiler, estimate, fit, memory, programs, times

RESERVED = 0.02  # of the memory, which the runtime and the programs themselves take


def planned(cfg: config.Config, chip: chips.Chip, shape: config.Mesh, *, length: int = 0,
            compiles: int = 2, compiled: bool = True) -> dict[str, Any]:
    """All figures of the page; bytes and seconds. ConfigError for a mesh that no slice has.

    `length`: mean tokens of a completion (0: the limit). `compiled`: ask the TPU compiler.
    """
    begun, name = time.perf_counter(), chips.topology(chip, shape)
    plan = programs.plan(cfg, backend="tpu" if chip.slices else "gpu",
                         parts=shape.data * shape.fsdp)
    mesh = chips.shape_only(shape)
    update, rollout = programs.of_update(plan, mesh), programs.of_rollout(plan, mesh)
    held = memory.held(update, rollout)
    part = memory.split(programs.only(update.accumulate))
    work = Programs(estimate.update_counted(plan, mesh), estimate.prefill_counted(plan, mesh),
                    estimate.decode_counted(plan, mesh))
    room = fit.Room(chip.memory * (1 - RESERVED), held, part, plan,
                    shape.data * shape.fsdp)
    asked = None
    if compiled:
        work, asked = _compiled(plan, chip, shape, work)
    update_fit = fit.microbatch(room, work.update, compiles=compiles, asked=asked)
    rollout_fit = fit.slots(room, work.prefill, work.decode, compiles=compiles, asked=asked)
    figures = {
        "slice": name, "mesh": dataclasses.asdict(shape), "model": plan.shape_from,
        "notes": list(plan.notes),
        "chip": dataclasses.asdict(chip) | {"slices": None}, "memory": chip.memory,
        "held": dataclasses.asdict(held) | {"in update": held.in_update,
                                            "in rollout": held.in_rollout},
        "programs": {name: dataclasses.asdict(one) for name, one in vars(work).items()},
        "update": update_fit, "rollout": rollout_fit,
        "time": step_time(plan, chip, shape, work, part, length=length),
        "longest row": {"prompt": part.prompt, "completion": part.width,
                        "fits": bool(update_fit["largest slots"] and rollout_fit["one row fits"])},
        "planned in seconds": time.perf_counter() - begun}
    return figures


@dataclasses.dataclass(frozen=True)
class Programs:
    """Estimates of what a step runs: a microbatch, an admission's prompts, a token of each row."""

    update: estimate.Estimate
    prefill: estimate.Estimate
    decode: estimate.Estimate


def _compiled(plan: programs.Plan, chip: chips.Chip, shape: config.Mesh, counted: Programs
              ) -> tuple[Programs, fit.Asked]:
    """The same figures by the compiler, which is then there to be asked further; a program that it
    refuses keeps its counted figures, and its source says so."""
    mesh = compiler.slice_mesh(chip, shape)

    def of_update(slots: int = 0) -> estimate.Estimate:
        return estimate.update_compiled(plan, mesh, counted.update, slots=slots)

    def of_decode(slots: int = 0) -> estimate.Estimate:
        return estimate.decode_compiled(plan, mesh, slots=slots)

    def or_counted(make: Callable[[], estimate.Estimate], other: estimate.Estimate
                   ) -> estimate.Estimate:
        try:
            return make()
        except compiler.TooLarge as error:
            return dataclasses.replace(other, source=f"{other.source}; the compiler: {error}")
    made = Programs(
        or_counted(of_update, counted.update),
        or_counted(lambda: estimate.prefill_compiled(plan, mesh, counted.prefill),
                   counted.prefill),
        or_counted(of_decode, counted.decode))
    return made, fit.Asked(of_update, of_decode)


def step_time(plan: programs.Plan, chip: chips.Chip, shape: config.Mesh, work: Programs,
              part: memory.Split, *, length: int) -> dict[str, Any]:
    """Seconds of a step at best, rollout and update apart; every prompt asked for once."""
    phase, limit = plan.phase, plan.cfg.rollout.max_new_tokens
    length, devices = length or limit, shape.data * shape.fsdp
    samples = phase.prompts_per_step * phase.samples_per_prompt
    bounds = {name: times.bound(chip, flops=one.flops, moved=one.bytes,
                                sent=times.sent_bytes(one.sent),
                                group=shape.data * shape.fsdp * shape.tensor)
              for name, one in vars(work).items()}
    held = devices * part.slots * part.rows
    rows = samples * length / part.width if phase.packed_prompts else samples
    batches = -(-rows // held) * phase.epochs_per_batch
    slots = plan.cfg.rollout.slots[-1]
    drawn = -(-samples * length // (slots * min(plan.cfg.rollout.rows or phase.samples_per_prompt,
                                                phase.samples_per_prompt)))
    admissions = -(-phase.prompts_per_step // max(devices, slots // 8 // devices * devices))
    result = {"mean completion": length, "samples": samples}
    for name, parts in {
            "rollout": [(admissions, bounds["prefill"]), (drawn, bounds["decode"])],
            "update": [(batches, bounds["update"])]}.items():
        seconds, bound_by = times.sum_of(parts)
        result[name] = {"seconds": seconds, "bound": bound_by,
                        "runs": [count for count, _ in parts],
                        "each": [dataclasses.asdict(one) for _, one in parts]}
    return result
