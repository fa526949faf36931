"""How often each training prompt is answered right: pass rates, by which data can be filtered.

    python -m dapo_jax.profile_prompts --config=configs/quickstart.py --workdir=none --out=FILE
    python -m dapo_jax.profile_prompts --config=FILE --workdir=DIR|none --out=FILE.jsonl
                                       [--samples=8] [--checkpoint=STEP]

Samples answers to every prompt of the training set, as in rollouts of training, from the newest
checkpoint of DIR or, with none, from the weights that the configuration names. Writes a row for
each prompt: prompt_key, prompt_id, pass_rate, successes, trials (answers that could be scored),
truncated, invalid, length (mean, tokens), profile. Started again with the same FILE, it goes on
after the last prompt in it. config.task.pass_rates = FILE then trains on prompts whose rate lies in
config.task.pass_rate_range.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
import rich.console
import rich.progress

from dapo_jax import command_line, config, evaluate, setup, setup_environment, types
from dapo_jax.data import sources
from dapo_jax.rollout import collect
from dapo_jax.runtime import metrics

PIECE = 4  # generate calls between writes
PROFILED = ("model", "tokenizer", "task", "prompts", "rollout", "seed")  # what rates depend on


def profile(
    source: collect.Source, params: types.Tree, path: pathlib.Path, *, name: str, piece: int
) -> int:
    """Append rows of the prompts that the file lacks, `piece` prompts at a time; returns how many.

    `name` stands in each row for all that the rates depend on. ConfigError: the file has rows of
    another profile, or other content.
    """
    table = source.table
    done = read(path, name=name, prompts=len(table))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, _bar(len(table), done) as bar:
        for start in range(done, len(table), piece):
            prompts = np.arange(start, min(start + piece, len(table)), dtype=np.int32)
            one = evaluate.sample(source, params, prompts, step=0)
            _append(file, one, table, name=name)
            bar.update(bar.task_ids[0], completed=start + len(prompts))
    return len(table) - done


def read(path: pathlib.Path, *, name: str, prompts: int) -> int:
    """Prompts that the file has rows of, the first ones; a torn last row is cut off.

    ConfigError if the rows are not those of the profile `name` in the table's order.
    """
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content[:content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines()):
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise config.ConfigError(f"--out={path}, line {number + 1}: {error}") from error
        if (row.get("profile"), row.get("prompt_id")) != (name, number) or number >= prompts:
            raise config.ConfigError(
                f"--out={path}, line {number + 1} is of another configuration, checkpoint or number"
                " of samples: name a new file, or delete this one")
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.count(b"\n")


def rows(one: collect.Round, table: types.PromptTable, *, name: str) -> list[dict[str, Any]]:
    """A row for each prompt of the round, in its order."""
    samples, made = one.samples, []
    ends = np.flatnonzero(np.diff(samples.group, append=-1)) + 1
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        valid, prompt = samples.valid[start:end], int(samples.prompt[start])
        right, trials = int((samples.reward[start:end] > 0.5).sum()), int(valid.sum())
        made.append({
            "prompt_key": sources.prompt_key(table.records[prompt]), "prompt_id": prompt,
            "pass_rate": right / trials if trials else None, "successes": right, "trials": trials,
            "truncated": int((~samples.stopped[start:end]).sum()),
            "invalid": end - start - trials, "length": samples.length[start:end].mean(),
            "profile": name})
    return made


def profile_name(cfg: config.Config, *, samples: int, workdir: str, step: int) -> str:
    """A digest of what pass rates depend on."""
    depends = (*PROFILED, *["environment"] * bool(cfg.environment.name))
    values = {name: value for name, value in config.to_json(cfg).items() if name in depends}
    about = [values, samples, os.path.abspath(workdir) if workdir != evaluate.UNTRAINED else "",
             step]
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()


def summary(path: pathlib.Path) -> dict[str, Any]:
    """What the command prints of the finished file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rates = np.array([json.loads(line)["pass_rate"] for line in lines], np.float64)  # None: NaN
    scored = rates[~np.isnan(rates)]
    return metrics.plain({
        "prompts": len(rates), "pass_rate": scored.mean() if len(scored) else None,
        "never": int((scored == 0).sum()), "always": int((scored == 1).sum()),
        "between": int(((scored > 0) & (scored < 1)).sum()),
        "not_scored": len(rates) - len(scored)})


def _append(file: TextIO, one: collect.Round, table: types.PromptTable, *, name: str) -> None:
    for row in rows(one, table, name=name):
        file.write(json.dumps(metrics.plain(row), allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _bar(total: int, done: int) -> rich.progress.Progress:
    """A bar with the time left, on standard error."""
    columns = (rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(),
               rich.progress.TextColumn("prompts"), rich.progress.TimeRemainingColumn())
    bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True))
    bar.add_task("", total=total, completed=done)
    return bar


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.profile_prompts", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of a run; none: untrained weights"),
            "out": command_line.Flag(None, "file that rows are appended to"),
            "samples": command_line.Flag(8, "answers to each prompt"),
            "checkpoint": command_line.Flag(-1, "step; -1: the newest")})
    if flags["samples"] < 1:
        raise config.ConfigError(f"--samples={flags['samples']} must be at least 1")
    if cfg.task.pass_rates:
        raise config.ConfigError("config.task.pass_rates is set: profile the whole training set, "
                                 "with --config.task.pass_rates=")
    path = pathlib.Path(flags["out"])
    if path.is_dir():
        raise config.ConfigError(f"--out={path} is a folder; name a file")
    command_line.check_folder(path.parent, flag="out")
    untrained = flags["workdir"] == evaluate.UNTRAINED
    parts = setup.prepare(cfg, only="train" if untrained else "")
    with setup_environment.judge(cfg, parts.tokenizer, parts.reward) as judge:
        evaluate.check(parts, judge)
        step, params = evaluate.starting_point(parts, flags["workdir"],
                                               wanted=flags["checkpoint"])
        name = profile_name(cfg, samples=flags["samples"], workdir=flags["workdir"], step=step)
        source = evaluate.compile_source(parts, judge, parts.train_table, samples=flags["samples"],
                                         slots=cfg.rollout.slots[-1:])
        profile(source, params, path, name=name, piece=PIECE * cfg.rollout.slots[-1])
    print(json.dumps(summary(path)))
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
