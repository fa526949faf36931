"""Generate completions on device: one prefill per prompt, then a loop until all rows ended."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import head, transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.rollout import draw


class _Loop(NamedTuple):
    position: jax.Array  # i32[] of the newest token
    token: jax.Array  # i32[S, R] the newest
    live: jax.Array  # bool[S, R] goes on after it
    out: types.Rollout
    cache: types.SampleCache


def generate(
    spec: ModelSpec, sampling: draw.Sampling, rows: int, params: types.Tree,
    prompts: types.Prompts, root: jax.Array,
) -> types.Rollout:
    """Draw `rows` completions for each slot's prompt.

    `spec`, `sampling` and `rows` are static. The prompt's keys are computed and held once per
    slot. A row ends at a stop token (kept, `stopped`) or at its budget (not `stopped`); idle
    slots (length 0) come back with length 0. `root` is the run's key: see draw.row_keys.
    """
    hidden, prompt = transformer.prefill(spec, params, prompts.tokens, prompts.length)
    blocks = transformer.unstack(spec, params)
    keys = _keys(prompts, rows, root)
    budget = jnp.broadcast_to(jnp.where(prompts.length > 0, prompts.budget, 0)[:, None], keys.shape)

    def put(loop: _Loop, logits: jax.Array) -> _Loop:
        return _draw_into(loop, logits, keys, budget, sampling)

    def body(loop: _Loop) -> _Loop:
        state, cache = transformer.decode(spec, params, blocks, loop.token, prompt, loop.cache,
                                          loop.position)
        return put(loop._replace(cache=cache, position=loop.position + 1),
                   head.logits(params, state, softcap=spec.logit_softcap))

    start = _start(spec, sampling, prompts, rows, budget)
    logits = head.logits(params, hidden, softcap=spec.logit_softcap)
    first = put(start, jnp.broadcast_to(logits[:, None], (*keys.shape, spec.vocab)))
    return jax.lax.while_loop(lambda loop: loop.live.any(), body, first).out


def _keys(prompts: types.Prompts, rows: int, root: jax.Array) -> jax.Array:
    sample = prompts.sample[:, None] + jnp.arange(rows)
    prompt, visit = (jnp.broadcast_to(x[:, None], sample.shape)
                     for x in (prompts.prompt, prompts.visit))
    return draw.row_keys(root, prompt, visit, sample)


def _start(
    spec: ModelSpec, sampling: draw.Sampling, prompts: types.Prompts, rows: int, budget: jax.Array
) -> _Loop:
    shape = (prompts.tokens.shape[0], rows)
    zero = jnp.zeros(shape, jnp.int32)
    wide = jnp.zeros((*shape, sampling.max_new_tokens), jnp.int32)
    out = types.Rollout(tokens=wide, logprobs=wide.astype(jnp.float32), length=zero,
                        stopped=jnp.zeros(shape, bool))
    cache = transformer.empty_cache(spec, *shape, sampling.max_new_tokens)
    return _Loop(jnp.int32(0), zero, budget > 0, out, cache)


def _draw_into(
    loop: _Loop, logits: jax.Array, keys: jax.Array, budget: jax.Array, sampling: draw.Sampling
) -> _Loop:
    """Draw the token at `loop.position` of every live row and store it."""
    uniform = draw.uniforms(keys, loop.position)
    token, logprob = draw.draw(logits, uniform, sampling)
    token, logprob = jnp.where(loop.live, token, 0), jnp.where(loop.live, logprob, 0.0)
    ended = loop.live & jnp.isin(token, jnp.asarray(sampling.stop_ids, jnp.int32))
    length = loop.out.length + loop.live
    out = types.Rollout(
        tokens=_column(loop.out.tokens, token, loop.position),
        logprobs=_column(loop.out.logprobs, logprob, loop.position),
        length=length, stopped=loop.out.stopped | ended)
    return loop._replace(token=token, live=loop.live & ~ended & (length < budget), out=out)


def _column(array: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, values[..., None], index, axis=2)
