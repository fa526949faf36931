"""DAPO's ladder in miniature: naive GRPO, and its techniques one after another."""

from dapo_jax.studies import ablation_page, arms

CONFIG = arms.CONFIGS / "ablation.py"
# In the paper's order. The shared configuration is DAPO, so a rung is DAPO without what follows it.
# The soft penalty takes the filter's place: a sample that is masked would not feel it.
WITHOUT = {  # rung -> what a run without it has
    "+ overlong filter": (),
    "+ clip-higher": ("rl.algorithm.clip_high=0.2",),
    "+ soft overlong": ("overlong.cache=0",),
    "+ token loss": ("rl.algorithm.weights=sequence",),
    "+ dynamic sampling": arms.UNFILTERED}
LADDER = ablation_page.LADDER
FILTERED = ("+ overlong filter", "+ clip-higher")  # truncated samples are left out of the loss


def changes(arm: str) -> tuple[str, ...]:
    """What a rung changes of the shared configuration."""
    left = list(WITHOUT)[LADDER.index(arm):]
    filtered = ("overlong.mask=True",) if arm in FILTERED else ()
    return (*arms.NOTHING_CARRIED, *(change for one in left for change in WITHOUT[one]), *filtered)


PLAN = arms.Plan(
    CONFIG, {arm: changes(arm) for arm in LADDER}, {"ladder": LADDER},
    (*arms.TINY, "rollout.max_new_tokens=12", "overlong.cache=4", "sft.completion_buckets=(12,)",
     "rl.completion_buckets=(12,)", "rl.microbatch_slots=2", "rl.updates_per_step=2"))
STUDY = arms.study(PLAN, {"ladder": "naive GRPO, and DAPO's techniques added one by one"},
                   ablation_page.write)
