"""What the source says of dynamic batching beside what was found here, with a verdict each."""

import math
from collections.abc import Callable

from dapo_jax.dynamic_sampling import comparison, policies, simulation
from dapo_jax.studies import dynamic_batching_findings as findings
from dapo_jax.studies import learning, verdicts

# The source reports rollout seconds per step, means of steps 100 to 400: less than fixed 3 N, in %.
REPORTED = {8: 2.6, 16: 18.9, 32: 34.5}
REPORTED_SECONDS = {8: "123.999 to 120.727", 16: "160.040 to 129.752", 32: "252.962 to 165.638"}
SOURCE_WINDOW = "window, refill of the same size"  # its predictor
SOURCE_GROUPS = 32
FIXED = "fixed 3 N"
UNFILTERED = "no filter"
LINEAR = 0.95  # R2 from which on a line describes the times
WANTED = (0.5, 0.55, 0.6)  # held-out accuracies; chosen before the runs
MAIN = 0.55
UNDECIDED = "not decided"
AGREES, LINE = "agrees", "agrees: a line"
NOTHING_REPORTED = "not reported"
NO_DIFFERENCE = "no difference shown"
COMMAND = "reproduce dynamic_batching"


def against(value: comparison.Interval, source: float) -> str:
    """How an interval stands to a number that the source reports, 0 being no effect."""
    if not math.isfinite(value.low):
        return verdicts.NO_VERDICT
    inside = value.low <= source <= value.high
    if value.low <= 0 <= value.high:
        return (f"{UNDECIDED}: the interval holds the source's figure and 0" if inside else
                f"{NO_DIFFERENCE}; the source's figure lies outside")
    if inside:
        return AGREES
    if (value.mean > 0) != (source > 0):
        return "does not agree: the opposite"
    return f"same direction, {'larger' if abs(value.mean) > abs(source) else 'smaller'} here"


def effect(value: comparison.Interval, more: str, less: str) -> str:
    """What an interval says where the source says nothing."""
    if not math.isfinite(value.low):
        return verdicts.NO_VERDICT
    if value.low > 0:
        return more
    return less if value.high < 0 else NO_DIFFERENCE


def claims(found: findings.Findings) -> list[verdicts.Line]:
    """All lines, in the order of the parts."""
    return [*_of_times(found), *(line for size in found.replays for line in _of_replay(
        size, found.replays[size])), *_of_live(found)]


def standing(line: verdicts.Line) -> str:
    """Where a line belongs in the page's summary."""
    if line.verdict.startswith((verdicts.NO_VERDICT, NO_DIFFERENCE, UNDECIDED)):
        return "Nothing shown"
    if line.source == NOTHING_REPORTED:
        return "Beyond what the source reports"
    return "Agrees with the source" if line.verdict.startswith(AGREES) else "Other than the source"


def _of_times(found: findings.Findings) -> list[verdicts.Line]:
    if found.times is None:
        return []
    fitted, source = found.times.wall, simulation.Costs()
    straight = fitted.r_squared_medians >= LINEAR
    lines = [verdicts.Line(
        "the time of a round is a + c n G",
        f"a = {source.round:g} s, c = {source.sample:.3g} s (reference simulation)",
        f"{COMMAND} --only=a",
        f"a = {verdicts.text(fitted.round, 4)} s, c = {verdicts.text(fitted.sample, 6)} s; R2 = "
        f"{fitted.r_squared:.3f} of all calls, {fitted.r_squared_medians:.3f} of medians",
        LINE if straight else "a line describes it only roughly")]
    for size, own in found.times.by_size.items():
        count = 3 * SOURCE_GROUPS * size
        share = comparison.Interval(*(100 * value / (value + own.sample.mean * count) for value
                                      in (own.round.mean, own.round.low, own.round.high)))
        reported = 100 * source.round / (source.round + source.sample * count)
        lines.append(verdicts.Line(
            f"several small rounds cost more than one larger one: a is a large part of a round of "
            f"{3 * SOURCE_GROUPS} prompts, G = {size}", f"{reported:.0f} %",
            f"{COMMAND} --only=a", verdicts.text(share, 1, " %"), _size(share, reported)))
    return lines


def _size(value: comparison.Interval, source: float) -> str:
    """How an interval stands to a number of which 0 is nothing special."""
    if not math.isfinite(value.low):
        return verdicts.NO_VERDICT
    if value.low <= source <= value.high:
        return AGREES
    return "smaller here" if value.high < source else "larger here"


