"""Bytes on each device, by kind: exact ones from shapes and where they lie, and what programs need
beside their arguments as counted from the model's shape, for devices whose compiler is not here."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dapo_jax import types
from dapo_jax.learner import update
from dapo_jax.models.spec import ModelSpec
from dapo_jax.planning import programs
from dapo_jax.rollout import programs as rollout_programs

FLOAT = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on each device of what outlives a program."""

    parameters: int
    optimizer: int
    gradients: int  # summed over microbatches
    reference: int  # parameters of the reference model
    weights: int  # the sampler's copy of the parameters
    prompt_cache: int
    sample_cache: int
    parked: int  # contexts of samples that wait for a reply

    @property
    def in_update(self) -> int:
        """While an update runs."""
        return self.parameters + self.optimizer + self.gradients + self.reference

    @property
    def in_rollout(self) -> int:
        """While samples are drawn."""
        return (self.parameters + self.optimizer + self.reference + self.weights
                + self.prompt_cache + self.sample_cache + self.parked)


def on_device(tree: types.Tree) -> int:
    """Bytes that shapes with shardings take on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(tree))


def held(update_programs: update.Programs, rollout: rollout_programs.Programs) -> Held:
    """What the programs' arguments take, on each device."""
    state, sums = update_programs.apply.arguments
    weights, slots, *_ = programs.only(rollout.decode).arguments
    reference = [scorer.arguments[0] for scorer in update_programs.reference.values()]
    return Held(
        on_device(state.params), on_device(state.opt_state), on_device(sums[0]),
        on_device(reference[0]) if reference else 0, on_device(weights), on_device(slots.cache),
        on_device(slots.own),
        on_device(rollout.parking.store.arguments[0]) if rollout.parking else 0)


@dataclasses.dataclass(frozen=True)
class Split:
    """The part of a microbatch, and of the model, that one device has."""

    slots: int
    prompt: int  # tokens of a slot's prompts
    rows: int
    width: int  # tokens of a row
    tensor: int  # parts that heads, feed-forward part and vocabulary are split into
    kept: float  # of each parameter, the share that this device keeps

    @property
    def tokens(self) -> int:
        """All tokens that the device runs."""
        return self.slots * (self.prompt + self.rows * self.width)


def split(accumulate: programs.Program) -> Split:
    """What one device does of a microbatch."""
    batch, shape = accumulate.arguments[2], dict(accumulate.mesh.shape)
    parts = shape["data"] * shape["fsdp"]
    slots, rows, width = batch.tokens.shape
    return Split(max(1, slots // parts), batch.prompt_tokens.shape[1], rows, width,
                 shape["tensor"], 1 / (shape["fsdp"] * shape["tensor"]))


def accumulate_temporary(spec: ModelSpec, part: Split, *, head_chunk: int) -> dict[str, float]:
    """Bytes that the gradient of a microbatch needs beside its arguments, by what for.

    A model of what XLA does: the peak lies either in the head's backward pass, when only the
    blocks' inputs are held, or in that of a block, when the gradients are too.
    """
    size = jnp.dtype(spec.compute_dtype).itemsize
    block, table = _block_numbers(spec), spec.vocab * spec.d_model
    kept = part.kept * (spec.layers * block + (1 if spec.tied else 2) * table)
    saved = spec.layers * part.tokens * _saved_numbers(spec, part) * size
    cast = kept * size if spec.param_dtype != spec.compute_dtype else 0
    whole = block / part.tensor
    layer = (FLOAT * kept  # gradients of all blocks
             + whole * (size + FLOAT)  # this block's weights and their gradient
             + part.tokens * _working_numbers(spec, part) * size + _scores(spec, part))
    logits = min(head_chunk, part.slots * part.rows * part.width) * spec.vocab / part.tensor
    head = (table / part.tensor * (size + FLOAT) + LOGITS * logits * FLOAT
            + 2 * part.slots * part.rows * part.width * spec.d_model * size)
    return {"inputs of blocks": saved, "parameters in the compute dtype": cast,
            "the larger of a block's pass and the head's": max(layer, head)}


# How often the numbers of one token, or of a chunk's logits, are there at once: set by two figures
# of the TPU compiler for Qwen2.5-32B, rows of 22k to 25k tokens, with 64 and with 7 layers
# (tests/test_planning_tpu.py has more).
LOGITS, FEED_FORWARD, STREAM = 3.0, 3.5, 6.0


def _block_numbers(spec: ModelSpec) -> int:
    heads = 2 * (spec.heads + spec.kv_heads) * spec.head_size
    return spec.d_model * (heads + 3 * spec.ff)


def _saved_numbers(spec: ModelSpec, part: Split) -> float:
    """Kept of a token for the backward pass of a block."""
    products = (2 * spec.d_model + (spec.heads + 2 * spec.kv_heads) * spec.head_size / part.tensor
                + 2 * spec.ff / part.tensor)
    return {"full": spec.d_model, "dots": spec.d_model + products,
            "none": 3 * spec.d_model + 2 * products}[spec.remat]


def _working_numbers(spec: ModelSpec, part: Split) -> float:
    """Of a token, while its block is differentiated."""
    heads = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_size / part.tensor
    return FEED_FORWARD * spec.ff / part.tensor + STREAM * spec.d_model + 2 * heads


def _scores(spec: ModelSpec, part: Split) -> float:
    """Scores of attention and their gradient, where an implementation makes them: a block of
    queries at a time, or of all queries."""
    keys = part.prompt + part.width
    if spec.attention == "cudnn":  # its mask, a byte each
        return part.slots * part.rows * part.width * keys
    if spec.attention == "tpu":
        return 0.0
    queries = min(512, part.width) if spec.attention == "blocked" else part.width
    return 2 * FLOAT * part.slots * part.rows * spec.heads / part.tensor * queries * keys


def prefill_temporary(spec: ModelSpec, part: Split, *, admitted: int) -> float:
    """Bytes that running prompts once needs on a device, its result among them."""
    size, tokens = jnp.dtype(spec.compute_dtype).itemsize, admitted * part.prompt
    caches = 2 * spec.layers * spec.kv_heads / part.tensor * spec.head_size * tokens * size
    block = _block_numbers(spec) / part.tensor * 2 * size
    return (2 * caches + block + tokens * (2 * spec.ff / part.tensor + 4 * spec.d_model) * size)


def decode_temporary(spec: ModelSpec, *, rows: int, tensor: int, keys: int) -> float:
    """Bytes that drawing one token of each of a device's rows needs: its logits, and scores of one
    layer."""
    return FLOAT * rows * (LOGITS * spec.vocab / tensor + 2 * spec.heads / tensor * keys)
