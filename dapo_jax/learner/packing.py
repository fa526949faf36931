"""Packing: flat samples into microbatches of a few fixed shapes.

A slot is one prompt with up to R rows that continue it, or, packed (rows.py), several prompts and
rows of several samples. Advantages and weights come ready made, so no choice in this file changes
the loss: only how much of a microbatch is padding.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dapo_jax import config, types
from dapo_jax.learner import filling, rows
from dapo_jax.learner import weights as weighting


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The shapes an update compiles for; buckets ascend and count tokens."""

    slots: int
    rows: int
    prompt_buckets: tuple[int, ...]
    completion_buckets: tuple[int, ...]
    tokens: int = 0  # of a microbatch, padding included: as many slots as they hold; 0: `slots`
    parts: int = 1  # that slots are split into: what their number is a multiple of
    packed: bool = False
    stack: int = 1  # most microbatches that one call of a program runs; see stacked
    own: tuple[int, ...] | None = None  # parts that this process's devices hold; None: all


MOST_STACKED = 32  # of a run's updates
STACK_TOKENS = 1 << 17  # of a stack at most: 3 MB


def shapes(shape: PackShape) -> list[tuple[int, int]]:
    """Every (prompt, completion) length that `pack` can produce."""
    return list(itertools.product(shape.prompt_buckets, shape.completion_buckets))


def slots_of(shape: PackShape, prompt: int, completion: int) -> int:
    """Slots of a microbatch of these lengths; ConfigError where the tokens hold too few."""
    if not shape.tokens:
        return shape.slots
    size = prompt + shape.rows * completion
    slots = shape.tokens // size // shape.parts * shape.parts
    if not slots:
        raise config.ConfigError(
            f"microbatch_tokens = {shape.tokens} is too few for {shape.parts} slots (one a device) "
            f"of {prompt} prompt tokens and {shape.rows} rows of {completion}; raise it to at "
            f"least {shape.parts * size}")
    return slots


