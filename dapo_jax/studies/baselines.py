"""GRPO, Dr. GRPO, RLOO and REINFORCE with a baseline on the default run's sums, side by side."""

from dapo_jax.studies import arms, baselines_page

ARMS = {name: (f"rl.algorithm.preset={name}",) for name in baselines_page.PRESETS}
PLAN = arms.Plan(arms.CONFIGS / "baselines.py", ARMS, {"presets": tuple(ARMS)},
                 (*arms.TINY, "rollout.max_new_tokens=3", "rl.microbatch_slots=4"))
STUDY = arms.study(PLAN, {"presets": "grpo, dr_grpo, rloo and reinforce_baseline, no filter"},
                   baselines_page.write)
