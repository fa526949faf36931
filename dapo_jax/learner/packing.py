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
from dapo_jax.learner import rows


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


MOST_STACKED = 32  # of a run's updates
STACK_TOKENS = 1 << 17  # of a stack at most: 3 MB
Columns = tuple[np.ndarray, ...]  # a value a token [n, T], in the order of TrainBatch


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


def pack(samples: types.Samples, *, prompts: types.PromptTable, advantages: np.ndarray,
         weights: np.ndarray, fresh: np.ndarray, shape: PackShape) -> list[types.TrainBatch]:
    """Microbatches with numpy leaves that hold every token of weight above 0 exactly once.

    `advantages` f32[n] or f32[n, T], `weights` f32[n, T], `fresh` bool[n]. Rows without a weight
    are left out, and tokens after a row's last weight do not count as content, since no earlier
    token sees them; with no weight at all the list is empty. Slots of like length share a
    microbatch, which takes the smallest buckets that hold it; packed ones have one shape. Raises
    ValueError where the largest do not.
    """
    content = _content(weights)
    columns = (samples.tokens, samples.logprobs, _wide(advantages, weights), weights,
               _wide(fresh.astype(np.float32), weights))
    build = _pack_rows if shape.packed else _pack_slots
    return build(samples, columns, content, prompts=prompts, shape=shape)


def _pack_slots(samples: types.Samples, columns: Columns, content: np.ndarray, *,
                prompts: types.PromptTable, shape: PackShape) -> list[types.TrainBatch]:
    slots = _slots(samples.group, np.flatnonzero(content), rows=shape.rows)
    prompt_of = np.array([samples.prompt[slot[0]] for slot in slots], np.int32)
    _check_prompts(samples, slots, prompts=prompts)
    prompt_buckets = _buckets(np.array([len(prompts.tokens[p]) for p in prompt_of], np.int64),
                              shape.prompt_buckets, what="prompt")
    completion_buckets = _buckets(np.array([content[slot].max() for slot in slots], np.int64),
                                  shape.completion_buckets, what="completion")
    order = np.lexsort((prompt_buckets, completion_buckets))  # stable: ties keep admission order
    batches = []
    for chosen in _microbatches(order, prompt_buckets, completion_buckets, shape=shape):
        width, prompt_width = completion_buckets[chosen].max(), prompt_buckets[chosen].max()
        count = slots_of(shape, prompt_width, width)
        batches.append(types.TrainBatch(
            *_prompts([prompts.tokens[p] for p in prompt_of[chosen]], slots=count,
                      width=prompt_width),
            *_rows([slots[i] for i in chosen], columns, size=(count, shape.rows, width))))
    return batches


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


def _pack_rows(samples: types.Samples, columns: Columns, content: np.ndarray, *,
               prompts: types.PromptTable, shape: PackShape) -> list[types.TrainBatch]:
    kept = np.flatnonzero(content)
    _check_prompts(samples, _slots(samples.group, kept, rows=len(samples)), prompts=prompts)
    length = np.array([len(prompts.tokens[p]) for p in samples.prompt], np.int64)
    prompt_width, width = shape.prompt_buckets[-1], shape.completion_buckets[-1]
    _buckets(length[kept], (prompt_width,), what="prompt")
    _buckets(content, (width,), what="completion")
    layout = rows.place(samples.group, content, length, rows=shape.rows, width=width,
                        prompt_width=prompt_width)
    count = slots_of(shape, prompt_width, width)
    batches = []
    for start in range(0, int(layout.slot.max(initial=-1)) + 1, count):
        here = (layout.slot >= start) & (layout.slot < start + count)
        part = rows.Layout(*(getattr(layout, field.name)[here]
                             for field in dataclasses.fields(layout)))
        part = dataclasses.replace(part, slot=part.slot - start)
        batches.append(_packed(part, samples, columns, content, prompts=prompts,
                               size=(count, shape.rows, width, prompt_width)))
    return batches


def _packed(layout: rows.Layout, samples: types.Samples, columns: Columns, content: np.ndarray, *,
            prompts: types.PromptTable, size: tuple[int, int, int, int]) -> types.TrainBatch:
    slots, row_count, width, prompt_width = size
    tokens = np.zeros((slots, prompt_width), np.int32)
    segment = np.full((slots, prompt_width), -1, np.int32)
    used, number = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    after = np.full((slots, row_count, width), -1, np.int32)
    targets: list[types.Leaf] = [np.zeros(after.shape, column.dtype) for column in columns]
    ends: dict[tuple, int] = {}  # (slot, group, copy) -> place of its prompt's last token
    for sample, slot, row, start, copy in zip(
            layout.sample, layout.slot, layout.row, layout.start, layout.copy):
        prompt = prompts.tokens[samples.prompt[sample]]
        key = (slot, samples.group[sample], copy)
        if key not in ends:
            place = slice(used[slot], used[slot] + len(prompt))
            tokens[slot, place], segment[slot, place] = prompt, number[slot]
            used[slot] += len(prompt)
            number[slot] += 1
            ends[key] = used[slot] - 1
        end = start + content[sample]
        after[slot, row, start:end] = ends[key]
        for target, column in zip(targets, columns):
            target[slot, row, start:end] = column[sample, :content[sample]]
    batch = types.TrainBatch(tokens, np.maximum(used, 1), *targets)
    return dataclasses.replace(batch, packed=types.Packed(segment, after))


