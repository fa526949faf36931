"""Studies whose runs differ by arm: a warm start for each seed, from which every arm goes on.

DIR/warm/seed_S      the warm start (SFT) of a seed; all runs of the seed begin from a copy of it
DIR/runs/ARM/seed_S  the arms, each with its own changes of the study's configuration
DIR/logs             what each process printed
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from dapo_jax.runtime import status_line
from dapo_jax.studies import arm_findings, base, jobs, runs

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs/studies"
DYNAMIC = "dynamic_sampling"
# Every request is for what fills the batch; surplus groups are dropped, so that all is on policy.
NOTHING_CARRIED = (f"{DYNAMIC}.carry_steps=0",)
UNFILTERED = ("filter.enable=False", f"{DYNAMIC}.predictor.kind=fixed",
              f"{DYNAMIC}.predictor.multiplier=1.0")
TINY = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=2",
        "model.head_size=8", "model.ff=16", "task.levels=((1,1.0),)", "task.train_size=40",
        "task.reward=dapo_jax.envs.coin:score", "prompts.buckets=(4,)", "rollout.slots=(8,)",
        "sft.steps=1", "sft.prompts_per_step=4", "sft.microbatch_slots=4", "rl.steps=4",
        "rl.prompts_per_step=4", "rl.samples_per_prompt=4", f"{DYNAMIC}.at_limit=partial",
        "eval.every=2", "eval.prompts=4", "eval.samples=2", "checkpoint.every=0")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the runs of a study are."""

    config: pathlib.Path  # what all runs have in common
    arms: Mapping[str, Sequence[str]]  # arm -> its changes, a.b=VALUE
    parts: Mapping[str, Sequence[str]]  # part of the study -> its arms
    quick: Sequence[str]  # changes that make a run tiny


def study(plan: Plan, parts: Mapping[str, str],
          write: Callable[..., Sequence[pathlib.Path]]) -> base.Study:
    """The study of a plan; `parts` describes them, and `write(out, findings, failures, quick=)`
    makes the page of what was found."""

    def run(options: base.Options, signals: Sequence[int], show: status_line.Show) -> base.Result:
        failures: list[jobs.Failure] = []
        for stage in stages(plan, options):
            failures += jobs.run(stage, at_once=options.at_once, signals=signals, show=show)
            if signals:
                return base.Result((), failures)
        found = arm_findings.read(workdirs(plan, options))
        return base.Result(write(options.out, found, failures, quick=options.quick), failures)

    return base.Study(parts, run)


def stages(plan: Plan, options: base.Options) -> list[list[jobs.Job]]:
    """The warm starts, then the arms of the parts that are asked for; arms of a seed follow each
    other, so that a busy hour falls on all of them."""
    wanted = {arm for part in options.only for arm in plan.parts[part]}
    return [[runs.job(_warm(plan, options, seed)) for seed in range(options.seeds)],
            [runs.job(_run(plan, options, arm, seed), warm=_warm(plan, options, seed))
             for seed in range(options.seeds) for arm in plan.arms if arm in wanted]]


def workdirs(plan: Plan, options: base.Options) -> dict[str, dict[int, pathlib.Path]]:
    """Where the runs of all arms are, of each seed."""
    return {arm: {seed: _run(plan, options, arm, seed).workdir for seed in range(options.seeds)}
            for arm in plan.arms}


def folder(arm: str) -> str:
    """The name of an arm's folder."""
    plain = "".join(sign if sign.isalnum() or sign in "-_." else " " for sign in arm)
    return "_".join(plain.split())


def _warm(plan: Plan, options: base.Options, seed: int) -> runs.Run:
    return runs.Run(plan.config, options.out, f"warm/seed_{seed}",
                    (*_common(plan, options), f"seed={seed}", "rl.steps=0"))


def _run(plan: Plan, options: base.Options, arm: str, seed: int) -> runs.Run:
    return runs.Run(plan.config, options.out, f"runs/{folder(arm)}/seed_{seed}",
                    (*_common(plan, options), *plan.arms[arm], f"seed={seed}"))


def _common(plan: Plan, options: base.Options) -> Sequence[str]:
    return plan.quick if options.quick else ()
