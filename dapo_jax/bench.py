"""Time sampling, updates or whole steps, against what the machine could do at best.

    python -m dapo_jax.bench rollout --config=configs/quickstart.py --lengths=uneven
    python -m dapo_jax.bench rollout|update|step --config=configs/quickstart.py [--repeats=5]
        [--lengths=equal|uneven] [--chip=NAME] [--out=FILE.json] [--config.a.b=VALUE ...]

rollout  completions of max_new_tokens tokens for rl.prompts_per_step prompts of the longest
         bucket. uneven: a budget for each prompt, one for all its samples, drawn from a heavy
         tail (lognormal, median 0.1 of the limit); how samples of one prompt that differ use
         rows is what rollout/bounds.py simulates
update   one optimizer update over as many full completions. MFU, where the chip is known (or named
         by --chip): operations without recomputation, of attention only what causality leaves,
         over the dense bfloat16 peak of its data sheet
step     steps of the configured RL phase, rewarded by a coin, in a folder that is removed

Prints a table: tokens per second of the wall clock and of processor time, compile seconds, peak
memory, the share of rows that drew a token, and operations and bytes per second beside those that
one matrix product and one copy reach in the same run. `--out` writes the same as JSON. Medians;
the spread stands beside them.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from dapo_jax import command_line, config, setup, setup_phases, train, types
from dapo_jax.learner import packing, update
from dapo_jax.models import cost
from dapo_jax.planning import chips
from dapo_jax.rollout import bounds
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import machine

PHASES = ("rollout", "reward", "pack", "update", "step")
SEED = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """What a timed call does."""

    tokens: int  # sampled, or trained on
    flops: float
    bytes: float  # least that has to be read; 0: not counted


def bench_rollout(cfg: config.Config, *, repeats: int, uneven: bool) -> dict[str, Any]:
    """Time the sampler on random prompts, with no token that ends a completion."""
    parts = setup.prepare(cfg)
    lengths = _lengths(cfg, uneven)
    table, plan = _prompts(parts, lengths)
    begun = time.perf_counter()
    engine = engines.compile_engine(
        parts.spec, setup.sampling(parts, stop_ids=()), parts.mesh,
        **setup.engine_shape(parts, cfg.rl.samples_per_prompt))
    compiled = time.perf_counter() - begun
    params, root = setup.initial_params(parts), setup.key(parts, setup.ROLLOUT)

    def sample() -> engines.Served:
        return engines.sample(engine, params, plan, table=table, root=root, step=1)

    served = sample()
    if served.use.live != lengths.sum() or (served.samples.length != lengths.reshape(-1)).any():
        raise AssertionError(f"{served.use.live} tokens were sampled, not {lengths.sum()}")
    prompts = np.full(len(lengths), cfg.prompts.buckets[-1])
    work = Work(int(lengths.sum()), cost.rollout(parts.spec, prompts, lengths),
                _bytes(parts, lengths, served.use, rows=engine.rows))
    figures = _figures(machine.timed(sample, repeats=repeats), work, parts, compiled, repeats)
    return figures | {"row use": served.use.row_use, "decode steps": served.use.steps}


def _bytes(parts: setup.Parts, lengths: np.ndarray, use: engines.Use, *, rows: int) -> float:
    """Least that the decode steps have to read: the weights in each, and the caches of live rows,
    a prompt's once for `rows` of them."""
    per_step = use.live / use.steps
    return use.steps * cost.decode_bytes(
        parts.spec, slots=per_step / rows, rows=per_step, prompt=parts.cfg.prompts.buckets[-1],
        mean_tokens=float((lengths * (lengths - 1) / 2).sum() / lengths.sum()),
        bytes_per_number=jnp.dtype(parts.spec.compute_dtype).itemsize)


