"""The article's claims on the loss, the advantage and the filter, with a verdict each."""

import dataclasses
from collections.abc import Mapping

from dapo_jax.dynamic_sampling import comparison
from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import learning, verdicts

TOKEN = "grpo, token"
MICROBATCH = "grpo, microbatch_token"
REINFORCE = "reinforce_baseline, token"
DR_GRPO = "dr_grpo, constant"
ADVANTAGES = (TOKEN, REINFORCE, DR_GRPO)
SOURCE = "the article"
WRONG = "mean of microbatch means: "


@dataclasses.dataclass(frozen=True)
class _Compared:
    """The claim that `own`'s figure lies above (sign 1) or below (-1) `other`'s."""

    claim: str
    measure: str
    own: str
    other: str
    figure: findings.Figure
    sign: int
    percent: bool = False


OF_PAIRS = (
    _Compared(f"{WRONG}early training is more aggressive", "gradient norm, first fifth",
              MICROBATCH, TOKEN, findings.early("gradient norm"), 1, percent=True),
    _Compared(f"{WRONG}early training is more aggressive", "entropy, first fifth", MICROBATCH,
              TOKEN, findings.early("entropy"), -1),
    _Compared(f"{WRONG}later it collapses into repetition", "repeatness, last quarter",
              MICROBATCH, TOKEN, findings.late("repeatness"), 1),
    _Compared(f"{WRONG}later it collapses into repetition",
              "share of repeatness above 0.2, last quarter", MICROBATCH, TOKEN,
              findings.late("repeating"), 1),
    _Compared(f"{WRONG}later the format breaks", "share with an answer, last quarter",
              MICROBATCH, TOKEN, findings.late("answered"), -1),
    _Compared(f"{WRONG}later the format breaks", "share that stopped, last quarter", MICROBATCH,
              TOKEN, findings.late("stopped"), -1),
    _Compared(f"{WRONG}it ends worse", "held-out accuracy, last quarter", MICROBATCH, TOKEN,
              findings.final_accuracy, -1),
    _Compared("GRPO is faster early than reinforce_baseline",
              "gain of held-out accuracy, mean of the first third", TOKEN, REINFORCE,
              findings.early_accuracy, 1),
    _Compared("reinforce_baseline is steadier than GRPO",
              "deviation / mean of the gradient norm after the first fifth", REINFORCE, TOKEN,
              findings.unsteadiness, -1),
    _Compared("reinforce_baseline is steadier than GRPO",
              "largest fall of held-out accuracy below an earlier one", REINFORCE, TOKEN,
              findings.setback, -1))


def arm(kind: str, *, filtered: bool) -> str:
    """The name of an arm."""
    return f"{kind}, {'filter' if filtered else 'no filter'}"


def claims(found: findings.Findings) -> list[verdicts.Claim]:
    """All lines: each comparison with and without the filter, then those of the filter itself."""
    lines = [_of_pair(one, found, filtered) for one in OF_PAIRS for filtered in (False, True)]
    lines += [_line("dynamic sampling ends better at equal steps",
                    "held-out accuracy, last quarter", kind,
                    _filter_effect(found, kind, findings.final_accuracy), 1)
              for kind in ADVANTAGES]
    lines.append(_line("dynamic sampling makes GRPO steadier",
                       "deviation / mean of the gradient norm after the first fifth", TOKEN,
                       _filter_effect(found, TOKEN, findings.unsteadiness), -1))
    lines.append(_line(
        "dynamic sampling matters more than the kind of advantage",
        "held-out accuracy, last quarter: gain by the filter, mean over advantages, less the "
        "best advantage's lead over the worst, mean over both settings", "all advantages",
        _pipeline(found.arms), 1))
    return lines


def _line(claim: str, measure: str, setting: str, value: comparison.Interval, sign: int,
          unit: str = "") -> verdicts.Claim:
    return verdicts.claim(claim, measure, setting, value, sign=sign, source=SOURCE, unit=unit)


def _of_pair(one: _Compared, found: findings.Findings, filtered: bool
             ) -> verdicts.Claim:
    own, other = (arm(kind, filtered=filtered) for kind in (one.own, one.other))
    value = findings.paired(found.arms.get(own, {}), found.arms.get(other, {}), one.figure,
                            percent=one.percent)
    return _line(one.claim, one.measure, "filter" if filtered else "no filter", value, one.sign,
                 "%" if one.percent else "")


def _filter_effect(found: findings.Findings, kind: str, figure: findings.Figure
                   ) -> comparison.Interval:
    with_, without = (found.arms.get(arm(kind, filtered=filtered), {})
                      for filtered in (True, False))
    return findings.paired(with_, without, figure)


def _pipeline(arms: Mapping[str, findings.Runs]) -> comparison.Interval:
    """Over the seeds of which every run is there."""
    ends = {filtered: [{seed: findings.final_accuracy(one) for seed, one in arms.get(
        arm(kind, filtered=filtered), {}).items()} for kind in ADVANTAGES]
        for filtered in (True, False)}
    seeds = set.intersection(*(set(of) for rows in ends.values() for of in rows))
    values = []
    for seed in sorted(seeds):
        with_, without = ([of[seed] for of in ends[filtered]] for filtered in (True, False))
        gain = (sum(with_) - sum(without)) / len(ADVANTAGES)
        leads = [max(rows) - min(rows) for rows in (with_, without)]
        values.append(gain - sum(leads) / len(leads))
    return learning.interval(values)
