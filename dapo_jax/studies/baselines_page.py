"""The page of the study of baselines."""

import pathlib
from collections.abc import Sequence

from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import arm_page, jobs, verdicts

NAME = "baselines"
TITLE = "Baselines side by side on the default run's sums"
GRPO, REINFORCE, DR_GRPO, RLOO = PRESETS = ("grpo", "reinforce_baseline", "dr_grpo", "rloo")
END = "held-out accuracy, last quarter"
NOTES = (
    "All arms learn from every prompt that they sample, 64 x 8 samples a step, without KL, at the "
    "default run's learning rate, which was chosen for none of them. Presets are those of "
    "learner/algorithms.py.",
    "Answers here are 2 to 6 tokens long: what divides by lengths (grpo) or does not (dr_grpo, "
    "rloo) differs little.")


def claims(found: findings.Findings) -> list[verdicts.Claim]:
    """What the sources say of the four, as far as it can be measured here."""
    return [
        arm_page.claimed(found, "GRPO is faster early than reinforce_baseline",
                         "gain of held-out accuracy, mean of the first third", GRPO, REINFORCE,
                         findings.early_accuracy, source="the article"),
        arm_page.claimed(found, "reinforce_baseline is steadier than GRPO",
                         "deviation / mean of the gradient norm after the first fifth", REINFORCE,
                         GRPO, findings.unsteadiness, sign=-1, source="the article"),
        arm_page.claimed(found, "Dr. GRPO ends no worse than GRPO: here, it ends better", END,
                         DR_GRPO, GRPO, findings.final_accuracy, source="arXiv 2503.20783"),
        arm_page.claimed(found, "RLOO matches clipped policy gradients: here, it ends better", END,
                         RLOO, GRPO, findings.final_accuracy, source="arXiv 2402.14740"),
        *(arm_page.claimed(found, f"{name} learns: it ends above its warm start",
                           f"{END}, less the start", name, "", _gain, source="-")
          for name in PRESETS)]


def _gain(one: findings.Curve) -> float:
    return findings.final_accuracy(one) - float(one.accuracy[0])


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/baselines.md, its data and figure; returns their paths."""
    return arm_page.write(out, NAME, TITLE, found, claims(found), failures, notes=NOTES,
                          figure=NAME, arms=PRESETS, quick=quick)
