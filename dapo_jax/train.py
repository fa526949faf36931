"""Train a language model by reinforcement learning with verifiable rewards.

    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m dapo_jax.train --config=configs/quickstart.py --workdir=DIR --config.seed=1
    python -m dapo_jax.train --config=configs/quickstart.py --workdir=DIR --config.lora.rank=8
    python -m dapo_jax.train --config=FILE --workdir=DIR [--config.a.b=VALUE ...]

DIR receives config.json, metrics.jsonl, samples/, checkpoints/ and tb/. Started again with the same
DIR, the run goes on from its newest checkpoint with the numbers it would have had.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax import (
    agreement,
    calibration,
    command_line,
    config,
    evaluate,
    phases,
    reductions,
    setup,
    setup_adapter,
    setup_environment,
    setup_phases,
    types,
)
from dapo_jax import journal as journals
from dapo_jax.buffer import replay, select
from dapo_jax.dynamic_sampling import controller, history, order
from dapo_jax.learner import features, packing
from dapo_jax.learner import step as learner
from dapo_jax.rollout import collect, streaming
from dapo_jax.runtime import checkpoint, checkpoint_files, metrics, processes, profiling
from dapo_jax.runtime import mesh as mesh_lib

LOG = logging.getLogger(__name__)
SCORE_BYTES = 32  # about what the rewards of a sample take between processes


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    parts: setup.Parts
    judge: collect.Judge
    evaluator: evaluate.Evaluator
    checkpoints: checkpoint.ocp.CheckpointManager
    journal: journals.Journal
    begun: float  # monotonic seconds
    signals: list[int]  # that this process received
    agreed: list[agreement.Ending]  # that all know of
    base: setup_adapter.Base | None  # None: all parameters are trained


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step trains on, the state after its making, and what is logged of it."""

    state: types.RunState
    samples: types.Samples
    values: dict[str, float]


def train(cfg: config.Config, workdir: str) -> int:
    """Run or continue `cfg` in `workdir`; returns the exit status."""
    begun = time.monotonic()
    metrics.count_compiles()
    parts = setup.prepare(cfg)
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(setup_environment.judge(
            cfg, parts.tokenizer, parts.reward, weights=cfg.task.reward_weights))
        evaluate.check(parts, judge)
        journals.claim(workdir, cfg, stack)
        _log_start(parts)
        manager = checkpoint.open_manager(workdir, keep=cfg.checkpoint.keep)
        stack.callback(checkpoint.close, manager)
        signals = stack.enter_context(command_line.caught_signals())
        state, base, found = setup.first_state(parts, manager)
        if found and _over(parts.phases[-1], state):
            LOG.info("%s: finished after step %d; nothing is left to do", workdir, state.step)
            return command_line.DONE
        if found:
            LOG.info("%s: going on after step %d", workdir, state.step)
        evaluator = evaluate.compile_evaluator(parts, judge)
        journal = journals.opened(workdir, cfg, stack, done=int(state.step) if found else -1,
                                  steps=parts.steps)
        run = Run(parts, judge, evaluator, manager, journal, begun, signals, [], base)
        processes.compile_exchanges(setup.most_samples(cfg) * SCORE_BYTES)
        try:
            state = _phases(run, state, new=not found)
        except controller.LimitReached as limit:
            LOG.error("stopped: %s", limit)
            return command_line.LIMIT
        if not run.agreed:
            LOG.info("%s: finished after step %d; python -m dapo_jax.report %s draws it", workdir,
                     state.step, workdir)
            return command_line.DONE
        checkpoint.save(manager, state)
    ending = run.agreed[0]
    LOG.warning("%s: saved after step %d; start again to go on", ending.what, state.step)
    return 128 + ending.signal


def _log_start(parts: setup.Parts) -> None:
    LOG.info("training %.2f million parameters in %s on %d prompts, %d held out; compiling",
             setup.parameter_count(parts) / 1e6, parts.spec.compute_dtype,
             len(parts.train_table), len(parts.eval_table))
    if left_out := [f"{count} {name}" for name, count in parts.counts.items() if count]:
        LOG.warning("records left out: %s", ", ".join(left_out))
    for said in mesh_lib.unsplit(parts.mesh, parts.spec):
        LOG.warning("%s", said)


