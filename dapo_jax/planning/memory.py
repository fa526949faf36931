"""Bytes on each device, by kind: exact ones from shapes and where they lie, and what programs need
beside their arguments as counted from the model's shape, for devices whose compiler is not here."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.models import attention, cost
from dapo_jax.models.spec import ModelSpec
from dapo_jax.planning import programs, sources
from dapo_jax.runtime import mesh as mesh_lib

FLOAT = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on each device of what outlives a program."""

    parameters: int  # that are trained
    optimizer: int
    gradients: int  # summed over microbatches
    reference: int  # parameters of the reference model, if no others are
    weights: int  # the sampler's copy of the parameters
    prompt_cache: int
    sample_cache: int
    parked: int = 0  # contexts of samples that wait for a reply
    base: int = 0  # parameters under an adapter
    merged: int = 0  # blocks with the adapter in them, while samples are drawn
    moved: int = 0  # parameters on the sampler's mesh, where it is another

    @property
    def always(self) -> int:
        """While anything runs."""
        return self.parameters + self.optimizer + self.reference + self.base

    @property
    def in_update(self) -> int:
        """While an update runs."""
        return self.always + self.gradients

    @property
    def caches(self) -> int:
        """Of samples that are drawn or wait."""
        return self.prompt_cache + self.sample_cache + self.parked

    @property
    def in_rollout(self) -> int:
        """While samples are drawn."""
        return self.always + self.merged + self.moved + self.weights + self.caches


def on_device(tree: types.Tree) -> int:
    """Bytes that shapes with shardings take on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(tree))


def held(planned: programs.Plan, made: sources.Sources) -> Held:
    """What the programs' arguments take, on each device."""
    learner = made.update(slots=0)
    state, sums = programs.given(learner.apply)
    weights, slots, *_ = sources.one(made, "decode").arguments
    reference = [programs.given(scorer)[0] for scorer in learner.reference.values()]
    base = made.merge.arguments[0] if made.merge else {}
    shared = base and not planned.phase.reference  # the base is the reference itself
    pool = sources.one(made, "store").arguments[0] if "store" in sources.names(made) else ()
    return Held(
        on_device(state.params), on_device(state.opt_state), on_device(sums[0]),
        on_device(reference[0]) if reference and not shared else 0, on_device(weights),
        on_device(slots.cache), on_device(slots.own), on_device(pool), on_device(base),
        on_device(base and base["blocks"]),
        on_device(sources.one(made, "prefill").arguments[0]) if made.move else 0)


@dataclasses.dataclass(frozen=True)
class Split:
    """The part of a microbatch, and of the model, that one device has."""

    slots: int
    prompt: int  # tokens of a slot's prompts
    rows: int
    width: int  # tokens of a row
    tensor: int  # parts that heads, feed-forward part and vocabulary are split into
    parts: int  # that slots are split over
    kept: float  # of each parameter, the share that this device keeps

    @property
    def tokens(self) -> int:
        """All tokens that the device runs."""
        return self.slots * (self.prompt + self.rows * self.width)


def split(accumulate: programs.Program) -> Split:
    """What one device does of a microbatch."""
    batch = programs.batch_of(accumulate)
    return of_rows(accumulate.mesh, batch.prompt_tokens.shape[-1], batch.tokens.shape[-3:])


