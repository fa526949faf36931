"""From a plan to samples: generate calls of few compiled shapes, all dispatched at once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax import types
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import decode, draw
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Engine:
    """Compiled generate programs by (S, P), and what they were compiled for."""

    sampling: draw.Sampling
    rows: int  # R
    slots: tuple[int, ...]  # the ladder of S
    buckets: tuple[int, ...]  # the ladder of P
    max_context: int  # tokens of prompt and completion; 0: no limit
    programs: Mapping[tuple[int, int], Callable]
    batch_sharding: jax.sharding.Sharding


def compile_engine(
    spec: ModelSpec, sampling: draw.Sampling, mesh: Mesh, *, rows: int, slots: Sequence[int],
    buckets: Sequence[int], max_context: int = 0,
) -> Engine:
    """Compile every (S, P) shape that a run can ask for."""
    sharding = mesh_lib.batch_sharding(mesh)
    params = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    params = mesh_lib.structs(params, mesh_lib.param_shardings(mesh, spec))
    root = mesh_lib.structs(jax.eval_shape(lambda: jax.random.key(0)), mesh_lib.replicated(mesh))
    run = jax.jit(functools.partial(decode.generate, spec, sampling, rows),
                  out_shardings=sharding)
    programs = {
        (count, width): mesh_lib.compiled(
            run, mesh, params, prompt_structs(mesh, count, width), root)
        for count in slots for width in buckets}
    return Engine(sampling, rows, tuple(slots), tuple(buckets), max_context, programs, sharding)


def prompt_structs(mesh: Mesh, slots: int, width: int) -> types.Prompts:
    """Shapes of one generate call's input."""
    def make(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh_lib.batch_sharding(mesh))
    return types.Prompts(make((slots, width)), *(make((slots,)) for _ in range(5)))


def calls(count: int, ladder: Sequence[int]) -> list[int]:
    """Sizes of the generate calls that serve `count` slots: the largest, then one that covers."""
    full, rest = divmod(count, ladder[-1])
    last = [next(size for size in ladder if size >= rest)] if rest else []
    return [ladder[-1]] * full + last


def run(
    engine: Engine, params: types.Tree, plan: types.Plan, *, table: types.PromptTable,
    root: jax.Array, step: int,
) -> types.Samples:
    """Sample every group of the plan; rows come back in plan order, not yet scored.

    A group larger than R takes several slots. `root` lies on the device.
    """
    group_of_slot, first_sample = _slots(plan, engine.rows)
    parts, start = [], 0
    for size in calls(len(group_of_slot), engine.slots):
        chosen = slice(start, start + size)
        prompts = _prompts(engine, plan, group_of_slot[chosen], first_sample[chosen], size, table)
        width = prompts.tokens.shape[1]
        prompts = mesh_lib.put(prompts, engine.batch_sharding)
        parts.append(engine.programs[size, width](params, prompts, root))
        start += size
    rollouts = jax.tree.map(lambda *leaves: np.concatenate(leaves), *mesh_lib.fetch(parts))
    return _samples(rollouts, plan, group_of_slot, first_sample, engine.rows, step)


def _slots(plan: types.Plan, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """For each slot, its place in the plan and the number of its first sample."""
    need = -(-plan.size // rows)
    place = np.repeat(np.arange(len(plan.size)), need)
    first = np.concatenate([np.arange(count) * rows for count in need] or [np.zeros(0)])
    return place, first.astype(np.int32)


def _prompts(
    engine: Engine, plan: types.Plan, place: np.ndarray, first: np.ndarray, size: int,
    table: types.PromptTable,
) -> types.Prompts:
    ids = plan.prompt[place]
    longest = max(len(table.tokens[i]) for i in ids)
    width = next(bucket for bucket in engine.buckets if bucket >= longest)
    tokens = np.zeros((size, width), np.int32)
    numbers = np.zeros((4, size), np.int32)
    for slot, prompt in enumerate(ids):
        tokens[slot, :len(table.tokens[prompt])] = table.tokens[prompt]
    used = slice(0, len(ids))
    numbers[0, used] = [len(table.tokens[i]) for i in ids]
    numbers[1, used], numbers[2, used], numbers[3, used] = ids, plan.visit[place], first
    budget = np.full(size, engine.sampling.max_new_tokens, np.int32)
    if engine.max_context:
        budget = np.minimum(budget, engine.max_context - numbers[0])
    return types.Prompts(tokens, *numbers, budget)


def _samples(
    rollouts: types.Rollout, plan: types.Plan, place: np.ndarray, first: np.ndarray, rows: int,
    step: int,
) -> types.Samples:
    number = first[:, None] + np.arange(rows, dtype=np.int32)
    wanted = number < plan.size[place][:, None]
    flat = jax.tree.map(lambda leaf: leaf[:len(place)][wanted], rollouts)
    where = np.broadcast_to(place[:, None], wanted.shape)[wanted]
    count, width = flat.tokens.shape
    zeros = np.zeros(count, np.float32)
    return types.Samples(
        tokens=flat.tokens, loss_mask=np.arange(width) < flat.length[:, None],
        logprobs=flat.logprobs, length=flat.length, stopped=flat.stopped, reward=zeros,
        shaped=zeros, valid=np.zeros(count, bool), group=plan.group[where],
        prompt=plan.prompt[where], visit=plan.visit[where], sample=number[wanted],
        born=np.full(count, step, np.int32))