def _phases(run: Run, state: types.RunState, *, new: bool) -> types.RunState:
    """All that is left of the run; `new`: the untrained model is evaluated first."""
    if new:
        compiled = metrics.compile_count()
        line = {"step": 0, "phase": "start"} | _evaluate(run, state)
        journals.write_line(run.journal, line | {"compiles": metrics.compile_count() - compiled})
    for phase in run.parts.phases:
        if _over(phase, state):
            continue
        if int(state.step) == phase.first_step - 1 and phase.first_step > 1:
            LOG.info("compiling the %s phase", phase.name)
            fresh = setup.fresh_train_state(run.parts, phase, state.train.params)
            state = dataclasses.replace(state, train=fresh)
        phase_run = phases.ready(run.parts, phase, run.judge, state,
                                 workdir=run.journal.workdir, base=run.base)
        state = calibration.calibrated(state, phase_run.source, run.base)
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
    """The phase's remaining steps, fewer if a signal or the deadline comes."""
    phase, cfg = phase_run.phase, run.parts.cfg
    checkpoint_files.compile_slices(state.train)
    since = _agree(run, state)  # a signal may have come while this phase compiled
    begun, compiled, waited = time.perf_counter(), metrics.compile_count(), processes.waited()
    while not (run.agreed or _over(phase, state)):
        step, used = int(state.step) + 1, time.process_time()
        with jax.transfer_guard("disallow"), profiling.traced(
                run.journal.workdir, step=step, wanted=cfg.log.profile_steps):
            batch = _next_samples(run, phase_run, state, step)
            state, values = _learn(run, phase_run, batch, step)
        last = _over(phase, state)
        line: dict[str, Any] = {"step": step, "phase": phase.name}
        line |= batch.values | values | since
        line["time/processor"] = time.process_time() - used  # of the step without its evaluation
        if last or (cfg.eval.every and step % cfg.eval.every == 0):
            line |= _evaluate(run, state)
        line["compiles"] = metrics.compile_count() - compiled
        line["time/step"] = time.perf_counter() - begun
        # The line is there before its checkpoint can be: a run that goes on may cut, not add.
        journals.write_line(run.journal, line)
        busy = time.perf_counter() - begun - (processes.waited() - waited)
        since = _agree(run, state, seconds=busy, late=_late(run))
        begun, compiled, waited = time.perf_counter(), metrics.compile_count(), processes.waited()
        if last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            checkpoint.save(run.checkpoints, state, score=line.get(cfg.checkpoint.best))
            since |= {"time/checkpoint": time.perf_counter() - begun}  # in the next line
    return state


def _late(run: Run) -> bool:
    """Whether the deadline has passed. Asked after steps only, so that each start takes one."""
    deadline = run.parts.cfg.checkpoint.deadline
    return 0 < deadline < time.monotonic() - run.begun


def _agree(run: Run, state: types.RunState, *, seconds: float = 0.0, late: bool = False
           ) -> dict[str, float]:
    """Hear from all processes whether the run ends here; see agreement.reached."""
    known = agreement.endings(run.signals, late=late)
    found, values = agreement.reached(state, known, seconds=seconds,
                                      late_seconds=run.parts.cfg.processes.late_seconds)
    run.agreed.extend(found)
    return values


def _next_samples(run: Run, phase_run: phases.PhaseRun, state: types.RunState, step: int) -> Batch:
    """The step's batch, from demonstrations or from the policy."""
    if phase_run.source is None:
        return _demonstrations(run, phase_run, state, step)
    return _rollouts(run, phase_run.source, state, step)


