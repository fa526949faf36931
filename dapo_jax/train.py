"""Train a language model by reinforcement learning with verifiable rewards.

    python -m dapo_jax.train --config=configs/quickstart.py --workdir=DIR [--config.a.b=VALUE ...]

DIR receives config.json, metrics.jsonl, samples/, checkpoints/ and tb/. Started again with the same
DIR, the run goes on from its newest checkpoint with the numbers it would have had.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax import calibration, command_line, config, evaluate, phases, setup, setup_phases, types
from dapo_jax.dynamic_sampling import controller, history, order
from dapo_jax.envs import pool as pools
from dapo_jax.learner import packing
from dapo_jax.learner import step as learner
from dapo_jax.rollout import collect, streaming
from dapo_jax.runtime import (
    checkpoint,
    eval_files,
    failed_updates,
    metrics,
    processes,
    profiling,
    samples_log,
)
from dapo_jax.runtime import mesh as mesh_lib

LOG = logging.getLogger(__name__)
SCORE_BYTES = 32  # about what the rewards of a sample take between processes
# May differ between a run and its continuation: they do not change what is computed.
FREE = ("_environment", "checkpoint", "log", "processes", "scoring.workers")


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    parts: setup.Parts
    workdir: str
    pool: pools.Pool
    evaluator: evaluate.Evaluator
    checkpoints: checkpoint.ocp.CheckpointManager
    writer: metrics.Writer | None  # None: another process writes the files
    progress: metrics.Progress | None
    signals: list[int]  # that this process received
    agreed: list[int]  # signals that all know of: the run ends in order


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step trains on, the state after its making, and what is logged of it."""

    state: types.RunState
    samples: types.Samples
    values: dict[str, float]


def train(cfg: config.Config, workdir: str) -> int:
    """Run or continue `cfg` in `workdir`; returns the exit status."""
    metrics.count_compiles()
    parts = setup.prepare(cfg)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pools.open(
            parts.reward, cfg.scoring, weights=cfg.task.reward_weights))
        evaluate.check(parts, pool)
        processes.first_alone(
            functools.partial(_claim, workdir, cfg, stack), what="claim of the work directory",
            seconds=cfg.processes.late_seconds)
        _check_shared(workdir)
        stack.enter_context(processes.logged(workdir))
        _log_start(parts)
        manager = checkpoint.open_manager(workdir, keep=cfg.checkpoint.keep)
        stack.callback(checkpoint.close, manager)
        signals = stack.enter_context(command_line.caught_signals())
        state, found = _first_state(parts, manager)
        if found and _over(parts.phases[-1], state):
            LOG.info("%s: finished after step %d; nothing is left to do", workdir, state.step)
            return command_line.DONE
        if found:
            LOG.info("%s: going on after step %d", workdir, state.step)
        done = int(state.step) if found else -1
        run = _open(parts, workdir, pool, manager, signals, stack, done=done)
        processes.compile_exchanges(setup.most_samples(cfg) * SCORE_BYTES)
        try:
            state = _phases(run, state, new=not found)
        except controller.LimitReached as limit:
            LOG.error("stopped: %s", limit)
            return command_line.LIMIT
        if not run.agreed:
            return command_line.DONE
        checkpoint.save(manager, state)
    LOG.warning("signal %d: saved after step %d; start again to go on", run.agreed[0], state.step)
    return 128 + run.agreed[0]


def _log_start(parts: setup.Parts) -> None:
    LOG.info("%.2f million parameters in %s; %d prompts to train on, %d held out; compiling",
             setup.parameter_count(parts.spec) / 1e6, parts.spec.compute_dtype,
             len(parts.train_table), len(parts.eval_table))
    if left_out := [f"{count} {name}" for name, count in parts.counts.items() if count]:
        LOG.warning("records left out: %s", ", ".join(left_out))


def _claim(workdir: str, cfg: config.Config, stack: contextlib.ExitStack) -> None:
    """Refuse a directory of another configuration; write this one into a new directory, and hold
    it while the run lasts."""
    steps_free = cfg.rl.optimizer.schedule == "constant"
    values = config.to_json(cfg)
    checkpoint.check_config(workdir, values, free=FREE + ("rl.steps",) * steps_free)
    try:
        checkpoint.write_config(workdir, values | {"_environment": _environment()})
    except OSError as error:
        raise config.ConfigError(f"--workdir={workdir} cannot be written: {error.strerror}; is it "
                                 "a directory of yours, or a new name?") from error
    stack.enter_context(checkpoint.sole_use(workdir))


def _check_shared(workdir: str) -> None:
    """Process 0 has written config.json; every process must see it."""
    if not (pathlib.Path(workdir) / "config.json").is_file():
        raise config.ConfigError(
            f"--workdir={workdir}: process {jax.process_index()} does not see what process 0 wrote "
            "there; give a folder on a disk that all machines share")


