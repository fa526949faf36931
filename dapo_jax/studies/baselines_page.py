"""The page of the study of baselines."""

import pathlib
from collections.abc import Sequence

from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import arm_page, jobs, pages, verdicts

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
        _claim(found, "GRPO is faster early than reinforce_baseline",
               "gain of held-out accuracy, mean of the first third", GRPO, REINFORCE,
               findings.early_accuracy, sign=1, source="the article"),
        _claim(found, "reinforce_baseline is steadier than GRPO",
               "deviation / mean of the gradient norm after the first fifth", REINFORCE, GRPO,
               findings.unsteadiness, sign=-1, source="the article"),
        _claim(found, "Dr. GRPO ends no worse than GRPO: here, it ends better", END, DR_GRPO, GRPO,
               findings.final_accuracy, sign=1, source="arXiv 2503.20783"),
        _claim(found, "RLOO matches clipped policy gradients: here, it ends better", END, RLOO,
               GRPO, findings.final_accuracy, sign=1, source="arXiv 2402.14740"),
        *(_claim(found, f"{name} learns: it ends above its warm start", f"{END}, less the start",
                 name, "", _gain, sign=1, source="-") for name in PRESETS)]


def _gain(one: findings.Curve) -> float:
    return findings.final_accuracy(one) - float(one.accuracy[0])


def _claim(found: findings.Findings, words: str, measure: str, own: str, other: str,
           figure: findings.Figure, *, sign: int, source: str) -> verdicts.Claim:
    """Of two arms, paired by seed; of one arm's figure itself where there is no other."""
    runs = found.arms.get(own, {})
    value = (findings.paired(runs, found.arms.get(other, {}), figure) if other
             else findings.interval([figure(one) for one in runs.values()]))
    setting = f"{own} against {other}" if other else own
    return verdicts.claim(words, measure, setting, value, sign=sign, source=source)


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/baselines.md, its data and figure; returns their paths."""
    looks = {name: arm_page.Look(place) for place, name in enumerate(PRESETS)}
    page = arm_page.made(NAME, TITLE, found, claims(found),
                         command=lambda one: f"reproduce {NAME}", notes=NOTES,
                         figures={"baselines": looks})
    return pages.write(out, page, failures, quick=quick)
