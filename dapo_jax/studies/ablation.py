"""DAPO's ladder in miniature: naive GRPO, and its techniques one after another."""

from dapo_jax.studies import ablation_page, arms

CONFIG = arms.CONFIGS / "ablation.py"
LADDER = ablation_page.LADDER
# In the paper's order. The shared configuration is DAPO, so a rung is DAPO without what follows it.
WITHOUT = {  # rung -> what a run below it has
    "+ soft overlong": ("overlong.cache=0",),
    "+ clip-higher": ("rl.algorithm.clip_high=0.2",),
    "+ token loss": ("rl.algorithm.weights=sequence",),
    "+ dynamic sampling": arms.UNFILTERED}


def changes(arm: str) -> tuple[str, ...]:
    """What a rung changes of the shared configuration."""
    left = LADDER[LADDER.index(arm) + 1:]
    return (*arms.NOTHING_CARRIED, *(change for rung in left for change in WITHOUT[rung]))


PLAN = arms.Plan(
    CONFIG, {arm: changes(arm) for arm in LADDER}, {"ladder": LADDER},
    (*arms.TINY, "rollout.max_new_tokens=12", "overlong.cache=4", "sft.completion_buckets=(12,)",
     "rl.completion_buckets=(12,)", "rl.microbatch_slots=2", "rl.updates_per_step=2"))
STUDY = arms.study(PLAN, {"ladder": "naive GRPO, and DAPO's techniques added one by one"},
                   ablation_page.write)
