"""What a report draws: panels of metrics, and their values in the metric lines of a run."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Lines = Sequence[Mapping[str, Any]]
Series = dict[str, tuple[np.ndarray, np.ndarray]]  # label -> steps and values, f64[points] each

COLOURS = ("#2f6db5", "#d1662a", "#3a9a5b", "#8a5bb0", "#b5484d", "#6d6d6d", "#b8962e", "#3aa0a8")
PHASES = ("rollout", "reward", "pack", "update", "eval", "checkpoint")  # of a step's time
ORACLE = "oracle"  # stands for no metric of a line: it is made of two
LEARNING, SAMPLING, POLICY, SPEED = SECTIONS = (
    "Learning", "Dynamic sampling", "Policy and text", "Throughput and phases")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One figure: the metrics that match `metric` patterns, each with its label."""

    name: str  # of the PNG file
    title: str
    unit: str  # of the vertical axis
    metrics: tuple[tuple[str, str], ...]  # (regular expression, label; \\1 is its group)
    section: str = LEARNING
    kind: str = "lines"  # or "stack", "bars", "map"
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    note: str = ""
    colours: tuple[str, ...] = COLOURS


SHARE = (-0.03, 1.03)
PANELS = (
    Panel("accuracy", "Held-out accuracy", "share of answers",
          ((r"eval/(avg@\d+)", r"\1"), ("eval/greedy", "greedy")), limits=SHARE,
          note="avg@k: the mean over k samples of a prompt; greedy: the likeliest answer alone."),
    Panel("accuracy_of_k", "Held-out accuracy of several answers together", "share of prompts",
          ((r"eval/((?:pass|maj)@\d+)", r"\1"),), limits=SHARE,
          note="pass@k: any of k is right; maj@k: the most frequent of k is."),
    Panel("reward", "Task reward", "reward", (
        ("reward/mean", "all samples"), ("reward/kept_mean", "kept groups"),
        ("reward/shaped_mean", "shaped")),
        note="Kept groups exclude those all wrong or all right; progress shows in all samples."),
    Panel("length", "Completion length", "tokens", (
        ("length/mean", "mean"), ("length/max", "longest"), ("eval/length", "held-out mean")),
        limits=(0, None)),
    Panel("endings", "How completions end", "share of samples", (
        ("length/truncated", "truncated"), ("format/stopped", "stopped"),
        ("format/valid", "with an answer")), limits=SHARE),
    Panel("turns", "Turns and tools", "per episode", (
        ("turns/mean", "turns"), ("turns/calls", "tool calls"),
        ("turns/tool_errors", "tool errors")), limits=(0, None)),
    Panel("failures", "Samples that could not be scored", "samples per step", (
        ("invalid/env_error", "of environments"), ("invalid/kind_error", "raised"),
        ("invalid/kind_timeout", "late"), ("invalid/kind_ended", "worker ended")),
        limits=(0, None), note="They are in neither loss nor statistics."),
    Panel("idle", "Device idle while environments answer", "share of sampling",
          (("time/idle_share", "device idle"),), limits=SHARE),
    Panel("waiting", "How long environments take", "seconds of a call", (
        ("time/environment_p50", "median call"), ("time/environment_p95", "95th percentile")),
        limits=(0, None)),
    Panel("sampling", "Prompts asked for", "prompts per step", (
        ("sampling/asked", "asked"), ("sampling/needed", "needed"),
        ("sampling/predicted", "predicted"), (ORACLE, "oracle")), SAMPLING, limits=(0, None),
        note="Needed: groups that the batch still lacked. Oracle: as many as gave the batch, had "
             "that number been known."),
    Panel("groups", "What groups are like", "groups per step", (
        ("groups/all_zero", "all wrong"), ("groups/informative", "informative"),
        ("groups/all_one", "all right")), SAMPLING, kind="stack",
        colours=("#b5484d", "#2f6db5", "#3a9a5b"),
        note="Informative groups hold right and wrong samples; the others teach nothing."),
    Panel("surplus", "Informative groups beyond the batch", "groups per step", (
        ("groups/carried", "carried"), ("groups/expired", "expired"),
        ("groups/dropped", "dropped")), SAMPLING, limits=(0, None),
        note="Carried ones are learned from in the next step; expired ones waited too long."),
    Panel("rounds", "Rounds of sampling", "rounds per step", (("sampling/rounds", "rounds"),),
          SAMPLING, limits=(0, None)),
    Panel("difficulty", "Difficulty of the prompts", "expected pass rate", tuple(
        (f"history/rate_{place}", str(place)) for place in range(10)), SAMPLING, kind="map",
        limits=(0, 1),
        note="Of the prompts sampled so far, the share at each pass rate as the run knows it. "
             "Prompts near 0 and 1 seldom give informative groups."),
    Panel("entropy", "Entropy of the policy", "nats per token", (("policy/entropy", "entropy"),),
          POLICY, limits=(0, None)),
    Panel("clip", "Clipped tokens", "share of tokens", (
        ("policy/clip_low", "low side"), ("policy/clip_high", "high side")), POLICY,
        limits=(0, None)),
    Panel("gradient", "Gradient before clipping", "norm", (("policy/grad_norm", "norm"),), POLICY,
          log=True),
    Panel("distance", "Distance between policies", "nats per token", (
        ("policy/kl", "KL from the sampling policy"),
        ("mismatch/mean", "sampler mismatch, mean"),
        ("mismatch/max", "sampler mismatch, max")), POLICY, log=True),
    Panel("loss", "Loss", "loss", (("policy/loss", "loss"),), POLICY),
    Panel("repetition", "Repetition in completions", "repeatness, share above 0.2", (
        ("repetition/mean", "mean repeatness"), ("repetition/share", "share above 0.2")), POLICY,
        limits=SHARE),
    Panel("time", "Where the time goes", "seconds per step", tuple(
        (f"time/{phase}", phase) for phase in PHASES), SPEED, kind="stack"),
    Panel("speed", "Speed", "tokens per second", (
        ("tokens_per_second/rollout", "rollout"), ("tokens_per_second/update", "update")), SPEED,
        limits=(0, None)),
    Panel("processes", "How long the processes were busy", "seconds per step", (
        ("processes/slowest_seconds", "the slowest"), ("processes/mean_seconds", "mean of all")),
        SPEED, limits=(0, None),
        note="All wait for the slowest; where the two part, one holds up the others. Evaluations "
             "are left out."),
    Panel("slowest", "Which process was the slowest", "process",
          (("processes/slowest", "slowest"),), SPEED, limits=(-0.5, None),
          note="Always the same one: look at its machine, and at its log in DIR/logs."),
    Panel("compiles", "Programs compiled", "compiles per step", (("compiles", "compiles"),),
          SPEED, kind="bars", limits=(0, None),
          note="After the first step of a phase there should be none."),
)


def series(panel: Panel, lines: Lines) -> Series:
    """Steps and values by label, without the steps that lack the metric."""
    names = dict.fromkeys(name for line in lines for name in line)
    result = {}
    for pattern, label in panel.metrics:
        if pattern == ORACLE:
            points = [(line["step"], value) for line in lines
                      if (value := _oracle(line)) is not None]
            if points:
                result[label] = _columns(points)
            continue
        for match in filter(None, (re.fullmatch(pattern, name) for name in names)):
            points = [(line["step"], line[match.string]) for line in lines
                      if isinstance(line.get(match.string), int | float)]
            if points:
                result[match.expand(label)] = _columns(points)
    return result


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.array(points, np.float64).T
    return steps, values


def _oracle(line: Mapping[str, Any]) -> float | None:
    """Prompts after which the step's need was met: what an oracle of their number asks for."""
    asked, ratio = line.get("sampling/asked"), line.get("sampling/oracle_ratio")
    return asked / ratio if asked is not None and ratio else None
