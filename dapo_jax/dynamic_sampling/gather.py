"""A step half way: which groups were asked for, what came back, which are finished.

`plan` names what to sample next, `observe` takes in what came back, `close` ends what is left.
They are free functions that change nothing, for a controller that samples in rounds and for one
that samples without pause.
"""

import dataclasses

import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import budget, choice, history, narrow
from dapo_jax.dynamic_sampling import filter as filters


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a step samples without rounds; see stream.py."""

    lag: int  # chunks after the one that finished a group until its rewards count
    in_flight: str  # "finish" or "drop" what is not complete when the batch is


@dataclasses.dataclass(frozen=True)
class CollectSettings:
    """What a step asks for."""

    groups: int  # of a batch
    samples_per_prompt: int
    filter_enabled: bool
    filter: config.Filter
    dynamic: config.DynamicSampling
    seed: int
    epochs: int  # 0: endless
    stream: Streaming | None = None  # None: in rounds


@dataclasses.dataclass(frozen=True)
class Entries:
    """One entry per prompt asked, in admission order, which is that of the group's number."""

    prompt: np.ndarray  # i32[m]
    visit: np.ndarray  # i32[m]
    group: np.ndarray  # i32[m] ascending
    rate: np.ndarray  # f64[m] pass rate as known before this visit
    drawn: np.ndarray  # i32[m] samples asked for so far
    pending: np.ndarray  # i32[m] samples to ask for next
    waiting: np.ndarray  # bool[m] asked for and not all back
    done: np.ndarray  # bool[m] its budget is used or was ended
    dropped: np.ndarray  # bool[m] abandoned, or accepted behind one that was
    kind: np.ndarray  # i8[m] of filters, by the samples so far
    successes: np.ndarray  # i32[m] valid samples of reward >= history.SUCCESS
    trials: np.ndarray  # i32[m] valid samples
    tokens: np.ndarray  # i64[m]


@dataclasses.dataclass(frozen=True)
class Progress:
    """A step half way. `pool` and `open` hold rows without tokens; see narrow.py."""

    state: types.ControllerState
    step: int
    sources: tuple[types.Samples, ...]  # all rows: carried, then in the order of their coming
    pool: types.Samples  # carried, then accepted groups that are done
    open: types.Samples  # of groups that are not done
    entries: Entries
    rewards: np.ndarray  # f32[*] raw, of the valid samples
    samples: int
    rounds: int
    skipped: int  # turns that prompts lost by their history


def start(state: types.ControllerState, pool: types.Samples, *, step: int) -> Progress:
    """Before the first request; `pool` holds the carried groups."""
    none, rows = np.zeros(0, np.int32), narrow.without_tokens(pool, first=0)
    return Progress(state=state, step=step, sources=(pool,), pool=rows, open=rows.take(none),
                    entries=_entries(none, visit=none, group=none, rate=none, drawn=none),
                    rewards=none.astype(np.float32), samples=0, rounds=0, skipped=0)


def accepted(progress: Progress, size: CollectSettings) -> np.ndarray:
    """bool[m]: groups that are, or by their samples so far will be, trained on."""
    kind = progress.entries.kind
    return kind == filters.INFORMATIVE if size.filter_enabled else kind != filters.INVALID


def ready(progress: Progress) -> np.ndarray:
    """bool[m]: groups whose next stage may be asked for."""
    return (progress.entries.pending > 0) & ~progress.entries.waiting


def hoped(progress: Progress, size: CollectSettings) -> float:
    """Expected number of groups, not accepted so far, that a next stage will make so.

    The pass rate known before the visit counts as two samples beside the visit's own.
    """
    entries = progress.entries
    rate = (entries.successes + 2 * entries.rate) / (entries.trials + 2)
    same = np.where(entries.successes > 0, rate, 1 - rate) ** entries.pending
    return float(np.sum((1 - same)[~entries.done & ~accepted(progress, size)]))