def stacked(shape: PackShape, prompt: int, completion: int) -> int:
    """Microbatches of these lengths in a stack: so many that starting a program costs little, and
    so few that their bytes count for nothing; long ones are not stacked."""
    tokens = slots_of(shape, prompt, completion) * (prompt + shape.rows * completion)
    return max(1, min(shape.stack, STACK_TOKENS // tokens))


def places(group: np.ndarray, prompt: np.ndarray, content: np.ndarray, *,
           prompts: types.PromptTable, shape: PackShape) -> list[rows.Place]:
    """Where samples of `content` i[n] tokens stand: an entry a microbatch.

    `group` and `prompt` i32[n]; samples without content stand nowhere. Slots of like length share a
    microbatch, which takes the smallest buckets that hold it; packed ones have one shape. Raises
    ValueError where the largest do not.
    """
    build = _place_rows if shape.packed else _place_slots
    return build(group, prompt, content, prompts=prompts, shape=shape)


def pack(samples: types.Samples, *, prompts: types.PromptTable, advantages: np.ndarray,
         weights: np.ndarray, fresh: np.ndarray, shape: PackShape) -> list[types.TrainBatch]:
    """Microbatches with numpy leaves that hold every token of weight above 0 exactly once; see
    `filled` for the arguments, and for what there is of the slots that are not `shape.own`.

    Rows without a weight are left out, and tokens after a row's last weight do not count as
    content, since no earlier token sees them; with no weight at all the list is empty. Raises
    ValueError as `places` does.
    """
    found = places(samples.group, samples.prompt, content(weights), prompts=prompts, shape=shape)
    return filled(found, samples, np.arange(len(samples)), prompts=prompts, advantages=advantages,
                  weights=weights, fresh=fresh, shape=shape)


def filled(found: Sequence[rows.Place], samples: types.Samples, chosen: np.ndarray, *,
           prompts: types.PromptTable, advantages: np.ndarray, weights: np.ndarray,
           fresh: np.ndarray, shape: PackShape) -> list[types.TrainBatch]:
    """The microbatches of these places, which number the rows `chosen` i[m] of the samples.

    `advantages` f32[n] or f32[n, T] and `fresh` bool[n] are of all samples; `weights` are of the
    chosen, f32[m, T] or, of their loss tokens, f32[m]. Slots that are not `shape.own` are as idle
    ones: other processes fill them, and what stands there is not copied.
    """
    found, held = _own(found, shape)
    some, weights = samples.take(chosen[held]), _taken(weights, held)
    if weights.ndim == 1:
        weights = weighting.spread(some.loss_mask, weights)
    wide = (_wide(column[chosen[held]], weights) for column in (
        advantages, fresh.astype(np.float32)))
    columns = (some.tokens, some.logprobs, next(wide), weights, next(wide))
    tokens = [prompts.tokens[one] for one in some.prompt]
    fill = filling.packed if shape.packed else filling.slots
    return [fill(place, columns, tokens) for place in found]


def _own(found: Sequence[rows.Place], shape: PackShape) -> tuple[list[rows.Place], np.ndarray]:
    """What stands in this process's slots, and the samples that do, ascending; there samples are
    numbered among these."""
    if shape.own is not None:
        found = [_only(place, np.repeat(np.isin(np.arange(shape.parts), shape.own),
                                        place.slots // shape.parts)) for place in found]
    held = np.unique(np.concatenate([np.zeros(0, np.int64),
                                     *(place.layout.sample for place in found)]))
    return [dataclasses.replace(place, layout=dataclasses.replace(
        place.layout, sample=np.searchsorted(held, place.layout.sample))) for place in found], held


def _only(place: rows.Place, own: np.ndarray) -> rows.Place:
    return dataclasses.replace(place, layout=place.layout.take(own[place.layout.slot]), own=own)


def _taken(column: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Ascending rows of a column; all of them are the column itself."""
    return column if len(chosen) == len(column) else column[chosen]


def _place_slots(group: np.ndarray, prompt: np.ndarray, content: np.ndarray, *,
                 prompts: types.PromptTable, shape: PackShape) -> list[rows.Place]:
    slots = _slots(group, np.flatnonzero(content), rows=shape.rows)
    _check_prompts(group, prompt, slots, prompts=prompts)
    length = np.array([len(prompts.tokens[prompt[slot[0]]]) for slot in slots], np.int64)
    prompt_buckets = _buckets(length, shape.prompt_buckets, what="prompt")
    completion_buckets = _buckets(np.array([content[slot].max() for slot in slots], np.int64),
                                  shape.completion_buckets, what="completion")
    order = np.lexsort((prompt_buckets, completion_buckets))  # stable: ties keep admission order
    found = []
    for chosen in _microbatches(order, prompt_buckets, completion_buckets, shape=shape):
        width, prompt_width = completion_buckets[chosen].max(), prompt_buckets[chosen].max()
        layout = rows.in_slots([slots[i] for i in chosen], content)
        found.append(rows.Place(
            layout, slots_of(shape, prompt_width, width), shape.rows, int(prompt_width), int(width),
            held=int(length[chosen].sum() + layout.tokens.sum())))
    return found


def _microbatches(order: np.ndarray, prompt_buckets: np.ndarray, completion_buckets: np.ndarray, *,
                  shape: PackShape) -> Iterator[np.ndarray]:
    """Slots that share a microbatch: of those left, as many as one of their shape holds."""
    while len(order):
        most = zip(np.maximum.accumulate(prompt_buckets[order]),
                   np.maximum.accumulate(completion_buckets[order]))
        count = 0
        for prompt, completion in most:
            if count >= slots_of(shape, prompt, completion):
                break
            count += 1
        yield order[:count]
        order = order[count:]


def _place_rows(group: np.ndarray, prompt: np.ndarray, content: np.ndarray, *,
                prompts: types.PromptTable, shape: PackShape) -> list[rows.Place]:
    kept = np.flatnonzero(content)
    _check_prompts(group, prompt, _slots(group, kept, rows=len(group)), prompts=prompts)
    length = np.array([len(prompts.tokens[p]) for p in prompt], np.int64)
    prompt_width, width = shape.prompt_buckets[-1], shape.completion_buckets[-1]
    _buckets(length[kept], (prompt_width,), what="prompt")
    _buckets(content, (width,), what="completion")
    layout = rows.place(group, content, length, rows=shape.rows, width=width,
                        prompt_width=prompt_width)
    count = slots_of(shape, prompt_width, width)
    found = []
    for start in range(0, int(layout.slot.max(initial=-1)) + 1, count):
        part = layout.take((layout.slot >= start) & (layout.slot < start + count))
        part = dataclasses.replace(part, slot=part.slot - start)
        copies = np.unique([part.slot, part.segment], axis=1, return_index=True)[1]
        found.append(rows.Place(
            part, count, shape.rows, prompt_width, width,
            held=int(length[part.sample[copies]].sum() + part.tokens.sum())))
    return found


def padding(found: Sequence[rows.Place]) -> float:
    """The share of these microbatches' positions, prompts' and rows', that hold nothing:
    `update/padding`. NaN if there are none."""
    positions = sum(place.slots * (place.prompt + place.rows * place.completion) for place in found)
    return 1 - sum(place.held for place in found) / positions if positions else math.nan


def split_updates(samples: types.Samples, updates: int) -> list[np.ndarray]:
    """Row indices of each optimizer update: whole groups in order of appearance.

    Each gets the same number of groups, the last what is left; where there are too few groups
    there are fewer updates, never an empty one.
    """
    ids, first = np.unique(samples.group, return_index=True)
    ids = ids[np.argsort(first)]
    per_update = max(1, -(-len(ids) // updates))
    return [np.flatnonzero(np.isin(samples.group, ids[start:start + per_update]))
            for start in range(0, len(ids), per_update)]


def from_demonstrations(prompts: types.PromptTable, ids: np.ndarray, *, width: int, step: int
                        ) -> types.Samples:
    """The demonstrations of the prompts `ids` i32[n] as samples of `width` tokens.

    Rewards and log-probs are 0, groups are numbered from 0. Raises ConfigError where a
    demonstration is missing or does not fit.
    """
    if not prompts.demonstrations:
        raise config.ConfigError("this task has no demonstrations to learn from; set "
                                 "config.sft.steps to 0")
    rows = [prompts.demonstrations[i] for i in ids]
    for prompt, row in zip(ids, rows):
        if len(row) > width:
            raise config.ConfigError(
                f"prompt {prompt}: its demonstration has {len(row)} tokens, more than the {width} "
                "of config.rollout.max_new_tokens; raise that, or shorten the demonstration")
    length = np.array([len(row) for row in rows], np.int32)
    count = np.arange(len(rows), dtype=np.int32)
    zeros = np.zeros(len(rows), np.int32)
    yes = np.ones(len(rows), bool)
    written = np.arange(width) < length[:, None]
    if prompts.demonstration_masks:
        masks = [prompts.demonstration_masks[i] for i in ids]
        written = filling.padded(masks, written.shape).astype(bool)
    return types.Samples(
        tokens=filling.padded(rows, (len(rows), width)), loss_mask=written,
        logprobs=np.zeros((len(rows), width), np.float32), length=length, stopped=yes,
        reward=zeros.astype(np.float32), shaped=zeros.astype(np.float32), valid=yes, group=count,
        prompt=np.asarray(ids, np.int32), visit=zeros, sample=zeros,
        born=np.full(len(rows), step, np.int32))


def learned(samples: types.Samples, mask_overlong: bool) -> np.ndarray:
    """Which samples are in the loss, bool[n]: valid ones and, if asked, none that is truncated."""
    return samples.valid & samples.stopped if mask_overlong else samples.valid


def content(weights: np.ndarray) -> np.ndarray:
    """Tokens i[n] of each row up to its last weight above 0, or the last that a mask holds."""
    used = weights if weights.dtype == bool else weights > 0
    last = weights.shape[1] - np.argmax(used[:, ::-1], axis=1)
    return np.where(used.any(axis=1), last, 0)


def _slots(group: np.ndarray, kept: np.ndarray, *, rows: int) -> list[np.ndarray]:
    """Row indices of each slot, by first appearance of the group; large groups take several."""
    members: dict[int, list[int]] = {}
    for row in kept:
        members.setdefault(int(group[row]), []).append(row)
    return [np.array(of_group[start:start + rows]) for of_group in members.values()
            for start in range(0, len(of_group), rows)]


def _check_prompts(group: np.ndarray, prompt: np.ndarray, slots: list[np.ndarray], *,
                   prompts: types.PromptTable) -> None:
    for slot in slots:
        used = set(prompt[slot].tolist())
        if len(used) > 1:
            raise ValueError(f"group {group[slot[0]]} holds samples of several prompts: "
                             f"{sorted(used)}")
        if len(prompts.tokens[used.pop()]) == 0:
            raise ValueError(f"prompt {prompt[slot[0]]} has no tokens")


def _buckets(lengths: np.ndarray, buckets: tuple[int, ...], *, what: str) -> np.ndarray:
    """The smallest bucket that holds each length."""
    if len(lengths) and lengths.max() > buckets[-1]:
        raise ValueError(f"a {what} of {lengths.max()} tokens is longer than the last of the "
                         f"{what} buckets {buckets}")
    return np.asarray(buckets)[np.searchsorted(buckets, lengths)]


def _wide(column: np.ndarray, like: np.ndarray) -> np.ndarray:
    return column if column.ndim == 2 else np.broadcast_to(column[:, None], like.shape)
