"""Lines of a study's page: what a source claims, what was measured here, and a verdict."""

import dataclasses
import math

from dapo_jax.dynamic_sampling import comparison

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
NO_VERDICT = "no interval, no verdict"


@dataclasses.dataclass(frozen=True)
class Line:
    """A claim as the page of all studies shows it, all in words."""

    claim: str
    source: str
    command: str  # of the study, without python -m dapo_jax.
    figure: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """That one arm's figure lies above or below another's."""

    claim: str
    source: str
    measure: str
    setting: str
    difference: comparison.Interval
    unit: str
    verdict: str


def judged(value: comparison.Interval, sign: int) -> str:
    """Shown: the whole interval is on the claim's side of 0; contradicted: on the other."""
    if not math.isfinite(value.low):
        return NO_VERDICT
    low, high = sorted((sign * value.low, sign * value.high))
    if low > 0:
        return SHOWN
    return CONTRADICTED if high < 0 else NOT_SHOWN


def claim(words: str, measure: str, setting: str, value: comparison.Interval, *, sign: int,
          source: str, unit: str = "") -> Claim:
    """The claim that `value`, a difference, is above 0 (sign 1) or below (-1), with its verdict."""
    return Claim(words, source, measure, setting, value, unit, judged(value, sign))


def text(value: comparison.Interval, digits: int = 1, unit: str = "") -> str:
    """Mean and 95 % interval; a dash where there is no mean."""
    if not math.isfinite(value.mean):
        return "-"
    mean = f"{value.mean:.{digits}f}{unit}"
    if not math.isfinite(value.low):
        return f"{mean} (one run)"
    return f"{mean} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def difference(one: Claim) -> str:
    """The difference with its interval and unit."""
    return f"{text(one.difference, 1 if one.unit else 4)} {one.unit}".strip()


def line(one: Claim, command: str) -> Line:
    """A claim on the page of all studies."""
    return Line(f"{one.claim} ({one.setting})", one.source, command,
                f"{one.measure}: {difference(one)}", one.verdict)
