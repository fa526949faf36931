"""Dynamic sampling with dynamic batching: the source's table, measured on real rollouts here.

DIR/warm/seed_S       the warm start (SFT) of a seed; all runs of the seed begin from a copy of it
DIR/times.json        part a: seconds of rounds of several sizes
DIR/recorded/G        part b: a run that samples six times its need and keeps all outcomes
DIR/live/ARM/seed_S   part c: runs that learn from what each way of asking gives them
DIR/logs              what each process printed
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

from dapo_jax import command_line, config, train
from dapo_jax.runtime import checkpoint, metrics, status_line
from dapo_jax.studies import (
    base,
    dynamic_batching_findings,
    dynamic_batching_page,
    jobs,
    learning,
)

CONFIG = pathlib.Path(__file__).parent.parent.parent / "configs/studies/dynamic_batching.py"
PARTS = {"a": "seconds of a round against its prompts and samples",
         "b": "a recorded run for each group size, replayed under every policy",
         "c": "live runs: reward and held-out accuracy against time"}
DYNAMIC = "dynamic_sampling"
DROPPED = (f"{DYNAMIC}.carry_steps=0",)  # surplus groups are dropped, as the source drops them
ARMS = {
    "fixed 3 N": (f"{DYNAMIC}.predictor.kind=fixed", f"{DYNAMIC}.predictor.multiplier=3.0",
                  *DROPPED),
    "window": (f"{DYNAMIC}.predictor.kind=window", *DROPPED),
    "cost_optimal + carry + skip": (
        f"{DYNAMIC}.predictor.kind=cost_optimal", f"{DYNAMIC}.carry_steps=1",
        f"{DYNAMIC}.carry_share=0.25", f"{DYNAMIC}.choice.kind=skip"),
    "no filter": ("filter.enable=False", f"{DYNAMIC}.predictor.kind=fixed",
                  f"{DYNAMIC}.predictor.multiplier=1.0", *DROPPED)}
RECORDED = (f"{DYNAMIC}.predictor.kind=fixed", f"{DYNAMIC}.predictor.multiplier=6.0", *DROPPED,
            "log.samples_per_step=0", "eval.every=0", "rl.prompts_per_step=32",
            "rl.microbatch_slots=32", "rl.steps=200")
SIZES = (8, 16, 32)  # G
QUICK_SIZES = (4, 8)
ROUNDS = {"prompts": "16,32,64,96,128,192,256,384", "repeats": "5"}
QUICK_ROUNDS = {"prompts": "2,4,8", "repeats": "2"}
QUICK = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=2",
         "model.head_size=8", "model.ff=16", "task.levels=((1,1.0),)", "task.train_size=40",
         "task.reward=dapo_jax.envs.coin:score", "prompts.buckets=(4,)", "rollout.slots=(8,)",
         "rollout.max_new_tokens=3", "sft.steps=1", "sft.prompts_per_step=4",
         "sft.microbatch_slots=4", "rl.steps=4", "rl.prompts_per_step=4",
         "rl.samples_per_prompt=4", "rl.microbatch_slots=4", f"{DYNAMIC}.predictor.window=2",
         f"{DYNAMIC}.at_limit=partial", "eval.every=2", "eval.prompts=4", "eval.samples=2",
         "checkpoint.every=0")


@dataclasses.dataclass(frozen=True)
class _Run:
    """A work directory that the train command fills."""

    name: str
    workdir: pathlib.Path
    changes: tuple[str, ...]  # a.b=VALUE, the later ones win


def run(options: base.Options, signals: Sequence[int], show: status_line.Show) -> base.Result:
    """Run the parts that are asked for, then write the page from all that is there."""
    if not CONFIG.is_file():
        raise config.ConfigError(f"{CONFIG} does not exist: run this from the project's folder")
    failures: list[jobs.Failure] = []
    for stage in _stages(options):
        at_once = 1 if stage[0].name == "times" else options.at_once  # nothing beside what is timed
        failures += jobs.run(stage, at_once=at_once, signals=signals, show=show)
        if signals:
            return base.Result((), failures)
    where = dynamic_batching_findings.Where(
        options.out, options.out / "times.json",
        {size: _recorded(options, size).workdir for size in _sizes(options)},
        {arm: {seed: _live(options, arm, seed).workdir for seed in _seeds(options)}
         for arm in ARMS})
    found = dynamic_batching_findings.read(where, show)
    show("")
    return base.Result(dynamic_batching_page.write(
        options.out, found, failures, quick=options.quick), failures)


def _stages(options: base.Options) -> list[list[jobs.Job]]:
    """Jobs in groups that follow each other; one of a group does not need another of it."""
    seeds = _seeds(options) if "c" in options.only else [0]
    stages = [[_train(options, _warm(options, seed)) for seed in seeds]]
    if "a" in options.only:
        stages.append([_times(options)])
    if "b" in options.only:
        stages.append([_train(options, _recorded(options, size), warm=0)
                       for size in _sizes(options)])
    if "c" in options.only:  # arms take turns, so that a busy hour falls on all of them
        stages.append([_train(options, _live(options, arm, seed), warm=seed)
                       for seed in seeds for arm in ARMS])
    return stages


def _seeds(options: base.Options) -> list[int]:
    return list(range(options.seeds))


def _sizes(options: base.Options) -> tuple[int, ...]:
    return QUICK_SIZES if options.quick else SIZES


def _warm(options: base.Options, seed: int) -> _Run:
    return _Run(f"warm/seed_{seed}", options.out / f"warm/seed_{seed}",
                (*_common(options), f"seed={seed}", "rl.steps=0"))


def _recorded(options: base.Options, size: int) -> _Run:
    return _Run(f"recorded/{size}", options.out / f"recorded/{size}",
                (*RECORDED, *_common(options), f"rl.samples_per_prompt={size}"))


def _live(options: base.Options, arm: str, seed: int) -> _Run:
    name = f"live/{arm.replace(' + ', '_').replace(' ', '_')}/seed_{seed}"
    return _Run(name, options.out / name, (*_common(options), *ARMS[arm], f"seed={seed}"))


def _common(options: base.Options) -> tuple[str, ...]:
    return QUICK if options.quick else ()


def _flags(one: _Run) -> list[str]:
    changed = dict(change.split("=", 1) for change in one.changes)
    return [f"--config={CONFIG}", f"--workdir={one.workdir}",
            *(f"--config.{name}={value}" for name, value in changed.items())]


def _train(options: base.Options, one: _Run, *, warm: int | None = None) -> jobs.Job:
    """The job of a run; `warm`: it begins from this seed's warm start.

    Raises ConfigError if the directory holds a run of another configuration.
    """
    cfg, _ = command_line.parse(_flags(one), program="python -m dapo_jax.train", purpose="",
                                extra={"workdir": command_line.Flag(None, "")})
    checkpoint.check_config(one.workdir, config.to_json(cfg), free=train.FREE)
    last = cfg.sft.steps + cfg.rl.steps

    def prepare() -> None:
        if warm is not None and not (one.workdir / "config.json").exists():
            _adopt(_warm(options, warm).workdir, one.workdir, cfg)

    return jobs.Job(
        one.name, ("-m", "dapo_jax.train", *_flags(one)), _log(options, one.name),
        done=lambda: (learning.finished(one.workdir)
                      and (one.workdir / "checkpoints" / str(last)).is_dir()),
        status=lambda: f"step {_step(one.workdir)}/{last}", prepare=prepare)


def _adopt(source: pathlib.Path, workdir: pathlib.Path, cfg: config.Config) -> None:
    """Make `workdir` a run of `cfg` that stands where the run in `source` ended.

    The state after SFT does not depend on what differs here; equal settings would give it again,
    in a quarter of a run's time.
    """
    if not (source / "checkpoints").is_dir():
        return  # the warm start failed: the run makes its own
    fresh = workdir.with_name(workdir.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shutil.copytree(source / "checkpoints", fresh / "checkpoints")
    shutil.copy(source / "metrics.jsonl", fresh / "metrics.jsonl")
    stored = json.loads((source / "config.json").read_text(encoding="utf-8"))
    checkpoint.write_config(
        fresh, config.to_json(cfg) | {"_environment": stored["_environment"]})
    shutil.rmtree(workdir, ignore_errors=True)  # without a config.json there is nothing in it
    fresh.replace(workdir)


def _times(options: base.Options) -> jobs.Job:
    warm, out = _warm(options, 0), options.out / "times.json"
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    arguments = ("-m", "dapo_jax.studies.round_times", *_flags(warm), f"--out={out}",
                 f"--samples={','.join(map(str, _sizes(options)))}",
                 *(f"--{name}={value}" for name, value in rounds.items()))
    return jobs.Job("times", arguments, _log(options, "times"), done=out.is_file)


def _log(options: base.Options, name: str) -> pathlib.Path:
    return options.out / "logs" / f"{name.replace('/', '_')}.txt"


def _step(workdir: pathlib.Path) -> int:
    """The newest step that the run has logged."""
    path = workdir / "metrics.jsonl"
    lines = metrics.whole_lines(path.read_bytes()) if path.is_file() else []
    return json.loads(lines[-1])["step"] if lines else 0


STUDY = base.Study(PARTS, run)