def padding(batches: Sequence[types.TrainBatch]) -> float:
    """The share of an update's positions, prompts' and rows', that hold nothing: `update/padding`.
    NaN if there are none."""
    held = positions = 0
    for batch in batches:
        used = batch.weights > 0
        rows_held = _content(used.reshape(-1, used.shape[-1]))
        held += batch.prompt_length[used.any(axis=(1, 2))].sum() + rows_held.sum()
        positions += batch.prompt_tokens.size + batch.tokens.size
    return 1 - held / positions if positions else math.nan


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
        written = _pad([prompts.demonstration_masks[i] for i in ids], written.shape).astype(bool)
    return types.Samples(
        tokens=_pad(rows, (len(rows), width)), loss_mask=written,
        logprobs=np.zeros((len(rows), width), np.float32), length=length, stopped=yes,
        reward=zeros.astype(np.float32), shaped=zeros.astype(np.float32), valid=yes, group=count,
        prompt=np.asarray(ids, np.int32), visit=zeros, sample=zeros,
        born=np.full(len(rows), step, np.int32))


def overlong_mask(samples: types.Samples, mask_overlong: bool) -> np.ndarray:
    """The loss mask bool[n, T] without invalid samples and, if asked, without truncated ones."""
    kept = samples.valid & samples.stopped if mask_overlong else samples.valid
    return samples.loss_mask & kept[:, None]


def _content(weights: np.ndarray) -> np.ndarray:
    """Tokens of each row up to its last weight above 0."""
    used = weights > 0
    last = weights.shape[1] - np.argmax(used[:, ::-1], axis=1)
    return np.where(used.any(axis=1), last, 0)


def _slots(group: np.ndarray, kept: np.ndarray, *, rows: int) -> list[np.ndarray]:
    """Row indices of each slot, by first appearance of the group; large groups take several."""
    members: dict[int, list[int]] = {}
    for row in kept:
        members.setdefault(int(group[row]), []).append(row)
    return [np.array(of_group[start:start + rows]) for of_group in members.values()
            for start in range(0, len(of_group), rows)]


def _check_prompts(samples: types.Samples, slots: list[np.ndarray], *,
                   prompts: types.PromptTable) -> None:
    for slot in slots:
        used = set(samples.prompt[slot].tolist())
        if len(used) > 1:
            raise ValueError(f"group {samples.group[slot[0]]} holds samples of several prompts: "
                             f"{sorted(used)}")
        if len(prompts.tokens[used.pop()]) == 0:
            raise ValueError(f"prompt {samples.prompt[slot[0]]} has no tokens")


def _buckets(lengths: np.ndarray, buckets: tuple[int, ...], *, what: str) -> np.ndarray:
    """The smallest bucket that holds each length."""
    if len(lengths) and lengths.max() > buckets[-1]:
        raise ValueError(f"a {what} of {lengths.max()} tokens is longer than the last of the "
                         f"{what} buckets {buckets}")
    return np.asarray(buckets)[np.searchsorted(buckets, lengths)]


def _prompts(rows: list[np.ndarray], *, slots: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[S, P] and lengths i32[S]; an idle slot has one token of id 0."""
    length = np.ones(slots, np.int32)
    length[:len(rows)] = [len(row) for row in rows]
    return _pad(rows, (slots, width)), length


def _rows(slots: list[np.ndarray], columns: Columns, *, size: tuple[int, int, int]
          ) -> list[types.Leaf]:
    """Each column [n, T] as [S, R, width], 0 where there is no row or the table is narrower."""
    source = np.full(size[:2], -1)
    for index, slot in enumerate(slots):
        source[index, :len(slot)] = slot
    real = source >= 0
    result = []
    for column in columns:
        target = np.zeros(size, column.dtype)
        filled = min(size[2], column.shape[1])
        target[real, :filled] = column[source[real], :filled]
        result.append(target)
    return result


def _wide(column: np.ndarray, like: np.ndarray) -> np.ndarray:
    return column if column.ndim == 2 else np.broadcast_to(column[:, None], like.shape)


def _pad(rows: list[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    result = np.zeros(size, np.int32)
    for target, row in zip(result, rows):
        target[:len(row)] = row
    return result
