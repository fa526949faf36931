"""Every pytree that crosses a file border.

Axis letters: n rows of a host table, S slots, R rows of a slot, P prompt tokens, T new tokens,
Q prompts in the table, W steps in the predictor's window, N layers, K kv heads, E head size,
Z parked contexts.
Host fields are numpy, device fields are jax arrays. Completion arrays are right-padded; their
lengths are carried, never found again from token values, because a pad id may also be a real one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.types_fields import Leaf, Tree
from dapo_jax.types_sampler import (
    Chunk,
    Parked,
    PromptCache,
    Prompts,
    Resumed,
    SampleCache,
    Slots,
)

__all__ = ["Chunk", "Leaf", "Parked", "PromptCache", "Prompts", "Resumed", "SampleCache", "Slots",
           "Tree"]

# Beside it stands the decorator of a dataclass, by which type checkers know one.
_pytree = jax.tree_util.register_dataclass


# ---------------------------------------------------------------------------------- host: prompts


@dataclasses.dataclass(frozen=True)
class PromptTable:
    """Prompts of one split, tokenised once. Built at start, never checkpointed."""

    tokens: Sequence[np.ndarray]  # i32[*] each
    records: Sequence[Mapping[str, Any]]
    demonstrations: Sequence[np.ndarray]  # i32[*] each, ending in a stop id; () if there are none
    demonstration_masks: Sequence[np.ndarray] = ()  # bool[*] each: what is learned; () if all is

    def __len__(self) -> int:
        return len(self.tokens)


@_pytree
@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """Where an endless, reshuffled pass over Q prompts stands."""

    order: np.ndarray  # i32[Q] a permutation
    epoch: np.ndarray  # i32[]
    cursor: np.ndarray  # i32[] next position of `order`


@_pytree
@dataclasses.dataclass(frozen=True)
class Plan:
    """Groups of one round in admission order."""

    prompt: np.ndarray  # i32[n] index into the table
    visit: np.ndarray  # i32[n] how often the prompt was sampled before
    group: np.ndarray  # i32[n] unique in the run
    size: np.ndarray  # i32[n] samples to draw
    budget: np.ndarray | None = None  # i32[n] new tokens allowed to each sample; None: as many as T
    first: np.ndarray | None = None  # i32[n] number of the first sample in its visit; None: 0


@_pytree
@dataclasses.dataclass(frozen=True)
class Samples:
    """Completions as flat rows; group sizes may differ."""

    tokens: np.ndarray  # i32[n, T]
    loss_mask: np.ndarray  # bool[n, T] true where the model chose the token
    logprobs: np.ndarray  # f32[n, T] of the sampler, temperature inside; 0 outside loss_mask
    length: np.ndarray  # i32[n] tokens of the completion, its stop token included
    stopped: np.ndarray  # bool[n] ended by itself; false means truncated
    reward: np.ndarray  # f32[n] raw task reward; 0 where not valid
    shaped: np.ndarray  # f32[n] reward plus shaping: what advantages are made of
    valid: np.ndarray  # bool[n] false: its reward or environment failed
    group: np.ndarray  # i32[n]
    prompt: np.ndarray  # i32[n]
    visit: np.ndarray  # i32[n]
    sample: np.ndarray  # i32[n] number within the visit
    born: np.ndarray  # i32[n] step whose parameters sampled it

    def __len__(self) -> int:
        return len(self.group)

    def take(self, rows: np.ndarray) -> "Samples":
        """Rows by index or boolean mask; every column stays aligned. All rows in their order are
        the samples themselves: a step's tokens may be gigabytes."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(rows))):
            return self
        return jax.tree.map(lambda column: column[rows], self)


@_pytree
@dataclasses.dataclass(frozen=True)
class Episodes(Samples):
    """Samples of several turns, the runs of `loss_mask`, whose turns are credited apart."""

    turn_rewards: np.ndarray  # f32[n, K] shaped; they sum to `shaped`. 0 beyond a sample's turns


def no_samples(width: int, *, turns: int = 0) -> Samples:
    """Zero rows of completions `width` tokens wide; Episodes if `turns` are credited apart."""
    dtypes = {"tokens": np.int32, "loss_mask": bool, "logprobs": np.float32, "stopped": bool,
              "reward": np.float32, "shaped": np.float32, "valid": bool}
    wide = ("tokens", "loss_mask", "logprobs")
    none = Samples(**{
        field.name: np.zeros((0, width) if field.name in wide else (0,),
                             dtypes.get(field.name, np.int32))
        for field in dataclasses.fields(Samples)
    })
    return Episodes(**vars(none), turn_rewards=np.zeros((0, turns), np.float32)) if turns else none