def _demonstrations(
    run: Run, phase_run: phases.PhaseRun, state: types.RunState, step: int
) -> Batch:
    phase = phase_run.phase
    place, ids = order.take(state.demonstrations, phase.cfg.prompts_per_step,
                            seed=run.parts.cfg.seed, avoid=(), epochs=phase.cfg.epochs)
    samples = packing.from_demonstrations(run.parts.train_table, ids, step=step,
                                          width=phase.pack.completion_buckets[-1])
    return Batch(dataclasses.replace(state, demonstrations=place), samples, {})


def _rollouts(run: Run, source: collect.Source, state: types.RunState, step: int) -> Batch:
    rounds: list[collect.Round] = []
    kept, size = None, collect.asked(source)
    policy = setup_adapter.sampled(run.base, state.train.params)
    try:
        collected = (streaming if size.stream else collect).collect(
            source, policy, state=state.controller, carried=state.buffer, step=step, rounds=rounds)
    except controller.LimitReached:
        checkpoint.save(run.checkpoints, state)
        raise
    else:
        accepted = np.concatenate([collected.batch.group, collected.buffer.group])
        kept = frozenset(accepted.tolist())
    finally:
        journals.write_rollouts(run.journal, rounds, run.parts.train_table, step=step, kept=kept)
    state = dataclasses.replace(state, controller=collected.controller, buffer=collected.buffer)
    known = history.shares(state.controller.history, size.dynamic.history)
    return Batch(state, collected.batch, collect.metrics(collected, step=step) | known)


def _learn(run: Run, phase_run: phases.PhaseRun, batch: Batch, step: int
           ) -> tuple[types.RunState, dict[str, float]]:
    """All updates of the step; the metrics are fetched when they are done."""
    phase, begun = phase_run.phase, time.perf_counter()
    states = select.no_states if phase_run.states is None else functools.partial(
        features.of, phase_run.states, batch.state.train.params, table=run.parts.train_table,
        base=phase_run.base)
    kept, selected, values = replay.learned_from(
        batch.state.replay, batch.samples, phase.intake, step=step, states=states)
    prepared = functools.partial(
        learner.prepare, selected.samples, algorithm=phase.algorithm, step=step,
        updates=phase.cfg.updates_per_step, table=run.parts.train_table, chosen=selected.chosen,
        discount=run.parts.cfg.environment.discount, max_length=phase.max_length)
    work = prepared(shape=phase.pack)
    padding = packing.padding([place for one in work for place in one.places])
    packed, epochs = time.perf_counter(), phase.cfg.epochs_per_batch
    work = learner.scored(phase_run.programs, batch.state.train.params, work,
                          reference=phase_run.reference, base=phase_run.base)
    train_state, device_values = learner.learn(
        phase_run.programs, batch.state.train, work, epochs=epochs, base=phase_run.base)
    fetched = mesh_lib.fetch(device_values)
    values |= reductions.results(fetched)
    seconds = time.perf_counter() - packed
    journals.write_failed(
        run.journal, fetched, step=step, work=lambda: work if phase.pack.own is None else prepared(
            shape=dataclasses.replace(phase.pack, own=None)))
    tokens = epochs * sum(one.tokens for one in work)
    values |= {"policy/updates": len(fetched), "time/pack": packed - begun, "time/update": seconds,
               "update/padding": padding, "tokens_per_second/update": tokens / seconds}
    state = dataclasses.replace(batch.state, train=train_state, replay=kept,
                                step=np.asarray(step, np.int32))
    return state, values


def _evaluate(run: Run, state: types.RunState) -> dict[str, float]:
    begun = time.perf_counter()
    step = int(state.step)
    policy = setup_adapter.sampled(run.base, state.train.params)
    outcome = evaluate.evaluate(run.evaluator, policy, step=step)
    journals.write_evaluation(run.journal, outcome, step=step)
    return outcome.metrics | {"time/eval": time.perf_counter() - begun}


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    LOG.setLevel(logging.INFO)
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.train", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run; made if missing"),
            **processes.FLAGS})
    processes.start(processes.from_flags(flags))
    try:
        return train(cfg, flags["workdir"])
    except config.ConfigError as error:
        processes.leave(error, seconds=flags["heartbeat"])
        raise


if __name__ == "__main__":
    command_line.leave(main)
