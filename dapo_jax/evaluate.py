"""Held-out accuracy: avg@k, pass@k, maj@k and greedy, with bootstrap intervals over prompts.

    python -m dapo_jax.evaluate --config=configs/quickstart.py --workdir=runs/quickstart
    python -m dapo_jax.evaluate --config=configs/quickstart.py --workdir=DIR [--checkpoint=STEP]
                                [--page=FILE]

evaluates the newest checkpoint of DIR, or the one asked for; with --workdir=none the weights that
the configuration names. Prints one JSON object, and writes DIR/eval/step_N.json, a table step_N.md
and step_N.html, where every response is seen with what was found in it. --page=FILE writes all
responses into that page, FILE's table and figures beside it. A model that needs several processes
is evaluated by as many, each started with the flags of a trainer's (--cluster and so on): each
scores its share, and process 0 prints and writes.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import command_line, config, setup, setup_adapter, setup_environment, types
from dapo_jax.data import sources
from dapo_jax.envs import base, self_check
from dapo_jax.rollout import collect, episodes_talk
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import eval_figures, eval_files, processes, samples_log, tree_store
from dapo_jax.runtime import mesh as mesh_lib

UNTRAINED = "none"  # for a work directory: the weights that the configuration names

Extract = Callable[[str, Mapping[str, Any]], str | None]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What an evaluation needs, compiled once."""

    sampled: collect.Source
    greedy: collect.Source | None
    extract: Extract  # what the task's scorer looks at
    cfg: config.Evaluation


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures by metric name, the report they come from, and every completion for the log."""

    metrics: dict[str, float]
    report: dict[str, Any]  # as eval_figures.report makes it
    rows: list[dict]


def extractor(parts: setup.Parts) -> Extract:
    """The function that finds what the task's scorer looks at."""
    return base.resolve_reward(sources.task(parts.cfg.task.name).extract)


def check(parts: setup.Parts, judge: collect.Judge) -> None:
    """Wait for the workers, and refuse a template whose right answers the reward does not take, or
    an environment that tells something else than prompts."""
    table = parts.train_table if len(parts.train_table) else parts.eval_table
    if isinstance(judge, episodes_talk.Scene):
        setup_environment.try_out(judge, table.records)
        return
    self_check.check(judge, table.records, template=parts.cfg.task.template,
                     extract=extractor(parts))


def compile_source(
    parts: setup.Parts, judge: collect.Judge, table: types.PromptTable, *, samples: int,
    slots: tuple[int, ...], **changes: object,
) -> collect.Source:
    """Compile an engine that samples so many answers to each prompt of the table; `changes` of how
    they are drawn. Keys are the evaluation's, so nothing of a run's training is repeated."""
    engine = engines.compile_engine(
        parts.spec, setup.sampling(parts, **changes), parts.mesh,
        **setup.engine_shape(parts, samples) | {"slots": slots})
    return collect.Source(engine, setup.key(parts, setup.EVALUATION), table, parts.tokenizer,
                          judge, config.Overlong(), stop_texts=parts.stop_texts,
                          late_seconds=parts.cfg.processes.late_seconds)


def compile_evaluator(parts: setup.Parts, judge: collect.Judge) -> Evaluator:
    """Compile the sampled and, if asked for, the greedy engine."""
    cfg, slots = parts.cfg.eval, parts.cfg.rollout.slots[-1:]
    sampled = compile_source(parts, judge, parts.eval_table, samples=cfg.samples, slots=slots,
                             temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p,
                             min_p=cfg.min_p)
    greedy = compile_source(parts, judge, parts.eval_table, samples=1, slots=slots, temperature=0.0
                            ) if cfg.greedy else None
    return Evaluator(sampled, greedy, extractor(parts), cfg)


def evaluate(evaluator: Evaluator, params: types.Tree, *, step: int) -> Outcome:
    """Sample every held-out prompt; the same prompts draw the same numbers at every step."""
    table, cfg = evaluator.sampled.table, evaluator.cfg
    sources_used = [evaluator.sampled, *([evaluator.greedy] if evaluator.greedy else [])]
    everything = np.arange(len(table), dtype=np.int32)
    rounds = [sample(source, params, everything, step=step) for source in sources_used]
    found = [extracted(one, table, evaluator.extract) for one in rounds]
    judged = [judge(one, answers, table) for one, answers in zip(rounds, found, strict=True)]
    report = eval_figures.report(*judged) | {"sampling": (
        f"temperature {cfg.temperature:g}, top-p {cfg.top_p:g}"
        + (f", top-k {cfg.top_k}" if cfg.top_k else "")
        + (f", min-p {cfg.min_p:g}" if cfg.min_p else ""))}
    rows = collect.rows(rounds, table, step=step, kept=None, limit=0)
    answers = [answer for one in found for answer in one]
    return Outcome(eval_figures.metrics(report), report, [
        row | _verdict(row, answer, table.records[row["prompt_id"]])
        for row, answer in zip(rows, answers, strict=True)])


