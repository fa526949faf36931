"""The work directory of a run: whose it is, and what each step adds to it.

Of several processes one writes; all see the folder, since checkpoints are written by all.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from dapo_jax import config, evaluate, reductions, types
from dapo_jax.learner import algorithms, weights
from dapo_jax.learner import step as learner
from dapo_jax.rollout import collect
from dapo_jax.runtime import (
    checkpoint,
    environment,
    eval_files,
    failed_updates,
    metrics,
    processes,
    samples_log,
    wandb_log,
)

LOG = logging.getLogger(__name__)
# May differ between a run and its continuation: they do not change what is computed.
FREE = ("_environment", "checkpoint", "log", "processes", "scoring.workers",
        "environment.workers")
# How the devices split the work: it changes no more than the order of sums.
SPLIT = ("mesh", "rollout.mesh")


@dataclasses.dataclass(frozen=True)
class Journal:
    """Where a run's lines go; nowhere in a process that does not write."""

    workdir: str
    cfg: config.Config
    writer: metrics.Writer | None
    progress: metrics.Progress | None


def claim(workdir: str, cfg: config.Config, stack: contextlib.ExitStack) -> None:
    """Refuse a directory of another configuration; write this one into a new directory, and hold
    it until `stack` is left. Raises ConfigError, in every process."""
    processes.first_alone(lambda: _claim(workdir, cfg, stack), what="claim of the work directory",
                          seconds=cfg.processes.late_seconds)
    if not (pathlib.Path(workdir) / "config.json").is_file():
        raise config.ConfigError(
            f"--workdir={workdir}: process {jax.process_index()} does not see what process 0 wrote "
            "there; give a folder on a disk that all machines share")
    stack.enter_context(processes.logged(workdir))


def _claim(workdir: str, cfg: config.Config, stack: contextlib.ExitStack) -> None:
    wandb_log.check(cfg.log.wandb)
    steps_free = cfg.rl.optimizer.schedule == "constant"
    values, split = config.to_json(cfg), splits(cfg)
    differ = checkpoint.check_config(workdir, values,
                                     free=FREE + split + ("rl.steps",) * steps_free)
    if other := [name for name in differ if name.startswith(split)]:
        LOG.warning("%s: goes on split in another way (%s): the numbers are those of the run "
                    "before up to rounding", workdir, ", ".join(other))
    try:
        checkpoint.write_config(workdir, values | {"_environment": environment.described()})
        stack.enter_context(checkpoint.sole_use(workdir))
    except OSError as error:
        raise config.ConfigError(f"--workdir={workdir} cannot be written: {error.strerror}; is it "
                                 "a directory of yours, or a new name, on a disk with room?"
                                 ) from error


def splits(cfg: config.Config) -> tuple[str, ...]:
    """Fields that may change with the number of devices while a run lasts: SPLIT, and numbers of
    slots, which have to divide by it, where nothing is decided or weighted by them."""
    found = SPLIT + ("rollout.slots",) * (cfg.rollout.mode != "streaming")
    for name, phase in (("sft", cfg.sft), ("rl", cfg.rl)):
        algorithm = algorithms.resolve(phase.algorithm, where=f"{name}.algorithm")
        if algorithm.weights not in weights.PACKED:
            found += (f"{name}.microbatch_slots", f"{name}.microbatch_tokens")
    return found


def opened(workdir: str, cfg: config.Config, stack: contextlib.ExitStack, *, done: int, steps: int
           ) -> Journal:
    """The journal of a run of `steps`, cut after step `done` (-1: nothing is kept)."""
    if not processes.main():
        return Journal(workdir, cfg, None, None)
    with _explained(workdir):
        samples_log.cut(workdir, done)
        eval_files.cut(workdir, done)
        logger = wandb_log.opened(cfg.log.wandb, pathlib.Path(workdir), config.to_json(cfg))
        writer = metrics.open_writer(workdir, resume_step=done, tensorboard=cfg.log.tensorboard,
                                     logger=logger)
    # Closing writes what could not be written before, and fails again.
    stack.callback(_explained(workdir)(metrics.close), writer)
    progress = metrics.open_progress(steps, max(done, 0))
    stack.callback(metrics.close_progress, progress)
    return Journal(workdir, cfg, writer, progress)


@contextlib.contextmanager
def _explained(workdir: str) -> Iterator[None]:
    """Turn an error of the disk into a ConfigError: starting again without a change is no use."""
    try:
        yield
    except OSError as error:
        raise config.ConfigError(
            f"{workdir}: what the run keeps there could not be written: {error.strerror or error}; "
            "make room or mend the disk, and start again: the run goes on from its newest "
            "checkpoint") from error


def write_line(journal: Journal, line: Mapping[str, Any]) -> None:
    """A step's metrics."""
    if journal.writer and journal.progress:
        with _explained(journal.workdir):
            metrics.write(journal.writer, line)
        metrics.advance(journal.progress, line)


def write_rollouts(
    journal: Journal, rounds: Sequence[collect.Round], table: types.PromptTable, *, step: int,
    kept: frozenset[int] | None,
) -> None:
    """A step's samples; `kept` holds the accepted groups (None: not known)."""
    if journal.writer:
        rows = collect.rows(rounds, table, step=step, kept=kept,
                            limit=journal.cfg.log.samples_per_step)
        with _explained(journal.workdir):
            samples_log.write(journal.workdir, step, rows)


def write_evaluation(journal: Journal, outcome: evaluate.Outcome, *, step: int) -> None:
    """Figures, responses and page of an evaluation."""
    if journal.writer:
        with _explained(journal.workdir):
            evaluate.write(outcome, journal.workdir, step=step, cfg=journal.cfg.eval)


def write_failed(
    journal: Journal, fetched: Sequence[reductions.Metrics], *, step: int,
    work: Callable[[], Sequence[learner.Work]],
) -> None:
    """The microbatches of updates that were skipped; `work` packs those of all processes."""
    skipped = [number for number, found in enumerate(fetched)
               if cast(reductions.Sum, found["policy/skipped"]).value]
    if skipped and journal.writer:
        whole = work()
        for number in skipped:
            with _explained(journal.workdir):
                path = failed_updates.write(
                    journal.workdir, whole[number % len(whole)].batches, step=step, number=number)
            LOG.warning("step %d: update %d is not finite and was skipped; its microbatches are in "
                        "%s", step, number + 1, path)
