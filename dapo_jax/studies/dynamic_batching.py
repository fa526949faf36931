"""Dynamic sampling with dynamic batching: the source's table, measured on real rollouts here.

DIR/warm/seed_S       the warm start (SFT) of a seed; all runs of the seed begin from a copy of it
DIR/times.json        part a: seconds of rounds of several sizes
DIR/recorded/G        part b: a run that samples six times its need and keeps all outcomes
DIR/live/ARM/seed_S   part c: runs that learn from what each way of asking gives them
DIR/logs              what each process printed
"""

from collections.abc import Sequence

from dapo_jax.runtime import status_line
from dapo_jax.studies import (
    arms,
    base,
    dynamic_batching_findings,
    dynamic_batching_page,
    jobs,
    runs,
)

CONFIG = arms.CONFIGS / "dynamic_batching.py"
PARTS = {"a": "seconds of a round against its prompts and samples",
         "b": "a recorded run for each group size, replayed under every policy",
         "c": "live runs: reward and held-out accuracy against time"}
DYNAMIC = arms.DYNAMIC
DROPPED = arms.NOTHING_CARRIED  # surplus groups are dropped, as the source drops them
ARMS = {
    "fixed 3 N": (f"{DYNAMIC}.predictor.kind=fixed", f"{DYNAMIC}.predictor.multiplier=3.0",
                  *DROPPED),
    "window": (f"{DYNAMIC}.predictor.kind=window", *DROPPED),
    "cost_optimal + carry + skip": (
        f"{DYNAMIC}.predictor.kind=cost_optimal", f"{DYNAMIC}.carry_steps=1",
        f"{DYNAMIC}.carry_share=0.25", f"{DYNAMIC}.choice.kind=skip"),
    "no filter": (*arms.UNFILTERED, *DROPPED)}
RECORDED = (f"{DYNAMIC}.predictor.kind=fixed", f"{DYNAMIC}.predictor.multiplier=6.0", *DROPPED,
            "log.samples_per_step=0", "eval.every=0", "rl.prompts_per_step=32",
            "rl.microbatch_slots=32", "rl.steps=200")
SIZES = (8, 16, 32)  # G
QUICK_SIZES = (4, 8)
ROUNDS = {"prompts": "16,32,64,96,128,192,256,384", "repeats": "5"}
QUICK_ROUNDS = {"prompts": "2,4,8", "repeats": "2"}
QUICK = (*arms.TINY, "rollout.max_new_tokens=3", "rl.microbatch_slots=4",
         f"{DYNAMIC}.predictor.window=2")


def run(options: base.Options, signals: Sequence[int], show: status_line.Show) -> base.Result:
    """Run the parts that are asked for, then write the page from all that is there."""
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
    stages = [[runs.job(_warm(options, seed)) for seed in seeds]]
    if "a" in options.only:
        stages.append([_times(options)])
    if "b" in options.only:
        stages.append([runs.job(_recorded(options, size), warm=_warm(options, 0))
                       for size in _sizes(options)])
    if "c" in options.only:  # arms take turns, so that a busy hour falls on all of them
        stages.append([runs.job(_live(options, arm, seed), warm=_warm(options, seed))
                       for seed in seeds for arm in ARMS])
    return stages


def _seeds(options: base.Options) -> list[int]:
    return list(range(options.seeds))


def _sizes(options: base.Options) -> tuple[int, ...]:
    return QUICK_SIZES if options.quick else SIZES


def _warm(options: base.Options, seed: int) -> runs.Run:
    return runs.Run(CONFIG, options.out, f"warm/seed_{seed}",
                    (*_common(options), f"seed={seed}", "rl.steps=0"))


def _recorded(options: base.Options, size: int) -> runs.Run:
    return runs.Run(CONFIG, options.out, f"recorded/{size}",
                    (*RECORDED, *_common(options), f"rl.samples_per_prompt={size}"))


def _live(options: base.Options, arm: str, seed: int) -> runs.Run:
    name = f"live/{arm.replace(' + ', '_').replace(' ', '_')}/seed_{seed}"
    return runs.Run(CONFIG, options.out, name, (*_common(options), *ARMS[arm], f"seed={seed}"))


def _common(options: base.Options) -> tuple[str, ...]:
    return QUICK if options.quick else ()


def _times(options: base.Options) -> jobs.Job:
    warm, out = _warm(options, 0), options.out / "times.json"
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    arguments = ("-m", "dapo_jax.studies.round_times", *runs.flags(warm), f"--out={out}",
                 f"--samples={','.join(map(str, _sizes(options)))}",
                 *(f"--{name}={value}" for name, value in rounds.items()))
    return jobs.Job("times", arguments, runs.log(options.out, "times"), done=out.is_file)


STUDY = base.Study(PARTS, run)