def concatenate(first: Samples, second: Samples) -> Samples:
    """Rows of `first`, then of `second`; both of one width. With nothing added it is no copy."""
    if not (len(first) and len(second)):
        return first if len(first) else second
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second)


@_pytree
@dataclasses.dataclass(frozen=True)
class Selected:
    """Samples of which some are learned from."""

    samples: Samples  # those that the statistics of advantages count
    chosen: np.ndarray  # bool[n] learned from

    def take(self, rows: np.ndarray) -> "Selected":
        """Rows by index or boolean mask."""
        return Selected(self.samples.take(rows), self.chosen[rows])


# --------------------------------------------------------------------------------- host: controller


@_pytree
@dataclasses.dataclass(frozen=True)
class PredictorState:
    """The last W steps of prompts sampled and groups kept, oldest first; unused entries lead."""

    asked: np.ndarray  # i32[W]
    kept: np.ndarray  # i32[W]
    count: np.ndarray  # i32[] entries in use, <= W
    round_cost: np.ndarray  # f32[] of one more round; 0: not known
    prompt_cost: np.ndarray  # f32[] of one more prompt, in the same unit; 0: not known


@_pytree
@dataclasses.dataclass(frozen=True)
class HistoryState:
    """What is known of each prompt."""

    visits: np.ndarray  # i32[Q] times sampled
    successes: np.ndarray  # f32[Q] decayed; a success: a valid sample of task reward >= 0.5
    trials: np.ndarray  # f32[Q] decayed: valid samples
    streak: np.ndarray  # i32[Q] visits in a row without a difference in reward
    last: np.ndarray  # i32[Q] step of the last visit; -1: none


@_pytree
@dataclasses.dataclass(frozen=True)
class ControllerState:
    """All that decides which prompts are sampled next."""

    predictor: PredictorState
    history: HistoryState
    order: EpochOrder
    next_group: np.ndarray  # i32[]
    empty_steps: np.ndarray  # i32[] steps in a row that ended without a batch


# --------------------------------------------------------------------------------------- the update


@_pytree
@dataclasses.dataclass(frozen=True)
class Packed:
    """Where tokens stand in a microbatch whose slots hold several prompts each, and whose rows a
    sample of each of them at most."""

    segment: Leaf  # i32[S, P] number of the token's prompt within its slot; -1 on padding
    after: Leaf  # i32[S, R, T] place in P of the last token of the prompt that the token's
    # sample continues; -1 on padding


@_pytree
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One microbatch: S slots of R rows, each row continuing its slot's prompt."""

    prompt_tokens: Leaf  # i32[S, P] right-padded
    prompt_length: Leaf  # i32[S] >= 1, also in idle slots; of all prompts if packed
    tokens: Leaf  # i32[S, R, T]
    logprobs: Leaf  # f32[S, R, T] of the sampler
    advantages: Leaf  # f32[S, R, T]
    weights: Leaf  # f32[S, R, T] 0 on padding, masked tokens and idle rows
    fresh: Leaf  # f32[S, R, T] 1 where the parameters that sampled are those trained first
    packed: Packed | None = None  # None: a slot has one prompt, a row one sample
    old: Leaf | None = None  # f32[S, R, T] of the step's first parameters, if recomputed
    reference: Leaf | None = None  # f32[S, R, T] of the reference model, if there is one


@_pytree
@dataclasses.dataclass(frozen=True)
class Stack:
    """Microbatches of one shape that are run one after another by one program."""

    batch: TrainBatch  # each field [M, ...]; from `count` on nothing is run
    count: Leaf  # i32[]

    def __getitem__(self, index: jax.Array | int) -> TrainBatch:
        """One of them."""
        return jax.tree.map(lambda leaf: leaf[index], self.batch)


@_pytree
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What the optimizer changes."""

    params: Tree
    opt_state: Tree
    updates: jax.Array  # i32[]


@_pytree
@dataclasses.dataclass(frozen=True)
class RunState:
    """The whole checkpoint."""

    train: TrainState
    controller: ControllerState
    demonstrations: EpochOrder
    buffer: Samples  # carried groups
    step: np.ndarray  # i32[] steps completed
    replay: Selected | None = None  # groups learned from that may come again; None: not configured
    base: np.ndarray | None = None  # u32[leaves] marks the model under an adapter; None: no adapter