def bench_update(cfg: config.Config, *, repeats: int, chip: chips.Chip | None = None
                 ) -> dict[str, Any]:
    """Time one optimizer update over full completions of random tokens."""
    parts = setup.prepare(cfg)
    phase = next((phase for phase in parts.phases if phase.name == "rl"), None)
    if phase is None:
        raise config.ConfigError("bench update times the RL phase: set config.rl.steps")
    lengths = _lengths(cfg, uneven=False)
    table, plan = _prompts(parts, lengths)
    samples = _completions(parts, plan, lengths)
    begun = time.perf_counter()
    settings = setup_phases.update_settings(phase.name, phase.cfg, phase.algorithm, cfg=parts.cfg,
                                            spec=parts.spec)
    programs = update.compile_programs(parts.spec, settings, phase.optimizer, parts.mesh,
                                       pack=phase.pack)
    compiled = time.perf_counter() - begun
    rng = np.random.default_rng(SEED)
    batches = packing.pack(
        samples, prompts=table, advantages=rng.normal(size=len(samples)).astype(np.float32),
        weights=np.full(samples.tokens.shape, 1 / samples.tokens.size, np.float32),
        fresh=np.ones(len(samples), bool), shape=phase.pack)
    base = setup.open_base(parts)
    state = [setup.fresh_train_state(parts, phase, setup.initial_trained(parts))]

    def step() -> types.TrainState:
        state[0], _ = update.update(programs, state[0], batches, base=base and base.params)
        return state[0]

    prompts = np.full(len(lengths), cfg.prompts.buckets[-1])
    work = Work(int(lengths.sum()), cost.update(parts.spec, prompts, lengths), 0.0)
    times = machine.timed(step, repeats=repeats)
    figures = _figures(times, work, parts, compiled, repeats)
    return figures | mfu(work.flops, times.median, chip, devices=parts.mesh.size)


def mfu(flops: float, seconds: float, chip: chips.Chip | None, *, devices: int) -> dict[str, float]:
    """The share of the devices' peaks that `flops` in so many seconds are; nothing without a
    chip."""
    return {} if chip is None else {
        f"MFU ({chip.name}, {chip.flops / 1e12:g} Tflop/s)": flops / seconds / devices / chip.flops}


def bench_step(cfg: config.Config, *, repeats: int) -> dict[str, Any]:
    """Run the RL phase for `repeats` steps after two that are not counted.

    The model is untrained and would get nothing right, so the reward is a coin (envs/coin.py).
    """
    cfg = dataclasses.replace(
        cfg, sft=dataclasses.replace(cfg.sft, steps=0, epochs=0),
        rl=dataclasses.replace(cfg.rl, steps=repeats + 2),
        task=dataclasses.replace(cfg.task, reward="dapo_jax.envs.coin:score"),
        eval=dataclasses.replace(cfg.eval, every=0, prompts=1, samples=1, greedy=False),
        checkpoint=dataclasses.replace(cfg.checkpoint, every=0))
    with tempfile.TemporaryDirectory() as workdir:
        status = train.train(cfg, workdir)
        if status != command_line.DONE:
            raise config.ConfigError(f"the run ended with status {status} before {repeats + 2} "
                                     "steps; it has to train as it is configured")
        text = (pathlib.Path(workdir) / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if line["phase"] == "rl"][2:]
    seconds = {phase: [line[f"time/{phase}"] for line in steps] for phase in PHASES}
    tokens = [line["sampling/tokens"] for line in steps]
    figures: dict[str, Any] = {
        f"{phase}: seconds": _spread(values) for phase, values in seconds.items()}
    return figures | {
        "tokens sampled per step": _spread(tokens),
        "sampled tokens per second of a step": _spread(
            [count / total for count, total in zip(tokens, seconds["step"])]),
        "peak memory, MiB": machine.peak_bytes() / 2 ** 20}


def _lengths(cfg: config.Config, uneven: bool) -> np.ndarray:
    """Completion lengths i64[prompts, G]: all at the limit, or one a prompt, lognormal with a
    median of 0.1 of it and 3 % at it."""
    limit = cfg.rollout.max_new_tokens
    if cfg.rollout.max_context:
        limit = min(limit, cfg.rollout.max_context - cfg.prompts.buckets[-1])
    shape = (cfg.rl.prompts_per_step, cfg.rl.samples_per_prompt)
    if not uneven:
        return np.full(shape, limit)
    drawn = bounds.heavy_tailed(shape[0], 1, limit=limit, seed=SEED)
    return np.broadcast_to(drawn, shape).astype(np.int64)


def _prompts(parts: setup.Parts, lengths: np.ndarray) -> tuple[types.PromptTable, types.Plan]:
    """Random prompts of the largest bucket and a plan that gives each group its length."""
    rng = np.random.default_rng(SEED)
    width = parts.cfg.prompts.buckets[-1]
    tokens = rng.integers(0, parts.tokenizer.vocab_size, (len(lengths), width), np.int32)
    table = types.PromptTable(tuple(tokens), ({"prompt": "", "answer": ""},) * len(tokens), ())
    return table, _plan(lengths)


def _plan(lengths: np.ndarray) -> types.Plan:
    count, samples = lengths.shape
    ids = np.arange(count, dtype=np.int32)
    return types.Plan(prompt=ids, visit=np.zeros_like(ids), group=ids,
                      size=np.full(count, samples, np.int32),
                      budget=lengths[:, 0].astype(np.int32))