def _environment() -> dict[str, str]:
    device = jax.devices()[0]
    return {"python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__,
            "device": f"{len(jax.devices())} x {device.device_kind}", "cores": str(os.cpu_count())}


def _first_state(parts: setup.Parts, manager: checkpoint.ocp.CheckpointManager
                 ) -> tuple[types.RunState, bool]:
    """The newest checkpoint's state and true, or a new one and false."""
    found = checkpoint.latest(manager)
    if found is None:
        return setup.initial_state(parts), False
    state = checkpoint.restore(manager, setup.like_state(parts, found))
    return state, True


def _open(
    parts: setup.Parts, workdir: str, pool: pools.Pool,
    manager: checkpoint.ocp.CheckpointManager, signals: list[int], stack: contextlib.ExitStack,
    *, done: int,
) -> Run:
    """Compile the evaluation and open the logs, cut after step `done` (-1: nothing is kept)."""
    evaluator = evaluate.compile_evaluator(parts, pool)
    run = Run(parts, workdir, pool, evaluator, manager, None, None, signals, [])
    if not processes.main():
        return run
    samples_log.cut(workdir, done)
    eval_files.cut(workdir, done)
    writer = metrics.open_writer(workdir, resume_step=done, tensorboard=parts.cfg.log.tensorboard)
    stack.callback(metrics.close, writer)
    progress = metrics.open_progress(parts.steps, max(done, 0))
    stack.callback(metrics.close_progress, progress)
    return dataclasses.replace(run, writer=writer, progress=progress)


def _phases(run: Run, state: types.RunState, *, new: bool) -> types.RunState:
    """All that is left of the run; `new`: the untrained model is evaluated first."""
    if new:
        compiled = metrics.compile_count()
        line = {"step": 0, "phase": "start"} | _evaluate(run, state)
        _write(run, line | {"compiles": metrics.compile_count() - compiled})
    for phase in run.parts.phases:
        if _over(phase, state):
            continue
        if int(state.step) == phase.first_step - 1 and phase.first_step > 1:
            LOG.info("compiling the %s phase", phase.name)
            fresh = setup.fresh_train_state(run.parts, phase, state.train.params)
            state = dataclasses.replace(state, train=fresh)
        phase_run = phases.ready(run.parts, phase, run.pool, state, workdir=run.workdir)
        state = calibration.calibrated(state, phase_run.source)
        state = _steps(run, phase_run, state)
        if run.agreed:
            break
    return state


def _over(phase: setup_phases.Phase, state: types.RunState) -> bool:
    """Whether the phase took all its steps, or sampled its epochs and trained on all of it."""
    used = (phase.algorithm.samples == "rollout" and not len(state.buffer)
            and order.exhausted(state.controller.order, phase.cfg.epochs))
    return int(state.step) >= phase.last_step or used


def _steps(run: Run, phase_run: phases.PhaseRun, state: types.RunState) -> types.RunState:
    """The phase's remaining steps, fewer if a signal comes."""
    phase, cfg = phase_run.phase, run.parts.cfg
    begun, compiled, saving = time.perf_counter(), metrics.compile_count(), {}
    _agree(run, state)  # a signal may have come while this phase compiled
    while not (run.agreed or _over(phase, state)):
        step, used = int(state.step) + 1, time.process_time()
        with jax.transfer_guard("disallow"), profiling.traced(
                run.workdir, step=step, wanted=cfg.log.profile_steps):
            batch = _next_samples(run, phase_run, state, step)
            state, values = _learn(run, phase_run, batch, step)
        last = _over(phase, state)
        line = {"step": step, "phase": phase.name} | batch.values | values | saving
        line["time/processor"] = time.process_time() - used  # of the step without its evaluation
        line |= _agree(run, state, seconds=time.perf_counter() - begun)
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            line |= _evaluate(run, state)
        line["compiles"] = metrics.compile_count() - compiled
        line["time/step"] = time.perf_counter() - begun
        # The line is there before its checkpoint can be: a run that goes on may cut, not add.
        _write(run, line)
        begun, compiled, saving = time.perf_counter(), metrics.compile_count(), {}
        if last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            checkpoint.save(run.checkpoints, state, score=line.get(cfg.checkpoint.best))
            saving = {"time/checkpoint": time.perf_counter() - begun}  # in the next line
    return state


def _agree(run: Run, state: types.RunState, *, seconds: float = 0.0) -> dict[str, float]:
    """Hear of signals that any process got, after checking that all hold the same state. `seconds`
    is what this process was busy for; the metrics name the slowest."""
    if jax.process_count() == 1:
        run.agreed.extend(run.signals[:1])
        return {}
    after = f"after step {int(state.step)}"
    same = processes.digests(dataclasses.replace(state, train=None))
    found = processes.gather((same, run.signals[:1], seconds), what=f"agreement {after}",
                             seconds=run.parts.cfg.processes.late_seconds)
    processes.check_same([digests for digests, _, _ in found], where=after)
    run.agreed.extend(number for _, signals, _ in found for number in signals)
    busy = [each for _, _, each in found]
    return {"processes/slowest": int(np.argmax(busy)), "processes/slowest_seconds": max(busy),
            "processes/mean_seconds": float(np.mean(busy))}


