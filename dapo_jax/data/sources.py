"""Where prompts come from: the tasks by name, and data sets in files with every fault named."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.data import files, identity, origins, scan, selection, workers
from dapo_jax.envs import (
    arithmetic,
    base,
    columns,
    countdown,
    environments,
    math,
    multiple_choice,
    reasoning_gym,
)

LOG = logging.getLogger(__name__)
SPLITS = ("train", "eval")
Part = tuple[int, files.Chunk, scan.Scanned]  # number of the source, chunk, what is good in it


@dataclasses.dataclass(frozen=True)
class Selected:
    """Records that are used of files, to be read chunk by chunk."""

    jobs: tuple[tuple[files.Chunk, scan.Rules, np.ndarray], ...]  # i32[*] ascending places each
    order: np.ndarray  # i64[n] of the jobs' rows, one after the other: their order in the table

    def __len__(self) -> int:
        return len(self.order)


def load(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split`, "train" or "eval", of the configured task, and counts of what is missing.

    Each carries its "prompt_key". Counts: "missing" problems that do not exist, and rows of files
    that were left out, by reason.
    """
    _check_split(split)
    records, counts = task(cfg.task.name).build(cfg, split)
    if cfg.task.name in CONVERT:  # its rows have keys, and were filtered
        return records, counts
    records = [identity.keyed(record) for record in records]
    if split == "train" and cfg.task.pass_rates:
        keys = identity.numbers([bytes.fromhex(prompt_key(record)) for record in records])
        inside, more = selection.by_pass_rate(keys, cfg.task.pass_rates, cfg.task.pass_rate_range)
        records = [record for record, used in zip(records, inside) if used]
        counts = counts | more
        _check_some(len(records), counts)
    return records, counts


def _check_some(left: int, counts: dict[str, int]) -> None:
    if not left:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        raise config.ConfigError(f"no prompt is left to use; left out: {reasons}")


def task(name: str) -> base.Task:
    """The task of that name; ConfigError for an unknown one."""
    if name not in TASKS:
        raise config.ConfigError(f"config.task.name is {name!r}; there are: {', '.join(TASKS)}")
    return TASKS[name]


