"""The page of DAPO's ladder in miniature: what each rung adds, beside what the paper reports."""

import dataclasses
import pathlib
from collections.abc import Sequence

from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import arm_page, jobs, verdicts

NAME = "ablation"
TITLE = "DAPO's ladder in miniature"
PAPER = "arXiv 2503.14476"
# avg@32 on AIME 2024 of Qwen2.5-32B (table 1 of the paper). Its ladder has two rungs for answers
# that are too long: left out of the loss (30 to 36), later the soft penalty as well (38 to 41).
REPORTED = {"+ soft overlong": "38 to 41", "+ clip-higher": "36 to 38", "+ token loss": "41 to 42",
            "+ dynamic sampling": "42 to 50"}
WHOLE = "30 to 50"
LADDER = ("naive GRPO", *REPORTED)
END = "held-out accuracy, last quarter"
NOTES = (
    "Each rung has all of those below it. All runs of a seed begin from the same warm start; no "
    "KL, dual clip 10. The paper's ladder has one rung more, which leaves truncated answers out of "
    "the loss: here hardly one is truncated, so it would repeat the run below it; and the soft "
    "penalty comes after clip-higher there.",
    "40 steps of 32 prompts x 8 samples in 4 updates each, answers of at most 42 tokens: the paper "
    "has 512 x 16 samples in 16 updates and answers of up to 20,480 tokens. A rung whose cause is "
    "rare here (long answers, tokens clipped from above: see the table of arms) cannot show what "
    "it does there.",
    "Settings are those of the study of the token-level loss, with 4 updates a step at 2e-4; none "
    "was chosen by looking at the outcome.")


@dataclasses.dataclass(frozen=True)
class _Effect:
    """What a rung is there for, beside accuracy: its figure against the rung below it."""

    rung: str
    words: str
    measure: str
    figure: findings.Figure
    sign: int


EFFECTS = (
    _Effect("+ clip-higher", "clip-higher keeps the entropy up", "entropy, last quarter",
            findings.late("entropy"), 1),
    _Effect("+ soft overlong", "the soft penalty makes answers shorter",
            "tokens of a completion, last quarter", findings.late("length"), -1),
    _Effect("+ token loss", "the token-level loss keeps the entropy up", "entropy, last quarter",
            findings.late("entropy"), 1),
    _Effect("+ token loss", "the token-level loss keeps answers shorter",
            "tokens of a completion, last quarter", findings.late("length"), -1),
    _Effect("+ dynamic sampling", "dynamic sampling is faster early",
            "gain of held-out accuracy, mean of the first third", findings.early_accuracy, 1))


def claims(found: findings.Findings) -> list[verdicts.Claim]:
    """Each rung against the one below it, the whole ladder, then the rungs' own effects."""
    pairs = list(zip(LADDER, LADDER[1:], strict=False))
    return [*(arm_page.claimed(found, f"{rung.removeprefix('+ ')} ends better", END, rung, below,
                               findings.final_accuracy, source=_source(REPORTED[rung]))
              for below, rung in pairs),
            arm_page.claimed(found, "all of DAPO ends better than naive GRPO", END, LADDER[-1],
                             LADDER[0], findings.final_accuracy, source=_source(WHOLE)),
            *(arm_page.claimed(found, one.words, one.measure, one.rung,
                               LADDER[LADDER.index(one.rung) - 1], one.figure, source=PAPER,
                               sign=one.sign) for one in EFFECTS)]


def _source(reported: str) -> str:
    return f"{PAPER}: {reported} on AIME 2024"


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/ablation.md, its data and figure; returns their paths."""
    return arm_page.write(out, NAME, TITLE, found, claims(found), failures, notes=NOTES,
                          figure="ladder", arms=LADDER, quick=quick)
