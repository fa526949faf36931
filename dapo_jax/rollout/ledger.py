"""On the host: what was asked of the sampler, and the samples that grow of it by chunks."""

import dataclasses

import numpy as np

from dapo_jax import types


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Groups in admission order, and a row for each of their samples. `write` fills in the rows;
    the arrays are the ledger's own."""

    samples: types.Samples
    plan: types.Plan  # i32[n] each, with budget and first
    start: np.ndarray  # i32[n] the group's first row
    missing: np.ndarray  # i32[n] samples of the group that have not ended

    def __len__(self) -> int:
        return len(self.start)

    @property
    def first(self) -> np.ndarray:
        """i32[n] number of each group's first sample in its visit."""
        return _given(self.plan.first)

    @property
    def budget(self) -> np.ndarray:
        """i32[n] new tokens allowed to each sample of a group."""
        return _given(self.plan.budget)


def _given(column: np.ndarray | None) -> np.ndarray:
    if column is None:
        raise ValueError("a plan of the ledger has both budget and first")
    return column


def new(width: int) -> Ledger:
    """Nothing asked; samples are `width` tokens wide."""
    none = np.zeros(0, np.int32)
    return Ledger(types.no_samples(width), types.Plan(*(none,) * 6), none, none)


def budgets(
    plan: types.Plan, table: types.PromptTable, *, limit: int, longest: int, max_context: int
) -> np.ndarray:
    """i32[n] new tokens allowed to each sample of each group, within `limit` and the context (0: no
    limit); ValueError names a group whose prompt or budget does not fit."""
    budget = np.full(len(plan.size), limit) if plan.budget is None else plan.budget
    length = np.array([len(table.tokens[i]) for i in plan.prompt], np.int32)
    for group, prompt, size, asked in zip(plan.group, plan.prompt, length, budget, strict=True):
        if size > longest:
            raise ValueError(f"group {group}: prompt {prompt} has {size} tokens, more than the "
                             f"{longest} of the largest of config.prompts.buckets")
        if not 1 <= asked <= limit:
            raise ValueError(f"group {group}: a budget of {asked} tokens; it must be from 1 to "
                             f"config.rollout.max_new_tokens = {limit}")
        if max_context and size >= max_context:
            raise ValueError(f"group {group}: prompt {prompt} has {size} tokens and leaves none of "
                             f"config.rollout.max_context = {max_context}")
    room = max_context - length if max_context else budget
    return np.minimum(budget, room).astype(np.int32)


def add(ledger: Ledger, plan: types.Plan, *, step: int) -> Ledger:
    """The ledger with the plan's groups at its end; budget and first are given."""
    count, width = int(plan.size.sum()), ledger.samples.tokens.shape[1]
    group = np.repeat(np.arange(len(plan.size)), plan.size)
    start = (np.cumsum(plan.size) - plan.size).astype(np.int32)
    blank = {name: np.zeros((count, *column.shape[1:]), column.dtype)
             for name, column in vars(ledger.samples).items()}
    asked = types.Samples(**blank | {
        "group": plan.group[group], "prompt": plan.prompt[group], "visit": plan.visit[group],
        "sample": (_given(plan.first)[group] + np.arange(count) - start[group]).astype(np.int32),
        "born": np.full(count, step, np.int32)})
    assert asked.tokens.shape == (count, width)
    join = lambda old, more: np.concatenate([old, more])  # noqa: E731
    return Ledger(types.concatenate(ledger.samples, asked),
                  types.Plan(*map(join, vars(ledger.plan).values(), vars(plan).values())),
                  join(ledger.start, start + len(ledger.samples)),
                  join(ledger.missing, plan.size.copy()))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Tokens of a chunk in the order of its steps, and of slots within one."""

    row: np.ndarray  # i32[n] of the ledger's samples
    group: np.ndarray  # i32[n] place in the ledger
    slot: np.ndarray  # i32[n]
    column: np.ndarray  # i32[n] of the chunk
    position: np.ndarray  # i32[n]
    stopped: np.ndarray  # bool[n] a stop token


def fill(
    ledger: Ledger, chunk: types.Chunk, seats: np.ndarray, *, stop_ids: tuple[int, ...]
) -> Drawn:
    """Fill in what a chunk drew; `seats` i32[S] is the group (its place in the ledger) of each
    slot."""
    steps = int(chunk.steps)
    column, slot, row = np.nonzero(chunk.sample[:steps] >= 0)
    at = column, slot, row
    group, position, token = seats[slot], chunk.position[at], chunk.token[at]
    place = ledger.start[group] + chunk.sample[at] - ledger.first[group]
    samples = ledger.samples
    samples.tokens[place, position] = token
    samples.logprobs[place, position] = chunk.logprob[at]
    samples.loss_mask[place, position] = True
    np.maximum.at(samples.length, place, position + 1)
    stopped = np.isin(token, stop_ids)
    samples.stopped[place[stopped]] = True
    return Drawn(place, group, slot, column, position, stopped)


def write(
    ledger: Ledger, chunk: types.Chunk, seats: np.ndarray, *, stop_ids: tuple[int, ...]
) -> np.ndarray:
    """`fill` where a sample is over with its first stop token or at its budget. Returns the places
    of the groups that are complete with it, ascending."""
    drawn = fill(ledger, chunk, seats, stop_ids=stop_ids)
    over = drawn.stopped | (drawn.position + 1 >= ledger.budget[drawn.group])
    return complete(ledger, drawn.group[over])


def complete(ledger: Ledger, ended: np.ndarray) -> np.ndarray:
    """Count samples that are over, by their groups; the groups that are complete with them."""
    np.subtract.at(ledger.missing, ended, 1)
    touched = np.unique(ended)
    return touched[ledger.missing[touched] == 0]


def rows(ledger: Ledger, groups: np.ndarray) -> types.Samples:
    """The samples of groups, by place in the ledger: a copy."""
    numbers = [np.arange(start, start + size) for start, size
               in zip(ledger.start[groups], ledger.plan.size[groups], strict=True)]
    return ledger.samples.take(np.concatenate(numbers or [np.zeros(0, np.intp)]))