def _of_replay(size: int, found: findings.Replay) -> list[verdicts.Line]:
    lines, reported = [], REPORTED.get(size)
    for place, section in (("this machine's", found.here), ("the source's", found.source)):
        if section is None:
            continue
        row = _row(section, SOURCE_WINDOW)
        lines.append(verdicts.Line(
            f"G = {size}: the prediction takes less rollout time than {FIXED} (replay, {place} "
            "costs)", NOTHING_REPORTED if reported is None else
            f"{reported} % less ({REPORTED_SECONDS[size]} s)", f"{COMMAND} --only=a,b",
            verdicts.text(row.saving, 1, " % less"), effect(row.saving, "less", "more")
            if reported is None else against(row.saving, reported)))
        lines.append(_best_fixed(size, place, section))
    return lines


def _best_fixed(size: int, place: str, section: comparison.Section) -> verdicts.Line:
    """The prediction against the best of the fixed multipliers, known only afterwards."""
    fixed = [row for row in section.rows if row.name.startswith("fixed ")]
    best = max(fixed, key=lambda row: row.saving.mean if math.isfinite(row.saving.mean)
               else -math.inf)
    row = _row(section, SOURCE_WINDOW)
    if not math.isfinite(row.saving.low):
        verdict = verdicts.NO_VERDICT
    elif row.saving.low > best.saving.high:
        verdict = "yes"
    else:
        verdict = "no" if row.saving.high < best.saving.low else f"{NO_DIFFERENCE}; they overlap"
    baselines = ", ".join(f"{one.name.removeprefix('fixed ')}: {verdicts.text(one.saving)}"
                          for one in sorted(fixed, key=lambda one: one.name))
    return verdicts.Line(
        f"G = {size}: the prediction takes less time than any fixed multiple ({place} costs)",
        NOTHING_REPORTED, f"{COMMAND} --only=a,b",
        f"% less than {FIXED}: {baselines}; prediction {verdicts.text(row.saving)}", verdict)


def _row(section: comparison.Section, name: str) -> comparison.Row:
    return next(row for row in section.rows if row.name == name)


def _of_live(found: findings.Findings) -> list[verdicts.Line]:
    base = found.live.get(FIXED, {})
    if not base:
        return []
    command = f"{COMMAND} --only=c"
    share, gap = (learning.over_seeds(base, figure) for figure in
                  (learning.sampling_share, learning.selection))
    lines = (
        verdicts.Line("sampling is over 70 % of a step's time", "over 70 %", command,
              verdicts.text(share, 1, " %"), _over(share, 70)),
        verdicts.Line("with the filter on, the mean reward looks higher early: a selection effect",
              "yes", command, f"kept groups minus all samples, first {learning.EARLY} steps: "
              f"{verdicts.text(gap, 3)}", effect(gap, AGREES, "does not agree")))
    rollouts = [_rollouts(arm, learning.saved(runs, base, _mean_rollout), command)
                for arm, runs in found.live.items() if arm not in (FIXED, UNFILTERED) and runs]
    pairs = [(arm, other) for other in (UNFILTERED, FIXED) for arm in found.live
             if arm not in (UNFILTERED, other) and found.live[arm] and found.live.get(other)]
    return [*lines, *rollouts, *(_time_to(arm, other, found, command) for arm, other in pairs)]


def _rollouts(arm: str, value: comparison.Interval, command: str) -> verdicts.Line:
    window, reported = arm == policies.WINDOW, REPORTED[8]
    return verdicts.Line(
        f"live, G = 8: rollout seconds of a step, `{arm}` against {FIXED}",
        f"{reported} % less" if window else NOTHING_REPORTED, command,
        verdicts.text(value, 1, " % less"),
        against(value, reported) if window else effect(value, "less", "more"))


def _mean_rollout(one: learning.Curve) -> float:
    return learning.mean_step(one, "rollout")


def _time_to(arm: str, other: str, found: findings.Findings, command: str) -> verdicts.Line:
    value, used = (learning.saved(found.live[arm], found.live[other], reaching(MAIN, clock))
                   for clock in learning.CLOCKS)
    figure = "; of the processor ".join(verdicts.text(one, 1, " % less") for one in (value, used))
    if not math.isfinite(value.mean):
        figure = ", ".join(f"{one}: {learning.reached(found.live[one], MAIN)}"
                           for one in (arm, other))
    return verdicts.Line(
        f"live: seconds to held-out accuracy {MAIN}, `{arm}` against `{other}`", NOTHING_REPORTED,
        command, figure, effect(value, "less", "more"))


def reaching(wanted: float, clock: str) -> Callable[[learning.Curve], float]:
    """The figure `time to this accuracy` of a curve."""
    return lambda one: learning.time_to(one, wanted, clock)


def _over(value: comparison.Interval, border: float) -> str:
    if not math.isfinite(value.low):
        return verdicts.NO_VERDICT
    if value.low > border:
        return AGREES
    return "does not agree: less" if value.high < border else f"{UNDECIDED}: the interval holds it"
