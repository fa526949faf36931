"""One step's samples from the policy: the controller's rounds of generating and scoring."""

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import buffer
from dapo_jax.dynamic_sampling import accounts, controller, gather
from dapo_jax.envs import episode_rewards, faults, math_answers, rewards
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import engine as engines
from dapo_jax.rollout import episodes_log, episodes_talk, outcomes, stops, talking
from dapo_jax.runtime import metrics as metric_lib
from dapo_jax.runtime import processes
from dapo_jax.text import tokenizer as tokenizers

LOG = logging.getLogger(__name__)
EVALUATED = -1  # the step in the seeds of an evaluation's episodes

Judge = pools.Pool | episodes_talk.Scene  # what gives completions their rewards


@dataclasses.dataclass(frozen=True)
class Source:
    """What samples come from; nothing of it changes during a run."""

    engine: engines.Engine
    root: jax.Array  # the rollouts' key
    table: types.PromptTable
    tokenizer: tokenizers.Tokenizer
    judge: Judge
    overlong: config.Overlong
    size: controller.CollectSettings | None = None  # None: nothing is filtered (evaluation)
    stop_texts: tuple[str, ...] = ()
    late_seconds: float = 600.0  # that the run's processes wait for each other


@dataclasses.dataclass(frozen=True)
class Half:
    """Samples of which this process has scored its share; or why it could not."""

    samples: types.Samples
    texts: list[str]
    own: pools.Scores | config.ConfigError


@dataclasses.dataclass(frozen=True)
class Round:
    """Samples scored together, for the log: of one generate call, or, streaming, of the groups that
    became complete at one boundary."""

    samples: types.Samples
    texts: list[str]
    scores: pools.Scores
    seconds: dict[str, float]
    use: engines.Use = engines.Use()
    played: outcomes.Played | None = None  # None: completions of one turn

    @property
    def finals(self) -> list[str]:
        """The texts in which an answer is looked for: of an episode, the model's last turn."""
        return episodes_log.finals(self.played) if self.played else self.texts


@dataclasses.dataclass(frozen=True)
class Collected:
    """A step's batch and what it took."""

    controller: types.ControllerState
    buffer: types.Samples
    batch: types.Samples
    report: accounts.Report
    rounds: list[Round]
    seconds: dict[str, float]  # of the device at work, and of waiting for rewards
    use: engines.Use


def settings(cfg: config.Config, phase: config.Phase, *,
             filter_enabled: bool) -> controller.CollectSettings:
    """What a step of `phase` asks for."""
    rollout = cfg.rollout
    stream = gather.Streaming(rollout.reward_lag, rollout.in_flight)
    return controller.CollectSettings(
        groups=phase.prompts_per_step, samples_per_prompt=phase.samples_per_prompt,
        filter_enabled=filter_enabled, filter=cfg.filter, dynamic=cfg.dynamic_sampling,
        seed=cfg.seed, epochs=phase.epochs,
        stream=stream if rollout.mode == "streaming" else None)


def sample_round(source: Source, params: types.Tree, plan: types.Plan, *, step: int) -> Round:
    """Generate and score the plan's groups."""
    if isinstance(source.judge, episodes_talk.Scene):
        return _episodes(source, source.judge, params, plan, step=step)
    begun = time.perf_counter()
    served = engines.sample(source.engine, params, plan, table=source.table, root=source.root,
                            step=step)
    generated = time.perf_counter()
    one = scored(source, share_scored(source, served.samples), step=step,
                 what=f"rewards of step {step}")
    seconds = {"rollout": generated - begun, "reward": time.perf_counter() - generated}
    return dataclasses.replace(one, seconds=seconds, use=served.use)


