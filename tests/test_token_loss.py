"""The study of the token-level loss: its arms, and the page from runs that are made up."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dapo_jax import command_line, config_checks, config_file, reproduce
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.learner import algorithms
from dapo_jax.studies import arm_findings as findings
from dapo_jax.studies import arms, base, jobs, pages, runs, token_loss, verdicts
from dapo_jax.studies import token_loss_claims as claims
from dapo_jax.studies import token_loss_page as page

PLAN = token_loss.PLAN
STEPS, EVERY = 40, 4
WRONG, RIGHT = (claims.arm(kind, filtered=False) for kind in (claims.MICROBATCH, claims.TOKEN))


def record(workdir, *, start=0.3, gain=0.01, norm=1.0, repeatness=0.1, answered=0.95, noise=0.0):
    """A finished run as files: accuracy rises by `gain` a step, other figures stay what they are
    but for a gradient norm that swings by `noise`."""
    workdir.mkdir(parents=True)
    lines = [{"step": 0, "phase": "start", "eval/avg@4": 0.0},
             {"step": 1, "phase": "sft", "eval/avg@4": start}]
    for step in range(1, STEPS + 1):
        line = {"step": 1 + step, "phase": "rl", "time/step": 1.0, "time/rollout": 0.5,
                "time/processor": 2.0, "repetition/mean": repeatness, "repetition/share": 0.0,
                findings.METRICS["answered"]: answered, "format/stopped": 1.0,
                "length/mean": 24.0, "length/truncated": 0.0,
                "policy/clip_high": 0.01, "policy/entropy": 0.5, "reward/mean": 0.4,
                "reward/kept_mean": 0.5, "policy/grad_norm": norm * (1 + noise * (-1) ** step),
                "sampling/samples": 256}
        if step % EVERY == 0:
            line["eval/avg@4"] = start + gain * step
        lines.append(line)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "config.json").write_text(json.dumps({"sft": {"steps": 1}, "rl": {"steps": STEPS}}))
    return workdir


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """Three seeds an arm. The wrong mean has twice the gradient norm, repeats itself and ends
    worse without the filter; nothing else differs by more than seeds do."""
    out = tmp_path_factory.mktemp("study")

    def made(arm, seed):
        wrong = arm == WRONG
        return record(out / arm / str(seed), start=0.3 + 0.01 * seed,
                      gain=(0.004 if wrong else 0.008) + 0.0001 * seed,
                      norm=(2.0 if wrong else 1.0) + 0.01 * seed,
                      repeatness=0.3 + 0.01 * seed if wrong else 0.1,
                      noise=0.2 if arm.startswith("grpo") else 0.1 + 0.001 * seed)

    return {arm: {seed: made(arm, seed) for seed in range(3)} for arm in PLAN.arms}


@pytest.fixture(scope="module")
def found(where):
    return findings.read(where)


def line(found, start, setting, measure=""):
    (one,) = [one for one in claims.claims(found) if start in one.claim
              and one.setting == setting and measure in one.measure]
    return one


def options(out, **changes):
    return dataclasses.replace(base.Options(out, False, tuple(PLAN.parts), 3, 1), **changes)


def resolved(arm):
    one = runs.Run(PLAN.config, PLAN.config.parent, "x", PLAN.arms[arm])
    cfg, _ = command_line.parse(runs.flags(one), program="", purpose="",
                                extra={"workdir": command_line.Flag(None, "")})
    return cfg, algorithms.resolve(cfg.rl.algorithm, where="rl.algorithm")


def test_arms_differ_in_what_their_names_say_and_in_nothing_else():
    cfg, first = resolved(claims.arm(claims.TOKEN, filtered=True))
    assert (first.advantage, first.weights, first.kl_coef, first.entropy_coef) == (
        "grpo", "token", 0.0, 0.0)
    for arm in PLAN.arms:
        advantage, weights, setting = arm.split(", ")
        other, algorithm = resolved(arm)
        assert algorithm == dataclasses.replace(first, advantage=advantage, weights=weights)
        assert (other.filter.enable is not False) == (setting == "filter")
        assert dataclasses.replace(
            other, filter=cfg.filter, dynamic_sampling=cfg.dynamic_sampling,
            rl=dataclasses.replace(other.rl, algorithm=cfg.rl.algorithm)) == cfg


def test_updates_are_of_several_microbatches_of_several_lengths():
    cfg = config_checks.from_dict(config_file.load(str(PLAN.config)))
    assert cfg.rl.prompts_per_step >= 4 * cfg.rl.microbatch_slots
    assert len(cfg.rl.completion_buckets) > 2
    assert cfg.rl.completion_buckets[-1] == cfg.rollout.max_new_tokens


def test_every_run_is_planned_once_and_only_for_the_parts_that_are_asked_for(tmp_path):
    warm, rows = ([job.name for job in stage]
                  for stage in arms.stages(PLAN, options(tmp_path)))
    assert warm == ["warm/seed_0", "warm/seed_1", "warm/seed_2"]
    assert len(set(rows)) == len(PLAN.arms) * 3 == 24
    assert {name.split("/")[2] for name in rows[:8]} == {"seed_0"}  # arms of a seed in turn
    names = [job.name for job in arms.stages(PLAN, options(tmp_path, only=("loss",)))[1]]
    assert len(names) == 12 and not any("reinforce" in name or "dr_" in name for name in names)


def test_verdicts_are_what_the_files_say(found):
    more = line(found, "more aggressive", "no filter", "gradient")
    assert more.verdict == verdicts.SHOWN
    assert more.difference.mean == pytest.approx(
        np.mean([100 * ((2 + s) / (1 + s) - 1) for s in (0, 0.01, 0.02)]))
    assert line(found, "repetition", "no filter", "repeatness, last").verdict == verdicts.SHOWN
    assert line(found, "ends worse", "no filter").verdict == verdicts.SHOWN
    assert line(found, "ends worse", "filter").verdict == verdicts.NOT_SHOWN
    assert line(found, "format breaks", "no filter", "answer").verdict == verdicts.NOT_SHOWN
    assert line(found, "steadier than", "filter", "gradient").verdict == verdicts.SHOWN
    assert line(found, "faster early", "filter").verdict == verdicts.NOT_SHOWN


def test_the_kind_of_advantage_is_weighed_against_the_filter(found, tmp_path):
    """Filter +0.1 on all; the advantages lie 0.04 apart with it and 0.02 without."""
    def runs_of(kind, filtered):
        lead = {claims.TOKEN: 0.04, claims.REINFORCE: 0.02, claims.DR_GRPO: 0.0}[kind]
        end = 0.5 + (0.1 + lead if filtered else lead / 2)
        return {seed: dataclasses.replace(
            found.arms[RIGHT][0], accuracy=np.full(11, end + 0.01 * seed)) for seed in range(3)}
    made = {claims.arm(kind, filtered=on): runs_of(kind, on)
            for kind in claims.ADVANTAGES for on in (True, False)}
    one = line(findings.Findings(made, []), "matters more", "all advantages")
    gain = 0.1 + (0.04 + 0.02) / 2 / 3
    assert one.difference.mean == pytest.approx(gain - (0.04 + 0.02) / 2)


@pytest.mark.parametrize("bounds, sign, verdict", [
    ((1, 2), 1, verdicts.SHOWN), ((1, 2), -1, verdicts.CONTRADICTED),
    ((-2, -1), -1, verdicts.SHOWN),
    ((-2, -1), 1, verdicts.CONTRADICTED), ((-1, 2), 1, verdicts.NOT_SHOWN),
    ((-1, 2), -1, verdicts.NOT_SHOWN), ((math.nan, math.nan), 1, verdicts.NO_VERDICT)])
def test_a_verdict_follows_from_the_interval(bounds, sign, verdict):
    assert verdicts.judged(comparison.Interval(sum(bounds) / 2, *bounds), sign) == verdict


def test_figures_of_a_curve():
    values = np.concatenate([np.full(20, 4.0), np.tile([1.0, 3.0], 27), np.full(26, 2.0)])
    one = findings.Curve({"gradient norm": values}, np.arange(0, 101, 10),
                         np.array([.1, .2, .3, .4, .5, .3, .6, .6, .5, .7, .8]))
    assert findings.early("gradient norm")(one) == 4.0
    assert findings.late("gradient norm")(one) == 2.0
    assert findings.final_accuracy(one) == pytest.approx((.5 + .7 + .8) / 3)
    assert findings.early_accuracy(one) == pytest.approx((.2 + .3 + .4) / 3 - .1)
    assert findings.setback(one) == pytest.approx(0.2)
    assert findings.unsteadiness(one) == pytest.approx(math.sqrt(54 / 80) / 2)


def test_the_page_holds_every_claim_arm_and_figure(found, tmp_path):
    paths = page.write(tmp_path, found, [], quick=False)
    assert {path.name for path in paths} == {
        "token_loss.md", "token_loss.json", "token_loss_lines.json", "loss.png", "advantage.png"}
    text = (tmp_path / "token_loss.md").read_text()
    table = text.split("## Claims")[1].split("\n\n")[1].splitlines()[2:]
    lines = claims.claims(found)
    assert len(table) == len(lines) == 2 * 10 + 5
    for row, one in zip(table, lines, strict=True):
        assert one.claim in row and row.endswith(f"| {one.verdict} |")
    assert all(f"| {arm} | 3 |" in text for arm in PLAN.arms)
    assert "Missing" not in text and "--quick" not in text
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "token_loss.json").read_text())
    assert len(stored["arms"][WRONG]["2"]["values"]["entropy"]) == STEPS


def test_running_means_are_of_the_finite_values_of_the_last_steps():
    for steps in (3, 25):
        values = np.arange(steps) % 7 + 1.0
        values[0] = np.nan
        got = pages.smooth(values)
        assert math.isnan(got[0])
        for step in range(1, steps):
            seen = values[max(step - pages.SMOOTH + 1, 0):step + 1]
            assert got[step] == pytest.approx(np.nanmean(seen))


def test_the_page_is_made_of_what_is_there(where, tmp_path):
    some = {arm: where[arm] if arm == RIGHT else {0: tmp_path / "none"} for arm in where}
    failed = jobs.Failure("runs/x/seed_0", "exit status 1; the end of it:\nno memory")
    paths = page.write(tmp_path, findings.read(some), [failed], quick=True)
    text = paths[0].read_text()
    assert "No figure here means anything" in text and "no memory" in text
    assert f"{WRONG}: no finished run of seed 0" in text and verdicts.NO_VERDICT in text
    assert "| shown |" not in text and "| contradicted |" not in text
    nothing = page.write(tmp_path, findings.read({}), [], quick=True)
    assert [path.suffix for path in nothing] == [".md", ".json", ".json"]


@pytest.mark.slow
def test_the_quick_study_runs_and_goes_on_where_it_stopped(tmp_path):
    asked = ["token_loss", f"--out={tmp_path}", "--quick", "--seeds=2", "--only=loss"]
    assert reproduce.main(asked) == 0
    text = (tmp_path / "token_loss.md").read_text()
    assert "reinforce_baseline, token, filter: no finished run" in text  # not asked for
    found = sorted(tmp_path.rglob("metrics.jsonl"))
    assert len(found) == 2 + 2 * 4
    before = {path: path.stat().st_mtime_ns for path in found}
    assert reproduce.main(asked) == 0
    assert before == {path: path.stat().st_mtime_ns for path in found}
