"""The page of the study of the token-level loss."""

import pathlib
from collections.abc import Sequence

from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import arm_page, jobs, pages, verdicts
from dapo_jax.studies import token_loss_claims as claims

NAME = "token_loss"
TITLE = "The token-level loss, advantages and dynamic sampling: what shows at this size"
FIGURES = {"loss": (claims.TOKEN, claims.MICROBATCH), "advantage": claims.ADVANTAGES}
NOTES = (
    "An arm is the preset `dapo` (clip 0.2 / 0.28, no KL, no entropy term) with the advantage and "
    "the weights that its name gives, each with the filter of dynamic sampling and without it. All "
    "runs of a seed begin from the same warm start.",
    "With rewards of 0 and 1 any group that has a gradient has a deviation of at least "
    "sqrt(G - 1) / G, with the filter or without: the bound that the article gives for dynamic "
    "sampling is arithmetic, and nothing here measures it.")


def write(out: pathlib.Path, found: findings.Findings, failures: Sequence[jobs.Failure], *,
          quick: bool) -> list[pathlib.Path]:
    """Write OUT/token_loss.md, its data and figures; returns their paths."""
    figures = {name: {claims.arm(kind, filtered=filtered): arm_page.Look(place, style)
                      for place, kind in enumerate(kinds)
                      for style, filtered in (("-", True), ("--", False))}
               for name, kinds in FIGURES.items()}
    page = arm_page.made(NAME, TITLE, found, claims.claims(found), command=_command, notes=NOTES,
                         figures=figures)
    return pages.write(out, page, failures, quick=quick)


def _command(one: verdicts.Claim) -> str:
    wrong_mean = one.claim.startswith(claims.WRONG)
    return f"reproduce {NAME} --only={'loss' if wrong_mean else 'advantage'}"