def plan(progress: Progress, count: int, *, size: CollectSettings) -> tuple[Progress, types.Plan]:
    """The next stage of every group that is ready, then `count` new prompts.

    Fewer new ones where the epochs end or the table is used up. The groups wait from now on.
    """
    progress = _admit(progress, count, size)
    entries = progress.entries
    place = np.flatnonzero(ready(progress))
    requests = types.Plan(
        prompt=entries.prompt[place], visit=entries.visit[place], group=entries.group[place],
        size=entries.pending[place], first=entries.drawn[place])
    entries = _changed(entries, place, waiting=True, pending=0,
                       drawn=entries.drawn[place] + entries.pending[place])
    return dataclasses.replace(progress, entries=entries), requests


def observe(progress: Progress, samples: types.Samples, *, groups: np.ndarray,
            size: CollectSettings) -> Progress:
    """Take in the scored samples of `groups`, i32[g], all that was asked for of each so far.

    Rows may stand in any order; a group may have none. Raises ValueError for a row of another
    group.
    """
    unknown = np.setdiff1d(samples.group, groups)
    if len(unknown):
        raise ValueError(f"controller.collect: `sample` returned group {unknown[0]}, which is not "
                         "in its plan; give each row the group of its plan entry")
    sources = (*progress.sources, samples)
    samples = narrow.without_tokens(samples, first=sum(map(len, progress.sources)))
    place = np.searchsorted(progress.entries.group, np.sort(groups))
    mine = np.isin(progress.open.group, groups)
    rows = in_order(types.concatenate(progress.open.take(mine), samples))
    entries = _judged(progress.entries, place, rows, size)
    fresh = np.searchsorted(entries.group, samples.group)
    tokens = np.bincount(fresh, weights=samples.length, minlength=len(entries.group))
    entries = dataclasses.replace(entries, tokens=entries.tokens + tokens.astype(np.int64))
    ordered = in_order(samples)
    progress = dataclasses.replace(
        progress, entries=entries, sources=sources,
        open=types.concatenate(progress.open.take(~mine), rows),
        rewards=np.concatenate([progress.rewards, ordered.reward[ordered.valid]]),
        samples=progress.samples + len(samples))
    return _settle(progress, size)


def close(progress: Progress, *, size: CollectSettings) -> Progress:
    """End every group that is not waited for, with the samples it has."""
    entries = progress.entries
    ended = np.flatnonzero(~entries.done & ~entries.waiting)
    return _settle(dataclasses.replace(
        progress, entries=_changed(entries, ended, pending=0, done=True)), size)


def decided(entries: Entries) -> int:
    """Groups in admission order before the first that is not done: they are as long as any."""
    return int(np.argmin(np.append(entries.done, False)))


def drop(progress: Progress, *, size: CollectSettings) -> Progress:
    """Abandon all groups that are not done, and the accepted ones admitted behind the first of
    them: those that are done before an older group are short ones."""
    entries = progress.entries
    behind = np.arange(len(entries.group)) >= decided(entries)
    dropped = behind & (~entries.done | accepted(progress, size))
    gone = np.isin(progress.pool.group, entries.group[dropped])
    return dataclasses.replace(
        progress, entries=dataclasses.replace(entries, dropped=dropped),
        pool=progress.pool.take(~gone), open=progress.open.take(np.zeros(0, np.int32)))


def spent(progress: Progress, partial: types.Samples) -> Progress:
    """Count the tokens of samples that were cut off and never taken in."""
    entries = progress.entries
    place = np.searchsorted(entries.group, partial.group)
    tokens = np.bincount(place, weights=partial.length, minlength=len(entries.group))
    return dataclasses.replace(progress, entries=dataclasses.replace(
        entries, tokens=entries.tokens + tokens.astype(np.int64)))


