"""The token-level loss, group advantages and dynamic sampling: the article's claims, tried here.

An arm is DAPO's loss and clip, without KL and entropy terms, but for what its name says.
"""

from dapo_jax.studies import arms, token_loss_page
from dapo_jax.studies import token_loss_claims as claims

PARTS = {"loss": "the mean over all tokens of an update against the mean of microbatch means",
         "advantage": "grpo, reinforce_baseline and dr_grpo"}
KINDS = {  # the article's name -> what it changes of the preset dapo
    claims.TOKEN: (),
    claims.MICROBATCH: ("rl.algorithm.weights=microbatch_token",),
    claims.REINFORCE: ("rl.algorithm.advantage=reinforce_baseline",),
    claims.DR_GRPO: ("rl.algorithm.advantage=dr_grpo", "rl.algorithm.weights=constant")}
OF_PART = {"loss": (claims.TOKEN, claims.MICROBATCH),
           "advantage": (claims.TOKEN, claims.REINFORCE, claims.DR_GRPO)}


def _both(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(claims.arm(kind, filtered=filtered) for kind in kinds
                 for filtered in (True, False))


PLAN = arms.Plan(
    arms.CONFIGS / "token_loss.py",
    {claims.arm(kind, filtered=filtered): (
        *arms.NOTHING_CARRIED, *changes, *(() if filtered else arms.UNFILTERED))
     for kind, changes in KINDS.items() for filtered in (True, False)},
    {part: _both(kinds) for part, kinds in OF_PART.items()},
    (*arms.TINY, "rollout.max_new_tokens=12", "sft.completion_buckets=(12,)",
     "rl.microbatch_slots=2", "rl.completion_buckets=(12,)"))
STUDY = arms.study(PLAN, PARTS, token_loss_page.write)