def _next_samples(run: Run, phase_run: phases.PhaseRun, state: types.RunState, step: int) -> Batch:
    """The step's batch, from demonstrations or from the policy."""
    make = _demonstrations if phase_run.source is None else _rollouts
    return make(run, phase_run, state, step)


def _demonstrations(
    run: Run, phase_run: phases.PhaseRun, state: types.RunState, step: int
) -> Batch:
    phase = phase_run.phase
    place, ids = order.take(state.demonstrations, phase.cfg.prompts_per_step,
                            seed=run.parts.cfg.seed, avoid=(), epochs=phase.cfg.epochs)
    samples = packing.from_demonstrations(run.parts.train_table, ids, step=step,
                                          width=phase.pack.completion_buckets[-1])
    return Batch(dataclasses.replace(state, demonstrations=place), samples, {})


def _rollouts(run: Run, phase_run: phases.PhaseRun, state: types.RunState, step: int) -> Batch:
    rounds: list[collect.Round] = []
    kept, source = None, phase_run.source
    try:
        collected = (streaming if source.size.stream else collect).collect(
            source, state.train.params, state=state.controller, carried=state.buffer,
            step=step, rounds=rounds)
    except controller.LimitReached:
        checkpoint.save(run.checkpoints, state)
        raise
    else:
        accepted = np.concatenate([collected.batch.group, collected.buffer.group])
        kept = frozenset(accepted.tolist())
    finally:
        if run.writer:
            samples_log.write(run.workdir, step, collect.rows(
                rounds, run.parts.train_table, step=step, kept=kept,
                limit=run.parts.cfg.log.samples_per_step))
    state = dataclasses.replace(state, controller=collected.controller, buffer=collected.buffer)
    known = history.shares(state.controller.history, source.size.dynamic.history)
    return Batch(state, collected.batch, collect.metrics(collected, step=step) | known)


def _learn(run: Run, phase_run: phases.PhaseRun, batch: Batch, step: int
           ) -> tuple[types.RunState, dict[str, float]]:
    """All updates of the step; the metrics are fetched when they are done."""
    phase = phase_run.phase
    begun = time.perf_counter()
    work = learner.prepare(
        batch.samples, algorithm=phase.algorithm, updates=phase.cfg.updates_per_step, step=step,
        table=run.parts.train_table, shape=phase.pack,
        max_length=phase.pack.completion_buckets[-1])
    padding = packing.padding([batch for one in work for batch in one.batches])
    packed, epochs = time.perf_counter(), phase.cfg.epochs_per_batch
    work = learner.scored(phase_run.programs, batch.state.train.params, work,
                          reference=phase_run.reference)
    train_state, device_values = learner.learn(
        phase_run.programs, batch.state.train, work, epochs=epochs)
    fetched = mesh_lib.fetch(device_values)
    values = types.results(fetched)
    seconds = time.perf_counter() - packed
    _keep_failed(run, fetched, work, step)
    tokens = epochs * sum(one.tokens for one in work)
    values |= {"policy/updates": len(fetched), "time/pack": packed - begun, "time/update": seconds,
               "update/padding": padding, "tokens_per_second/update": tokens / seconds}
    state = dataclasses.replace(batch.state, train=train_state, step=np.asarray(step, np.int32))
    return state, values


def _keep_failed(
    run: Run, fetched: Sequence[types.Metrics], work: Sequence[learner.Work], step: int
) -> None:
    """Write down the microbatches of updates that were skipped."""
    for number, found in enumerate(fetched):
        if found["policy/skipped"].value and run.writer:
            path = failed_updates.write(run.workdir, work[number % len(work)].batches, step=step,
                                        number=number)
            LOG.warning("step %d: update %d is not finite and was skipped; its microbatches are in "
                        "%s", step, number + 1, path)


def _evaluate(run: Run, state: types.RunState) -> dict[str, float]:
    begun = time.perf_counter()
    step = int(state.step)
    outcome = evaluate.evaluate(run.evaluator, state.train.params, step=step)
    if run.writer:
        evaluate.write(outcome, run.workdir, step=step, cfg=run.parts.cfg.eval)
    return outcome.metrics | {"time/eval": time.perf_counter() - begun}


def _write(run: Run, line: dict[str, object]) -> None:
    if run.writer:
        metrics.write(run.writer, line)
        metrics.advance(run.progress, line)


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    LOG.setLevel(logging.INFO)
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.train", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run; made if missing"),
            **processes.FLAGS})
    processes.start(processes.from_flags(flags))
    return train(cfg, flags["workdir"])


if __name__ == "__main__":
    command_line.leave(main)