def in_order(samples: types.Samples) -> types.Samples:
    """Rows by admission, then sample number."""
    return samples.take(np.lexsort([samples.sample, samples.group]))


def _admit(progress: Progress, count: int, size: CollectSettings) -> Progress:
    state, cfg = progress.state, size.dynamic
    chosen = choice.take(state.order, choice.Request(
        count=count, avoid=progress.entries.prompt, history=state.history, step=progress.step,
        seed=size.seed, epochs=size.epochs), cfg)
    prompt, none = chosen.prompt, np.zeros(len(chosen.prompt), np.int32)
    rate = history.mean(state.history, cfg.history)[prompt]
    first = budget.more(cfg.budget, none, none, drawn=none, mixed=none.astype(bool), rate=rate,
                        size=size.samples_per_prompt)
    new = _entries(
        prompt, visit=state.history.visits[prompt], rate=rate, drawn=none, pending=first,
        group=state.next_group + np.arange(len(prompt), dtype=np.int32))
    state = dataclasses.replace(
        state, order=chosen.order, next_group=np.asarray(state.next_group + len(prompt), np.int32),
        history=history.visit(state.history, prompt, step=progress.step))
    return dataclasses.replace(progress, state=state, entries=_joined(progress.entries, new),
                               skipped=progress.skipped + chosen.skipped)


def _judged(entries: Entries, place: np.ndarray, rows: types.Samples,
            size: CollectSettings) -> Entries:
    """`place` classified and counted by all its `rows`; the next stage, or done."""
    alone = not size.filter_enabled and size.samples_per_prompt == 1
    classes = filters.informative(rows, size.filter, least=1 if alone else 2)
    kind = np.full(len(entries.group), filters.INVALID, np.int8)
    kind[np.searchsorted(entries.group, classes.group)] = classes.kind
    where = np.searchsorted(entries.group, rows.group[rows.valid])
    right = rows.reward[rows.valid] >= history.SUCCESS
    trials, successes = (np.bincount(chosen, minlength=len(kind))[place].astype(np.int32)
                         for chosen in (where, where[right]))
    now = budget.more(
        size.dynamic.budget, successes, trials, drawn=entries.drawn[place],
        mixed=kind[place] == filters.INFORMATIVE, rate=entries.rate[place],
        size=size.samples_per_prompt)
    return _changed(entries, place, kind=kind[place], trials=trials, successes=successes,
                    pending=now, waiting=False, done=now == 0)


def _settle(progress: Progress, size: CollectSettings) -> Progress:
    """Rows of groups that are done leave `open`: the accepted ones for the pool."""
    entries = progress.entries
    done, taken = (entries.group[which] for which in (
        entries.done, entries.done & accepted(progress, size)))
    rows = progress.open
    return dataclasses.replace(
        progress, pool=buffer.add(progress.pool, filters.keep(rows, taken)),
        open=rows.take(~np.isin(rows.group, done)))


def _entries(prompt: np.ndarray, **columns: np.ndarray) -> Entries:
    """Entries of `prompt`, with `columns`; the others 0."""
    dtypes = {"rate": np.float64, "waiting": bool, "done": bool, "dropped": bool,
              "kind": np.int8, "tokens": np.int64}
    zeros = np.zeros(len(prompt), np.int32)
    return Entries(**{
        field.name: {"prompt": prompt, **columns}.get(field.name, zeros).astype(
            dtypes.get(field.name, np.int32))
        for field in dataclasses.fields(Entries)})


def _joined(first: Entries, second: Entries) -> Entries:
    return Entries(**{name: np.concatenate([values, getattr(second, name)])
                      for name, values in vars(first).items()})


def _changed(entries: Entries, place: np.ndarray, **columns: object) -> Entries:
    """A copy with other values at `place`, i64[k]."""
    changed = {name: getattr(entries, name).copy() for name in columns}
    for name, values in columns.items():
        changed[name][place] = values
    return dataclasses.replace(entries, **changed)