def _completions(parts: setup.Parts, plan: types.Plan, lengths: np.ndarray) -> types.Samples:
    rng = np.random.default_rng(SEED)
    count, width = lengths.size, parts.cfg.rollout.max_new_tokens
    place = np.repeat(plan.prompt, lengths.shape[1])
    zeros, yes = np.zeros(count, np.int32), np.ones(count, bool)
    length = lengths.reshape(-1).astype(np.int32)
    return types.Samples(
        tokens=rng.integers(0, parts.tokenizer.vocab_size, (count, width)).astype(np.int32),
        loss_mask=np.arange(width) < length[:, None],
        logprobs=np.full((count, width), -1, np.float32), length=length, stopped=yes,
        reward=zeros.astype(np.float32), shaped=zeros.astype(np.float32), valid=yes, group=place,
        prompt=place, visit=zeros,
        sample=np.tile(np.arange(lengths.shape[1], dtype=np.int32), len(lengths)), born=zeros)


def _figures(times: machine.Times, work: Work, parts: setup.Parts, compiled: float,
             repeats: int) -> dict[str, Any]:
    limits = machine.measure(parts.spec.compute_dtype, repeats=repeats)
    rate = work.flops / times.median
    figures = {
        "seconds": _spread(times.all), "processor seconds": _spread(times.cpu),
        "tokens": work.tokens, "tokens per second": work.tokens / times.median,
        "tokens per processor second": work.tokens / times.cpu_median,
        "compile seconds": compiled, "peak memory, MiB": machine.peak_bytes() / 2 ** 20,
        "Gop/s": rate / 1e9, "Gop/s of one matrix product": limits.flops / 1e9,
        "share of the product's rate": rate / limits.flops}
    if work.bytes:
        read = work.bytes / times.median
        figures |= {"GB/s read at least": read / 1e9, "GB/s of one copy": limits.bytes / 1e9,
                    "share of the copy's rate": read / limits.bytes}
    return figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _show(figures: dict[str, Any], title: str) -> None:
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        if isinstance(value, dict):
            text = f"{value['median']:.4g} ({value['least']:.4g} to {value['most']:.4g})"
        else:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name, text)
    rich.console.Console().print(table)


BENCHES = ("rollout", "update", "step")


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    kind, rest = (arguments[0], arguments[1:]) if arguments else ("", arguments)
    if kind not in BENCHES and not {"--help", "-h", "-help"} & set(arguments):
        raise config.ConfigError(f"bench {kind!r}: say what to time first: {', '.join(BENCHES)}; "
                                 "see python -m dapo_jax.bench --help")
    cfg, flags = command_line.parse(
        rest if kind in BENCHES else arguments, program="python -m dapo_jax.bench", purpose=__doc__,
        extra={"repeats": command_line.Flag(5, "timed calls, or steps"),
               "lengths": command_line.Flag("equal", "rollout: equal or uneven"),
               "chip": command_line.Flag("", "update: accelerator whose peak MFU is a share of; "
                                         "empty: what JAX says it is"),
               "out": command_line.Flag("", "file for the figures as JSON")})
    if flags["lengths"] not in ("equal", "uneven"):
        raise config.ConfigError(f"--lengths={flags['lengths']}: equal or uneven")
    if flags["repeats"] < 1:
        raise config.ConfigError(f"--repeats={flags['repeats']}: at least 1")
    if cfg.environment.name and kind != "update":
        raise config.ConfigError(
            f"bench {kind} times completions of one turn, but config.environment.name = "
            f"{cfg.environment.name!r}: add --config.environment.name= for the same model without "
            "it (and reset what that names), or train some steps and read time/rollout and "
            "time/idle_share, which are of episodes")
    device = jax.devices()[0]
    chip = chips.find(flags["chip"]) if flags["chip"] else chips.of_device(device)
    if kind == "rollout":
        figures = bench_rollout(cfg, repeats=flags["repeats"],
                                uneven=flags["lengths"] == "uneven")
    elif kind == "update":
        figures = bench_update(cfg, repeats=flags["repeats"], chip=chip)
    else:
        figures = bench_step(cfg, repeats=flags["repeats"])
    where = f"{len(jax.devices())} x {device.device_kind}, jax {jax.__version__}"
    _show(figures, f"{kind} on {where}")
    if flags["out"]:
        pathlib.Path(flags["out"]).write_text(
            json.dumps({"kind": kind, "where": where} | figures, indent=1) + "\n",
            encoding="utf-8")
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