def of_rows(mesh: mesh_lib.AnyMesh, prompt: int, tokens: tuple[int, ...]) -> Split:
    """What one device does of slots, rows and tokens of a row after prompts of so many tokens."""
    parts, (slots, rows, width) = mesh_lib.batch_parts(mesh), tokens
    return Split(max(1, slots // parts), prompt, rows, width, mesh.shape["tensor"], parts,
                 1 / (mesh.shape["fsdp"] * mesh.shape["tensor"]))


def saved_of_token(saved: Sequence[jax.core.ShapedArray], spec: ModelSpec, part: Split) -> float:
    """Bytes that one token leaves on its device for the backward passes of all blocks, from the
    arrays that the scan over the blocks leaves; heads and feed-forward part are split."""
    total = 0.0
    for array in saved:
        if array.ndim < 4 or array.shape[1] != part.slots * part.parts:
            continue  # matrices in the compute dtype, which are there already, and constants
        split_axis = set(array.shape[3:]) & {spec.heads, spec.kv_heads, spec.ff}
        total += array.size * array.dtype.itemsize / (part.tensor if split_axis else 1)
    return total / (part.parts * part.tokens)


def accumulate_temporary(
    spec: ModelSpec, part: Split, *, head_chunk: int, saved: float
) -> dict[str, float]:
    """Bytes that the gradient of a microbatch needs beside its arguments where that is most, by
    what for; `saved` is what a token leaves of all blocks (`saved_of_token`).

    What XLA holds, read from the schedules that it made for TPU: all of the run, what blocks save
    and their matrices in the compute dtype; from the head's backward pass on, the gradient of its
    whole table; from the blocks' backward pass on, that of all blocks. On top comes the largest of
    a chunk of logits, a block's own backward pass, and the table's gradient summed over devices.
    """
    size = jnp.dtype(spec.compute_dtype).itemsize
    table = spec.vocab * spec.d_model / part.tensor
    blocks = part.kept * spec.layers * _block_numbers(spec)
    answers = part.slots * part.rows * part.width
    logits = FLOAT * min(head_chunk, answers) * spec.vocab / part.tensor
    held = {"kept of blocks": saved * part.tokens,
            "blocks in the compute dtype":
                blocks * size if spec.param_dtype != spec.compute_dtype else 0.0,
            "gradient of the head": FLOAT * table}
    summed = FLOAT * table if part.parts > 1 else 0.0
    head = table * size + 2 * logits + 2 * answers * spec.d_model * size
    later = {"gradients of blocks": FLOAT * blocks,
             "the larger of a block's pass and the head's exchange": max(
                 _block_pass(spec, part), summed)}
    return held | ({"the head's pass": head} if head > sum(later.values()) else later)


def score_temporary(spec: ModelSpec, part: Split, *, head_chunk: int) -> float:
    """Bytes that log-probs of a microbatch need: no gradient, so no block keeps anything."""
    size = jnp.dtype(spec.compute_dtype).itemsize
    answers = part.slots * part.rows * part.width
    head = (spec.vocab * spec.d_model * size + FLOAT * min(head_chunk, answers) * spec.vocab
            ) / part.tensor
    return _cast(spec, part) + max(_block_pass(spec, part), head) + _stream(spec, part)


def states_temporary(spec: ModelSpec, part: Split) -> float:
    """Bytes that mean hidden states of completions need: prompts are run first, and their keys and
    values kept."""
    return _cast(spec, part) + _block_pass(spec, part) + _stream(spec, part) + prompt_cache(
        spec, part)


def extend_temporary(spec: ModelSpec, part: Split, *, contexts: float) -> float:
    """Bytes that appending tokens to a device's `contexts` (bytes of them) needs: the contexts
    taken out and with the new keys in, and a pass of the tokens, which are rows without prompts."""
    return _cast(spec, part) + _block_pass(spec, part) + _stream(spec, part) + 2 * contexts


def _stream(spec: ModelSpec, part: Split) -> float:
    """Bytes of what goes from block to block, twice."""
    return 2 * part.tokens * spec.d_model * jnp.dtype(spec.compute_dtype).itemsize


def _cast(spec: ModelSpec, part: Split) -> float:
    """Bytes of the blocks' parameters in the compute dtype, where that is another."""
    blocks = part.kept * spec.layers * _block_numbers(spec)
    size = jnp.dtype(spec.compute_dtype).itemsize
    return blocks * size if spec.param_dtype != spec.compute_dtype else 0.0


def _block_numbers(spec: ModelSpec) -> int:
    heads = 2 * (spec.heads + spec.kv_heads) * spec.head_size
    return spec.d_model * (heads + 3 * spec.ff)


def _block_pass(spec: ModelSpec, part: Split) -> float:
    """Bytes while one block is differentiated: its gathered matrices; of each token the gate, the
    other product and one gradient of such, and of the stream's width what goes in, its norm, the
    queries and the mix of attention, and gradients of two; and what attention makes beside."""
    size = jnp.dtype(spec.compute_dtype).itemsize
    of_token = 3 * spec.ff / part.tensor + 6 * spec.d_model
    return (_block_numbers(spec) / part.tensor * size + part.tokens * of_token * size
            + _attention(spec, part))


def _attention(spec: ModelSpec, part: Split) -> float:
    """Bytes of what an implementation makes of all queries, or of a block of them, at once."""
    keys, heads = part.prompt + part.width, spec.heads / part.tensor
    rows = part.slots * part.rows
    if spec.attention == "cudnn":  # the mask as numbers to add, for all heads
        return rows * part.width * keys * jnp.dtype(spec.compute_dtype).itemsize
    if spec.attention == "tpu":  # the sums of the softmax, a row of 128 lanes for each query
        return FLOAT * heads * part.tokens * attention.LANES
    blocked = spec.attention == "blocked"
    queries = min(attention.BLOCK, part.width) if blocked else part.width
    return SCORES[blocked] * FLOAT * rows * heads * queries * keys


# Arrays of scores at once in a gradient of the plain form: the scores, their exponentials, what is
# multiplied with the values and two gradients; in blocks, whose gradients are taken inside a loop,
# some of these once more. Coarse: programs for CPU had 3 to 5, in blocks 5 to 8 (for TPU 8).
SCORES = {False: 5, True: 7}


def prefill_temporary(spec: ModelSpec, part: Split) -> float:
    """Bytes that running prompts (no rows) needs on a device beside its arguments and its result:
    the parameters in the compute dtype, a block's matrices, a block's products and the caches once
    more, since they are laid out anew."""
    size = jnp.dtype(spec.compute_dtype).itemsize
    block = _block_numbers(spec) / part.tensor * size
    of_token = (2 * spec.ff + 4 * spec.heads * spec.head_size) / part.tensor + 4 * spec.d_model
    return _cast(spec, part) + block + part.tokens * of_token * size + prompt_cache(spec, part)


def prompt_cache(spec: ModelSpec, part: Split) -> float:
    """Bytes of the keys and values of a device's prompts."""
    tensor = part.tensor if spec.kv_heads % part.tensor == 0 else 1
    size = jnp.dtype(spec.compute_dtype).itemsize
    return cost.cache_bytes(spec, part.slots * part.prompt, bytes_per_number=size) / tensor


def decode_temporary(spec: ModelSpec, *, rows: float, tensor: int, keys: int) -> float:
    """Bytes that drawing one token of each of a device's rows needs: three arrays of its logits
    (scaled, their exponentials, sums), and scores of one layer and their exponentials."""
    return FLOAT * rows / tensor * (3 * spec.vocab + 2 * spec.heads * keys)
