"""Held-out accuracy: avg@k, pass@k, maj@k and greedy.

    python -m dapo_jax.evaluate --config=configs/quickstart.py --workdir=DIR [--checkpoint=STEP]

prints one JSON object for the newest checkpoint of DIR, or the one asked for.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from dapo_jax import command_line, config, setup, types
from dapo_jax.envs import math_answers
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import checkpoint


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What an evaluation needs, compiled once."""

    sampled: collect.Source
    greedy: collect.Source | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures by metric name, and every completion for the log."""

    metrics: dict[str, float]
    rows: list[dict]


def compile_evaluator(parts: setup.Parts, pool: pools.Pool) -> Evaluator:
    """Compile the sampled and, if asked for, the greedy engine."""
    cfg = parts.cfg.eval
    root = setup.key(parts, setup.EVALUATION)

    def source(samples: int, **changes: object) -> collect.Source:
        engine = engines.compile_engine(
            parts.spec, setup.sampling(parts, **changes), parts.mesh,
            **setup.engine_shape(parts, samples) | {"slots": parts.cfg.rollout.slots[-1:]})
        return collect.Source(engine, root, parts.eval_table, parts.tokenizer, pool,
                              config.Overlong(), stop_texts=parts.stop_texts)

    sampled = source(cfg.samples, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    return Evaluator(sampled, source(1, temperature=0.0) if cfg.greedy else None)


def evaluate(evaluator: Evaluator, params: types.Tree, *, step: int) -> Outcome:
    """Sample every held-out prompt; the same prompts draw the same numbers at every step."""
    sampled = _sample(evaluator.sampled, params, step)
    table = evaluator.sampled.table
    correct, answers = _by_prompt(sampled, table)
    count = correct.shape[1]
    metrics = {f"eval/avg@{count}": float(correct.mean()),
               f"eval/maj@{count}": float(np.mean([majority(*row) for row in
                                                   zip(correct, answers, strict=True)]))}
    metrics |= {f"eval/pass@{k}": float(np.mean([pass_at_k(count, int(row.sum()), k)
                                                 for row in correct]))
                for k in _powers(count)}
    metrics |= {f"eval/level_{level}": float(np.mean(values))
                for level, values in _by_level(correct, table).items()}
    metrics["eval/truncated"] = float(1 - sampled.samples.stopped.mean())
    metrics["eval/length"] = float(sampled.samples.length.mean())
    rounds = [sampled]
    if evaluator.greedy:
        rounds.append(_sample(evaluator.greedy, params, step))
        metrics["eval/greedy"] = float((rounds[-1].samples.reward > 0.5).mean())
    return Outcome(metrics, collect.rows(rounds, table, step=step, kept=None, limit=0))


def _sample(source: collect.Source, params: types.Tree, step: int) -> collect.Round:
    ids = np.arange(len(source.table), dtype=np.int32)
    plan = types.Plan(prompt=ids, visit=np.zeros_like(ids), group=ids,
                      size=np.full_like(ids, source.engine.share))
    return collect.sample_round(source, params, plan, step=step)


def _by_prompt(
    sampled: collect.Round, table: types.PromptTable
) -> tuple[np.ndarray, list[list[str]]]:
    """Right or wrong bool[Q, k] and the extracted answers; rows come in plan order."""
    correct = (sampled.samples.reward > 0.5).reshape(len(table), -1)
    answers = [math_answers.extract(text) or text.strip() for text in sampled.texts]
    count = correct.shape[1]
    return correct, [answers[start:start + count] for start in range(0, len(answers), count)]


def _by_level(correct: np.ndarray, table: types.PromptTable) -> dict[str, list[float]]:
    levels: dict[str, list[float]] = collections.defaultdict(list)
    for record, row in zip(table.records, correct, strict=True):
        if record.get("level") is not None:
            levels[str(record["level"])].append(float(row.mean()))
    return dict(sorted(levels.items()))


def _powers(count: int) -> list[int]:
    """2, 4, 8, ... and the count itself; pass@1 is avg@k."""
    return sorted({2**i for i in range(1, int(math.log2(count)) + 1)} | {count})


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k draws is right, from `correct` of `samples` (arXiv 2107.03374,
    equation 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(correct: Sequence[bool], answers: Sequence[str]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones the first counts."""
    winner = collections.Counter(answers).most_common(1)[0][0]
    return bool(correct[answers.index(winner)])


def _checkpointed(parts: setup.Parts, workdir: str, *, wanted: int) -> tuple[int, types.Tree]:
    """Step and parameters of the checkpoint of step `wanted`, or of the newest (-1)."""
    nothing = config.ConfigError(f"--workdir={workdir} holds no complete checkpoint")
    if not (pathlib.Path(workdir) / "checkpoints").is_dir():  # opening it would make it
        raise nothing
    manager = checkpoint.open_manager(workdir, keep=parts.cfg.checkpoint.keep)
    step = checkpoint.latest(manager) if wanted < 0 else wanted
    if step is None:
        raise nothing
    state = checkpoint.restore(manager, setup.like_state(parts, step), step=step)
    checkpoint.close(manager)
    return step, state.train.params


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.evaluate", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run"),
            "checkpoint": command_line.Flag(-1, "step; -1: the newest")})
    parts = setup.prepare(cfg)
    step, params = _checkpointed(parts, flags["workdir"], wanted=flags["checkpoint"])
    with pools.open(parts.reward, cfg.scoring) as pool:
        outcome = evaluate(compile_evaluator(parts, pool), params, step=step)
    print(json.dumps({"step": step, "prompts": len(parts.eval_table), **outcome.metrics}))
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
