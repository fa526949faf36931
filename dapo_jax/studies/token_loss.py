"""The token-level loss, group advantages and dynamic sampling: the article's claims, tried here.

DIR/warm/seed_S     the warm start (SFT) of a seed; all runs of the seed begin from a copy of it
DIR/runs/ARM/seed_S the arms: DAPO's loss and clip, no KL and no entropy term, but for what ARM says
DIR/logs            what each process printed
"""

import pathlib
from collections.abc import Sequence

from dapo_jax.runtime import status_line
from dapo_jax.studies import base, jobs, runs, token_loss_findings, token_loss_page
from dapo_jax.studies import token_loss_claims as claims

CONFIG = pathlib.Path(__file__).parent.parent.parent / "configs/studies/token_loss.py"
PARTS = {"loss": "the mean over all tokens of an update against the mean of microbatch means",
         "advantage": "grpo, reinforce_baseline and dr_grpo"}
DYNAMIC = "dynamic_sampling"
# Every request is for what fills the batch; surplus groups are dropped, so that all is on policy.
SHARED = (f"{DYNAMIC}.carry_steps=0",)
UNFILTERED = ("filter.enable=False", f"{DYNAMIC}.predictor.kind=fixed",
              f"{DYNAMIC}.predictor.multiplier=1.0")
KINDS = {  # the article's name -> what it changes of the preset dapo
    claims.TOKEN: (),
    claims.MICROBATCH: ("rl.algorithm.weights=microbatch_token",),
    claims.REINFORCE: ("rl.algorithm.advantage=reinforce_baseline",),
    claims.DR_GRPO: ("rl.algorithm.advantage=dr_grpo", "rl.algorithm.weights=constant")}
ARMS = {claims.arm(kind, filtered=filtered): (*SHARED, *changes, *(() if filtered else UNFILTERED))
        for kind, changes in KINDS.items() for filtered in (True, False)}
OF_PART = {"loss": (claims.TOKEN, claims.MICROBATCH),
           "advantage": (claims.TOKEN, claims.REINFORCE, claims.DR_GRPO)}
QUICK = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=2",
         "model.head_size=8", "model.ff=16", "task.levels=((1,1.0),)", "task.train_size=40",
         "task.reward=dapo_jax.envs.coin:score", "prompts.buckets=(4,)", "rollout.slots=(8,)",
         "rollout.max_new_tokens=12", "sft.steps=1", "sft.prompts_per_step=4",
         "sft.microbatch_slots=4", "sft.completion_buckets=(12,)", "rl.steps=4",
         "rl.prompts_per_step=4", "rl.samples_per_prompt=4", "rl.microbatch_slots=2",
         "rl.completion_buckets=(12,)", f"{DYNAMIC}.at_limit=partial", "eval.every=2",
         "eval.prompts=4", "eval.samples=2", "checkpoint.every=0")


def run(options: base.Options, signals: Sequence[int], show: status_line.Show) -> base.Result:
    """Run the parts that are asked for, then write the page from all that is there."""
    failures: list[jobs.Failure] = []
    for stage in _stages(options):
        failures += jobs.run(stage, at_once=options.at_once, signals=signals, show=show)
        if signals:
            return base.Result((), failures)
    found = token_loss_findings.read({arm: {
        seed: _arm(options, arm, seed).workdir for seed in range(options.seeds)} for arm in ARMS})
    return base.Result(token_loss_page.write(options.out, found, failures, quick=options.quick),
                       failures)


def _stages(options: base.Options) -> list[list[jobs.Job]]:
    """The warm starts, then the arms; arms of a seed follow each other."""
    kinds = [kind for kind in KINDS if any(kind in OF_PART[part] for part in options.only)]
    arms = [claims.arm(kind, filtered=filtered) for kind in kinds for filtered in (True, False)]
    return [[runs.job(_warm(options, seed)) for seed in range(options.seeds)],
            [runs.job(_arm(options, arm, seed), warm=_warm(options, seed))
             for seed in range(options.seeds) for arm in arms]]


def _warm(options: base.Options, seed: int) -> runs.Run:
    return runs.Run(CONFIG, options.out, f"warm/seed_{seed}",
                    (*_common(options), f"seed={seed}", "rl.steps=0"))


def _arm(options: base.Options, arm: str, seed: int) -> runs.Run:
    name = f"runs/{arm.replace(', ', '_').replace(' ', '_')}/seed_{seed}"
    return runs.Run(CONFIG, options.out, name, (*_common(options), *ARMS[arm], f"seed={seed}"))


def _common(options: base.Options) -> tuple[str, ...]:
    return QUICK if options.quick else ()


STUDY = base.Study(PARTS, run)
