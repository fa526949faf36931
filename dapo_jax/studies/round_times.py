"""Seconds of one round of rollouts against its prompts and samples, on a trained model.

    python -m dapo_jax.studies.round_times --config=FILE --workdir=DIR --out=FILE.json
        [--prompts=16,32,64] [--samples=8,16,32] [--repeats=5] [--config.a.b=VALUE ...]

Generates through the engine of training, from the newest checkpoint in DIR, for other prompts each
time. Repeats go around all sizes, so that a busy minute of the machine falls on all of them.
Scoring is not timed. `a + c n G` is fitted to what comes out by fit_times.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from dapo_jax import command_line, config, evaluate, setup, types
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import status_line

SEED = 0


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Least squares of seconds = round + sample n G, with 95 % intervals."""

    round: comparison.Interval
    sample: comparison.Interval
    r_squared: float  # of all calls
    r_squared_medians: float  # of the medians of the calls of one size
    deviation: float  # seconds, of what is left


def measured(parts: setup.Parts, params: types.Tree, *, prompts: Sequence[int],
             samples: Sequence[int], repeats: int, show: status_line.Show) -> list[dict[str, Any]]:
    """A row per call: prompts, samples of each, tokens drawn, seconds of wall and processor."""
    engine = {size: engines.compile_engine(
        parts.spec, setup.sampling(parts), parts.mesh, **setup.engine_shape(parts, size))
        for size in samples}
    root, rng, rows = setup.key(parts, setup.ROLLOUT), np.random.default_rng(SEED), []
    for repeat in range(repeats + 1):  # the first calls are slower and not kept
        for size in samples:
            for count in prompts:
                show(f"repeat {repeat} of {repeats}: {count} prompts, G = {size}")
                plan = _plan(rng, len(parts.train_table), count, size)
                begun, used = time.perf_counter(), time.process_time()
                drawn = engines.sample(engine[size], params, plan, table=parts.train_table,
                                       root=root, step=repeat).samples
                rows.append({
                    "repeat": repeat, "prompts": count, "samples": size,
                    "tokens": int(drawn.length.sum()), "seconds": time.perf_counter() - begun,
                    "processor": time.process_time() - used})
    return [row for row in rows if row["repeat"]]


def _plan(rng: np.random.Generator, table: int, count: int, size: int) -> types.Plan:
    ids = rng.choice(table, count, replace=False).astype(np.int32)
    return types.Plan(prompt=ids, visit=np.zeros_like(ids), group=np.arange(count, dtype=np.int32),
                      size=np.full(count, size, np.int32))


def fit_times(rows: Sequence[Mapping[str, float]], clock: str = "seconds") -> Fitted:
    """The line through the rows of `measured`: all calls count, Student's intervals."""
    total = np.array([row["prompts"] * row["samples"] for row in rows], np.float64)
    seconds = np.array([row[clock] for row in rows], np.float64)
    columns = np.stack([np.ones_like(total), total], 1)
    (first, slope), *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    rest, freedom = seconds - columns @ [first, slope], len(rows) - 2
    deviation = float(np.sqrt(np.sum(rest ** 2) / freedom))
    spread = np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)))
    half = special.stdtrit(freedom, 0.5 + comparison.LEVEL / 2) * deviation * spread
    sizes = sorted({(row["prompts"], row["samples"]) for row in rows})
    cells = [[row[clock] for row in rows if (row["prompts"], row["samples"]) == size]
             for size in sizes]
    middle, line = np.array([np.median(cell) for cell in cells]), np.array(
        [first + slope * count * each for count, each in sizes])
    ends = [comparison.Interval(float(value), float(value - reach), float(value + reach))
            for value, reach in zip((first, slope), half, strict=True)]
    return Fitted(ends[0], ends[1], _explained(seconds, rest), _explained(middle, middle - line),
                  deviation)


def _explained(values: np.ndarray, rest: np.ndarray) -> float:
    spread = np.sum((values - np.mean(values)) ** 2)
    return float(1 - np.sum(rest ** 2) / spread) if spread else float("nan")


def _sizes(name: str, text: str, most: int) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > most:
        raise config.ConfigError(f"--{name}={text}: whole numbers from 1 to {most}, with commas")
    return sizes


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    cfg, flags = command_line.parse(
        arguments, program="python -m dapo_jax.studies.round_times", purpose=__doc__, extra={
            "workdir": command_line.Flag(None, "directory of the run whose model is used"),
            "out": command_line.Flag(None, "file for the rows as JSON"),
            "prompts": command_line.Flag("16,32,64", "prompts of a round"),
            "samples": command_line.Flag("8,16,32", "samples of a prompt"),
            "repeats": command_line.Flag(5, "calls of each size")})
    parts = setup.prepare(cfg)
    prompts = _sizes("prompts", flags["prompts"], len(parts.train_table))
    samples = _sizes("samples", flags["samples"], 4096)
    if flags["repeats"] < 1 or len(prompts) * len(samples) * flags["repeats"] < 3:
        raise config.ConfigError("a line takes at least 3 calls: give more sizes or --repeats")
    step, params = evaluate.checkpointed(parts, flags["workdir"], wanted=-1)
    show = status_line.opened()
    rows = measured(parts, params, prompts=prompts, samples=samples, repeats=flags["repeats"],
                    show=show)
    show("")
    out = pathlib.Path(flags["out"])
    fresh = out.with_suffix(".tmp")
    fresh.write_text(json.dumps({"step": step, "rows": rows}) + "\n", encoding="utf-8")
    fresh.replace(out)
    print(out, file=sys.stderr)
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