def _episodes(
    source: Source, scene: episodes_talk.Scene, params: types.Tree, plan: types.Plan, *, step: int
) -> Round:
    """Play the plan's episodes, whose environment gives the rewards."""
    begun, before = time.perf_counter(), collections.Counter(scene.pool.failures)
    most, context = source.engine.sampling.max_new_tokens, source.engine.max_context
    limits = np.array([min(most, context - len(source.table.tokens[prompt])) if context else most
                       for prompt in plan.prompt.tolist()], np.int32)
    desk = episodes_talk.begin(
        scene, plan, table=source.table, limits=limits, step=step if source.size else EVALUATED,
        ahead=source.engine.slots[-1] * source.engine.rows)
    served = talking.sample(source.engine, params, plan, table=source.table, root=source.root,
                            step=step, talk=episodes_talk.talk(desk))
    samples, played = episodes_talk.finish(desk, served.samples, before=before)
    texts, scores = episodes_log.texts(played), episode_rewards.scores(played.episodes,
                                                                       scene.weights)
    samples = episode_rewards.filled(
        samples, played.episodes, texts, scores, weighed=scene.weights, overlong=source.overlong,
        max_length=most, by_turn=scene.by_turn)
    if scores.first_failure:
        kinds = ", ".join(f"{kind} {count}" for kind, count in scores.failures.items() if count)
        LOG.warning("step %d: %d of %d episodes failed (%s); first: %s", step,
                    (~scores.valid).sum(), len(texts), kinds, scores.first_failure)
    return Round(samples, texts, scores, {"rollout": time.perf_counter() - begun, "reward": 0.0},
                 served.use, played)


def share_scored(source: Source, samples: types.Samples) -> Half:
    """Samples ended at stop texts, with their texts, and the scores of this process's share."""
    samples = stops.cut(samples, source.tokenizer.spelled, source.stop_texts)
    texts = [decode(source.tokenizer, samples, row) for row in range(len(samples))]
    mine = processes.share(len(samples))
    records = [source.table.records[prompt] for prompt in samples.prompt[mine]]
    own: pools.Scores | config.ConfigError
    try:
        own = pools.score(_scorers(source), texts[mine], records)
    except config.ConfigError as error:  # the others must hear of it
        own = error
    return Half(samples, texts, own)


def _scorers(source: Source) -> pools.Pool:
    """The judge of completions of one turn."""
    if isinstance(source.judge, episodes_talk.Scene):
        raise TypeError("episodes get their rewards from their environment, not from a scorer")
    return source.judge


def asked(source: Source) -> controller.CollectSettings:
    """What a step of training asks for; ValueError: the source is that of an evaluation."""
    if source.size is None:
        raise ValueError("nothing is collected from a source without `size`")
    return source.size


def scored(source: Source, half: Half, *, step: int, what: str) -> Round:
    """Samples with the rewards that all processes found; `what` names the meeting."""
    samples, texts = half.samples, half.texts
    found: list[pools.Scores] = []
    for one in processes.gather(half.own, what=what, seconds=source.late_seconds):
        if isinstance(one, config.ConfigError):
            raise one
        found.append(one)
    scores = rewards.joined(found, processes.shares(len(samples)), len(samples))
    samples = rewards.filled(
        samples, texts, scores, weights=source.judge.weights, overlong=source.overlong,
        max_length=source.engine.sampling.max_new_tokens)
    if scores.errors or scores.timeouts:
        kinds = ", ".join(f"{kind} {count}" for kind, count in scores.failures.items() if count)
        LOG.warning("step %d: scoring failed for %d of %d samples (%s); first: %s", step,
                    scores.errors + scores.timeouts, len(texts), kinds, scores.first_failure)
    return Round(samples, texts, scores, seconds={})


def decode(tokenizer: tokenizers.Tokenizer, samples: types.Samples, row: int) -> str:
    """The text of one completion, its stop token included where that has a text."""
    return tokenizer.decode(samples.tokens[row, :samples.length[row]].tolist())


def collect(
    source: Source, params: types.Tree, *, state: types.ControllerState, carried: types.Samples,
    step: int, rounds: list[Round],
) -> Collected:
    """One step's batch. Each finished round is appended to `rounds`, so that what was sampled is
    known also where the step then ends in LimitReached."""

    def sample(plan: types.Plan) -> types.Samples:
        rounds.append(sample_round(source, params, plan, step=step))
        return rounds[-1].samples

    state, carried, batch, report = controller.collect(
        state, carried, step=step, sample=sample, size=asked(source))
    seconds = {name: sum(one.seconds[name] for one in rounds) for name in ("rollout", "reward")}
    return Collected(state, carried, batch, report, rounds, seconds,
                     _total([one.use for one in rounds]))