def prompt_key(record: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that name a record's prompt, as files of pass rates do."""
    return identity.prompt_key(record)


def from_files(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """The records of a split of files with the template applied, and counts of rows left out."""
    placed, counts = from_places(cfg, split)
    return [record for _, record in placed], counts


def from_places(cfg: config.Config, split: str
                ) -> tuple[list[tuple[str, base.Record]], dict[str, int]]:
    """As `from_files`, each record after its file and line or row."""
    selected, counts = select(cfg, split)
    rows = [(what, base.templated(record, cfg.task.template))
            for job in selected.jobs for what, record in scan.chosen(*job)]
    return [rows[at] for at in selected.order], counts


def select(cfg: config.Config, split: str) -> tuple[Selected, dict[str, int]]:
    """What is used of the files of a split, and counts of rows left out.

    The split's own files, or the training files with some prompts held out. Repeats, by prompt
    and answer, go first; then the split, the pass rates, the mixture and the limit. ConfigError
    names bad rows by file and line, unless config.task.bad_records is 'skip'.
    """
    _check_split(split)
    found, own = used(cfg.task, split)
    scanned = _scanned(found, tuple(origins.stamp(source.path) for source in found))
    counts = _counted(scanned, found, cfg.task.bad_records)
    rows = _rows(scanned)
    chosen = identity.first_of_each(rows.identity)
    counts["duplicates"] = len(rows.identity) - len(chosen)
    chosen, more = _of_split(cfg, split, own, rows, chosen, found)
    _check_some(len(chosen), counts | more)
    return _selected(scanned, found, chosen), counts | more


def used(task: config.Task, split: str) -> tuple[tuple[origins.Source, ...], bool]:
    """The files that a split is taken from, and whether held-out prompts have files of their own;
    ConfigError if no file is named."""
    train, held_out = (origins.configured(task, name, conversion(task)) for name in SPLITS)
    if split == "eval" and held_out:
        return held_out, True
    if not train:
        raise config.ConfigError("config.task.train_path is empty: name the training file")
    return train, bool(held_out)


def conversion(task: config.Task) -> str:
    """What makes records of files the task's own, "module:function" or nothing; what it refuses
    by ValueError is a bad row."""
    if task.reward and CONVERT[task.name] == CHECKED:
        return ""  # which answers are good is for the user's reward to say
    return CONVERT[task.name]


def _of_split(
    cfg: config.Config, split: str, own: bool, rows: selection.Rows, chosen: np.ndarray,
    found: Sequence[origins.Source],
) -> tuple[np.ndarray, dict[str, int]]:
    """Positions in `rows` of the split's rows in the table's order, and counts of others."""
    counts: dict[str, int] = {}
    if not own:
        name = found[0].path if len(found) == 1 else "config.task.train_sources"
        held = selection.held_out(_taken(rows, chosen), cfg.eval.prompts, name=name)
        chosen = chosen[held if split == "eval" else ~held]
    if split == "eval" and not own:
        return chosen[identity.first_of_each(rows.prompt[chosen])], counts
    if split == "train" and cfg.task.pass_rates:
        inside, counts = selection.by_pass_rate(rows.prompt[chosen], cfg.task.pass_rates,
                                                cfg.task.pass_rate_range)
        chosen = chosen[inside]
    limit = cfg.eval.prompts if split == "eval" else cfg.task.train_size
    order = selection.mixed(_taken(rows, chosen), [source.weight for source in found],
                            limit=limit, seed=cfg.seed)
    return chosen[order], counts | {"beyond limit or share": len(chosen) - len(order)}


def _taken(rows: selection.Rows, at: np.ndarray) -> selection.Rows:
    return selection.Rows(rows.source[at], rows.identity[at], rows.prompt[at])


# ------------------------------------------------------------------------------------- what is good


@functools.lru_cache(maxsize=1)  # both splits of one file
def _scanned(found: tuple[origins.Source, ...], stamps: tuple[tuple[int, ...], ...]
             ) -> tuple[Part, ...]:
    """What is good in every chunk; the stamps change with the files."""
    chunks = [(number, chunk) for number, source in enumerate(found)
              for chunk in files.chunks(source.path, source.kind, split=source.split)]
    jobs = [(found[number].rules, chunk) for number, chunk in chunks]
    if origins.large(found):
        results = workers.ordered(scan.scan_job, jobs, prepare=scan.nothing, given=None,
                                  title="reading data")
    else:
        results = (scan.scan(*job) for job in jobs)
    return tuple((number, chunk, result)
                 for (number, chunk), result in zip(chunks, results, strict=True))


def _counted(scanned: Sequence[Part], found: Sequence[origins.Source],
             on_bad: str) -> dict[str, int]:
    """Counts of rows left out; ConfigError for bad rows, or where no good one is."""
    bad = sum(result.bad for _, _, result in scanned)
    named = [text for _, _, result in scanned for text in result.named][:scan.NAMED]
    listing = "\n".join([f"{bad} bad lines:" if bad > 1 else "1 bad line:", *named,
                         *([f"and {bad - scan.NAMED} more"] if bad > scan.NAMED else [])])
    if bad and on_bad == "error":
        raise config.ConfigError(listing + "\ncorrect them, or set config.task.bad_records = "
                                 "'skip' to leave them out")
    filtered = sum(result.filtered for _, _, result in scanned)
    for number, source in enumerate(found):
        if not sum(len(result.place) for at, _, result in scanned if at == number):
            raise config.ConfigError("\n".join(
                [f"{source.path} holds no usable record"
                 + (f" ({filtered} are left out by config.task.where)" if filtered else ""),
                 *([listing] if bad else [])]))
    if bad:
        LOG.warning("left out of %s: %s", ", ".join(source.path for source in found), listing)
    return {"bad": bad, "outside where": filtered}


def _rows(scanned: Sequence[Part]) -> selection.Rows:
    return selection.Rows(
        np.concatenate([np.full(len(result.place), at, np.int32) for at, _, result in scanned]),
        np.concatenate([result.identity for _, _, result in scanned]),
        np.concatenate([result.prompt for _, _, result in scanned]))


def _selected(scanned: Sequence[Part], found: Sequence[origins.Source],
              chosen: np.ndarray) -> Selected:
    """The jobs that read the rows at positions `chosen`, and the order of what they give."""
    ends = np.cumsum([len(result.place) for _, _, result in scanned])
    ascending = np.sort(chosen)
    jobs, begin = [], 0
    for (number, chunk, result), end in zip(scanned, ends.tolist()):
        of_chunk = ascending[np.searchsorted(ascending, begin):np.searchsorted(ascending, end)]
        if len(of_chunk):
            jobs.append((chunk, found[number].rules, result.place[of_chunk - begin]))
        begin = end
    return Selected(tuple(jobs), np.searchsorted(ascending, chosen))


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is neither 'train' nor 'eval'")


# Tasks on files, and what `conversion` says of them where no other reward is configured.
CHECKED = "dapo_jax.envs.math:convert"
CONVERT = {"math": CHECKED, "jsonl": CHECKED,
           "multiple_choice": "dapo_jax.envs.multiple_choice:convert"}
TASKS = {
    "arithmetic": arithmetic.TASK,
    "columns": columns.TASK,
    "countdown": countdown.TASK,
    "environment": environments.TASK,
    "reasoning_gym": reasoning_gym.TASK,
    "math": math.task(from_files),
    "multiple_choice": multiple_choice.task(from_files),
    "jsonl": base.Task("jsonl", from_files, "dapo_jax.envs.math_answers:last_number",
                       purpose="records of prompt and answer; the answer's text counts too",
                       examples=math.EXAMPLES),
}