def sample(source: collect.Source, params: types.Tree, prompts: np.ndarray, *, step: int
           ) -> collect.Round:
    """As many answers to each of the prompts i32[n] as the engine was made for, in their order."""
    plan = types.Plan(prompt=prompts, visit=np.zeros_like(prompts), group=prompts,
                      size=np.full_like(prompts, source.engine.share))
    return collect.sample_round(source, params, plan, step=step)


def extracted(one: collect.Round, table: types.PromptTable, extract: Extract) -> list[str | None]:
    """What the scorer looks at in each answer of the round."""
    return [extract(text, table.records[prompt])
            for text, prompt in zip(one.finals, one.samples.prompt.tolist(), strict=True)]


def judge(one: collect.Round, answers: Sequence[str | None], table: types.PromptTable
          ) -> list[eval_figures.Judged]:
    """The round's answers by prompt; rows come in plan order."""
    samples, judged = one.samples, []
    ends = np.flatnonzero(np.diff(samples.group, append=-1)) + 1
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        record = table.records[samples.prompt[start]]
        judged.append(eval_figures.Judged(
            correct=samples.reward[start:end] > 0.5, valid=samples.valid[start:end],
            stopped=samples.stopped[start:end], length=samples.length[start:end],
            answers=tuple(answers[start:end]), dataset=_label(record, "dataset"),
            level=_label(record, "level")))
    return judged


def _label(record: Mapping[str, Any], name: str) -> str:
    return "" if record.get(name) is None else str(record[name])


def _verdict(row: Mapping[str, Any], answer: str | None, record: Mapping[str, Any]) -> dict:
    """What the log and the page say of one answer beside the rollout itself."""
    right = "right" if row["reward"] > 0.5 else "wrong"
    return {"mode": "sampled" if row["round"] == 1 else "greedy", "extracted": answer,
            "verdict": right if row["valid"] else "invalid", "dataset": _label(record, "dataset"),
            "level": row["level"]}


def write(outcome: Outcome, workdir: str, *, step: int, cfg: config.Evaluation) -> None:
    """Write every response to DIR/samples, and the figures and the page to DIR/eval."""
    samples_log.write_eval(workdir, step, outcome.rows)
    eval_files.write(workdir, outcome.report, outcome.rows, step=step, page_rows=cfg.page_rows)


def starting_point(parts: setup.Model, workdir: str, *, wanted: int) -> tuple[int, types.Tree]:
    """Step and parameters of a run's checkpoint, or 0 and the configuration's own weights."""
    if workdir == UNTRAINED:
        return 0, setup.initial_params(parts)
    return checkpointed(parts, workdir, wanted=wanted)


def checkpointed(parts: setup.Model, workdir: str, *, wanted: int) -> tuple[int, types.Tree]:
    """Step and parameters of the checkpoint of step `wanted`, or of the newest (-1); an adapter is
    merged into its base. Neither the run's training data nor its optimizer is needed."""
    base = setup.open_base(parts)
    step, trained = trained_of(parts, base, workdir, wanted=wanted)
    return step, setup_adapter.sampled(base, trained)


def trained_of(
    parts: setup.Model, base: setup_adapter.Base | None, workdir: str, *, wanted: int
) -> tuple[int, types.Tree]:
    """Step and what was trained, all parameters or an adapter of this base, of a checkpoint."""
    like = mesh_lib.trained_structs(parts.mesh, parts.spec, parts.cfg.lora)
    tree_store.check_run(workdir, like, wanted=wanted)
    step, trained = tree_store.params_of_run(workdir, like, wanted=wanted)
    if base is not None:
        setup_adapter.check(base, tree_store.mark_of_run(workdir, step=step), where=workdir)
    return step, trained


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.evaluate", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run; none: untrained weights"),
            "checkpoint": command_line.Flag(-1, "step; -1: the newest"),
            "page": command_line.Flag("", "file of a page with all responses"),
            **processes.FLAGS})
    processes.start(processes.from_flags(flags))
    try:
        _evaluate(cfg, flags["workdir"], wanted=flags["checkpoint"], page=flags["page"])
    except config.ConfigError as error:
        processes.leave(error, seconds=flags["heartbeat"])
        raise
    return command_line.DONE


def _evaluate(cfg: config.Config, workdir: str, *, wanted: int, page: str) -> None:
    parts = setup.prepare(cfg, only="eval")
    with setup_environment.judge(cfg, parts.tokenizer, parts.reward) as judge:
        check(parts, judge)
        step, params = starting_point(parts, workdir, wanted=wanted)
        outcome = evaluate(compile_evaluator(parts, judge), params, step=step)

    def tell() -> None:
        if workdir != UNTRAINED:
            write(outcome, workdir, step=step, cfg=cfg.eval)
        if page:
            eval_files.write_page(page, outcome.report, outcome.rows, step=step)
        print(json.dumps({"step": step, "prompts": len(parts.eval_table), **outcome.metrics}))
    processes.first_alone(tell, what="figures", seconds=cfg.processes.late_seconds)


if __name__ == "__main__":
    command_line.leave(main)