def _total(uses: Sequence[engines.Use]) -> engines.Use:
    none: dict[str, Any] = vars(engines.Use())
    return engines.Use(**{name: sum((getattr(use, name) for use in uses), value)
                          for name, value in none.items()})


def metrics(collected: Collected, *, step: int) -> dict[str, float]:
    """What metrics.jsonl says of the step's sampling."""
    rounds = collected.rounds
    values = controller.metrics(collected.report)
    values |= {f"time/{name}": value for name, value in collected.seconds.items()}
    values |= {
        "buffer/groups": buffer.groups(collected.buffer),
        "buffer/age": buffer.mean_age(collected.buffer, step=step),
        "invalid/reward_error": sum(one.scores.errors for one in rounds),
        "invalid/reward_timeout": sum(one.scores.timeouts for one in rounds)}
    values |= {f"invalid/kind_{kind}": sum(one.scores.failures.get(kind, 0) for one in rounds)
               for kind in faults.KINDS}
    if rounds:
        values |= _text_metrics(rounds) | _part_metrics(rounds)
        if rounds[0].played:
            values |= episodes_log.metrics([one.played for one in rounds if one.played])
            values |= {"time/idle_share": collected.use.idle / max(collected.seconds["rollout"],
                                                                   1e-9),
                       "turns/parked": collected.use.parked + collected.use.parked_host,
                       "turns/rerun_tokens": collected.use.rerun_tokens}
        values |= {"sampling/row_use": collected.use.row_use,
                   "sampling/chunks": collected.use.chunks,
                   "rollout/weights_bytes": collected.use.weights_bytes}
        tokens = sum(int(one.samples.length.sum()) for one in rounds)
        values["tokens_per_second/rollout"] = tokens / max(collected.seconds["rollout"], 1e-9)
    return values


def _text_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    length = np.concatenate([one.samples.length for one in rounds])
    stopped = np.concatenate([one.samples.stopped for one in rounds])
    texts = [text for one in rounds for text in one.texts]
    parsed = [math_answers.extract(text) is not None for one in rounds for text in one.finals]
    return {
        "length/mean": float(length.mean()), "length/max": int(length.max()),
        "length/truncated": float(1 - stopped.mean()), "format/stopped": float(stopped.mean()),
        "format/valid": float(np.mean(parsed)), **metric_lib.repetition_metrics(texts)}


def _part_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """Means over valid samples of the parts that the reward's functions gave, before weights."""
    valid = np.concatenate([one.samples.valid for one in rounds])
    names = dict.fromkeys(name for one in rounds for name in one.scores.parts)
    parts = {name: np.concatenate([
        one.scores.parts.get(name, np.zeros(len(one.samples), np.float32)) for one in rounds])
        for name in names}
    return {f"reward/part/{name}": float(values[valid].mean()) if valid.any() else math.nan
            for name, values in parts.items()}


def rows(
    rounds: Sequence[Round], table: types.PromptTable, *, step: int, kept: frozenset[int] | None,
    limit: int,
) -> list[dict]:
    """The step's rollouts for DIR/samples; `kept` holds the accepted groups (None: not known),
    `limit` the most rows (0: all)."""
    result: list[dict] = []
    for number, one in enumerate(rounds, start=1):
        for row in range(len(one.samples)):
            if limit and len(result) >= limit:
                return result
            result.append({"step": step, "round": number, **_row(one, row, table, kept)})
    return result


def _row(one: Round, row: int, table: types.PromptTable, kept: frozenset[int] | None) -> dict:
    samples = one.samples
    record = table.records[samples.prompt[row]]
    group = int(samples.group[row])
    return {
        "group": group, "prompt_id": int(samples.prompt[row]), "visit": int(samples.visit[row]),
        "sample": int(samples.sample[row]), "prompt": record["prompt"],
        "completion": one.texts[row], "answer": record["answer"],
        "reward": float(samples.reward[row]), "shaped": float(samples.shaped[row]),
        "valid": bool(samples.valid[row]), "stopped": bool(samples.stopped[row]),
        "length": int(samples.length[row]), "kept": None if kept is None else group in kept,
        "level": record.get("level")} | (
            {"episode": episodes_log.row(one.played, row)} if one.played else {})
