"""Which other meshes of as many chips would hold the run: the planned mesh's figures, divided among
as many devices as hold a part there."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from dapo_jax import config
from dapo_jax.models.spec import ModelSpec
from dapo_jax.planning import estimate, fit, memory

MOST = 6  # that are shown


def others(room: fit.Room, work: fit.Programs, shape: config.Mesh, sampling: config.Mesh
           ) -> list[dict[str, Any]]:
    """Meshes that hold a microbatch and a rollout of one slot a device, those with the most room
    first: their sizes, and bytes of a device at the peak of each. `shape` is the planned mesh,
    `sampling` the sampler's; each of the others would be both."""
    found: list[dict[str, Any]] = []
    for mesh in _of(shape, room.plan.spec):
        peak = _peaks(room, work["update"].saved, shape, sampling, mesh)
        if max(peak.values()) <= room.memory:
            found.append({"mesh": dataclasses.asdict(mesh), **peak})
    return sorted(found, key=lambda one: max(one["update"], one["rollout"]))[:MOST]


def _of(shape: config.Mesh, spec: ModelSpec) -> Iterator[config.Mesh]:
    """Meshes of as many devices, in powers of two, that split what their axes are there for."""
    count = shape.data * shape.fsdp * shape.tensor
    for tensor in (1, 2, 4, 8):
        if any(size % tensor for size in (count, spec.kv_heads, spec.ff, spec.vocab)):
            continue
        fsdp = 1
        while count // tensor % fsdp == 0 and spec.d_model % fsdp == 0:
            yield config.Mesh(data=count // tensor // fsdp, fsdp=fsdp, tensor=tensor)
            fsdp *= 2


def _peaks(room: fit.Room, saved: float, shape: config.Mesh, sampling: config.Mesh,
           mesh: config.Mesh) -> dict[str, float]:
    """Bytes at the peak of update and rollout with one slot a device; `saved` is what a token
    leaves for the backward pass at the planned mesh."""
    held, plan = room.held, room.plan
    kept = (shape.fsdp * shape.tensor) / (mesh.fsdp * mesh.tensor)
    laid = (sampling.fsdp * sampling.tensor) / (mesh.fsdp * mesh.tensor)
    tensor, gathered = sampling.tensor / mesh.tensor, plan.cfg.rollout.gather
    state = kept * held.always
    part = dataclasses.replace(room.part, slots=1, tensor=mesh.tensor, parts=mesh.data * mesh.fsdp,
                               kept=1 / (mesh.fsdp * mesh.tensor))
    # With "full" a token leaves the stream, which is whole everywhere.
    saved *= 1.0 if plan.spec.remat == "full" else max(1.0, shape.tensor / mesh.tensor)
    temporary = memory.accumulate_temporary(
        plan.spec, part, head_chunk=estimate.head_chunk(plan), saved=saved)
    slots = plan.cfg.rollout.slots[-1] / room.parts
    # A pool is split as slots are: over data and fsdp, and heads over tensor.
    pool = held.parked * (sampling.data * sampling.fsdp * tensor) / (mesh.data * mesh.fsdp)
    caches = tensor * (held.prompt_cache + held.sample_cache) / slots + pool
    prompts = dataclasses.replace(part, prompt=plan.cfg.prompts.buckets[-1], rows=0)
    running = memory.prefill_temporary(plan.spec, prompts) + memory.prompt_cache(plan.spec, prompts)
    weights = (tensor if gathered else laid) * held.weights  # twice while they are made
    merged = kept * held.merged
    return {"update": state + kept * held.gradients + sum(temporary.values()),
            "rollout": state + merged + weights + max(weights, caches + running)}
