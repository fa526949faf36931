"""What the policy makes of a completion: the mean of its hidden states at the completion's tokens,
by which a selection tells completions apart (buffer/select.py)."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import config, types
from dapo_jax.learner import packing
from dapo_jax.models import lora, transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled `mean_states` by (P, T), and the microbatches that they take."""

    mean: Mapping[tuple[int, int], Callable]
    pack: packing.PackShape
    size: int  # D
    batch_sharding: jax.sharding.Sharding


def pack_shape(
    pack: packing.PackShape, *, prompts: tuple[int, ...], completions: tuple[int, ...], rows: int
) -> packing.PackShape:
    """Slots of `rows` rows in buckets of `prompts` and `completions` tokens: as many as have the
    tokens of the update's largest microbatch, which is of the shape `pack`."""
    prompt, completion = pack.prompt_buckets[-1], pack.completion_buckets[-1]
    held = packing.slots_of(pack, prompt, completion) * (prompt + pack.rows * completion)
    least = pack.parts * (prompts[-1] + rows * completions[-1])
    return packing.PackShape(pack.slots, rows, prompts, completions, tokens=max(held, least),
                             parts=pack.parts)


def mean_states(
    params: types.Tree, prompt_tokens: jax.Array, prompt_length: jax.Array, tokens: jax.Array,
    mask: jax.Array, base: types.Tree | None = None, *, spec: ModelSpec, adapter: config.Lora,
) -> jax.Array:
    """f32[S, R, D]: the mean of each row's last hidden states over its tokens of mask 1.

    Prompts i32[S, P] of `prompt_length` i32[S] tokens, rows i32[S, R, T] that continue them, mask
    f32[S, R, T]; a row without a token has zeros. With a base model `params` are its adapter.
    """
    whole = params if base is None else lora.attach(base, params, adapter)
    _, prompt = transformer.prefill(spec, whole, prompt_tokens, prompt_length)
    states = transformer.extend(spec, whole, tokens, prompt).astype(jnp.float32)
    share = mask / jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
    return jnp.einsum("srt,srtd->srd", share, states, precision=jax.lax.Precision.HIGHEST)


def compile_programs(
    spec: ModelSpec, adapter: config.Lora, mesh: mesh_lib.AnyMesh, *, pack: packing.PackShape,
    build: mesh_lib.Build = mesh_lib.compiled,
) -> Programs:
    """Compile a program for every shape of `pack`; `build` as in update.compile_programs."""
    split = mesh_lib.batch_sharding(mesh)
    params = mesh_lib.trained_structs(mesh, spec, adapter)
    base = (mesh_lib.model_structs(mesh, spec),) if adapter.rank else ()
    # Whole on every device: each process selects from all samples.
    mean = jax.jit(lambda *args: mean_states(*args, spec=spec, adapter=adapter),
                   out_shardings=mesh_lib.replicated(mesh))

    def one(prompt: int, width: int) -> Callable:
        slots = packing.slots_of(pack, prompt, width)
        rows = (slots, pack.rows, width)
        inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=split) for shape, dtype in (
            ((slots, prompt), jnp.int32), ((slots,), jnp.int32), (rows, jnp.int32),
            (rows, jnp.float32))]
        return build(mean, mesh, params, *inputs, *base)
    programs = {shape: one(*shape) for shape in packing.shapes(pack)}
    return Programs(programs, pack, spec.d_model, split)


def of(
    programs: Programs, params: types.Tree, samples: types.Samples, *, table: types.PromptTable,
    base: types.Tree | None = None,
) -> np.ndarray:
    """Mean hidden states f32[n, D] over the loss tokens of each sample, zeros where it has none.

    `params` are the policy's, or its adapter's where there is a `base`.
    """
    number = np.arange(len(samples), dtype=np.float32)  # exact up to 2^24 samples
    batches = packing.pack(
        samples, prompts=table, advantages=number, weights=samples.loss_mask.astype(np.float32),
        fresh=np.zeros(len(samples), bool), shape=programs.pack)
    more = () if base is None else (base,)
    found = []
    for batch in batches:
        shape = batch.prompt_tokens.shape[1], batch.tokens.shape[2]
        inputs = (batch.prompt_tokens, batch.prompt_length, batch.tokens, batch.weights)
        found.append(programs.mean[shape](
            params, *mesh_lib.put(inputs, programs.batch_sharding), *more))
    result = np.zeros((len(samples), programs.size), np.float32)
    for batch, means in zip(batches, mesh_lib.fetch(found), strict=True):
        held = batch.weights.any(axis=2)
        result[batch.advantages[held][:, 0].astype(int)] = means[held]
    return result
