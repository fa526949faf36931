"""The page of the study from runs written as files; a quick run of the whole command is slow."""

import dataclasses
import json
import re

import pytest
import test_learning
import test_simulate
from test_round_times import calls

from dapo_jax import config, reproduce
from dapo_jax.dynamic_sampling import comparison
from dapo_jax.runtime import checkpoint
from dapo_jax.studies import base, dynamic_batching, jobs, runs, verdicts
from dapo_jax.studies import dynamic_batching_claims as claims
from dapo_jax.studies import dynamic_batching_findings as findings
from dapo_jax.studies import dynamic_batching_page as page

PNG = b"\x89PNG\r\n\x1a\n"
SPEED = {"fixed 3 N": 2.0, "window": 1.0, "cost_optimal + carry + skip": 0.8, "no filter": 4.0}


def recorded(workdir, *, samples):
    """A finished recorded run."""
    test_simulate.record(workdir, steps=40, pool=60, groups=8, samples=samples)
    cfg = json.loads((workdir / "config.json").read_text())
    cfg["rl"]["steps"], cfg["sft"] = 40, {"steps": 0}
    (workdir / "config.json").write_text(json.dumps(cfg))
    return workdir


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    (out / "times.json").write_text(json.dumps({"rows": calls(5.0, 1e-2, noise=0.01)}))
    live = {arm: {seed: test_learning.record(
        out / "live" / arm / str(seed), seconds=pace * (1 + 0.02 * seed), rollout=0.8 * pace,
        start=0.3 + 0.01 * seed, kept=0.5 + 0.01 * seed)
        for seed in range(3)} for arm, pace in SPEED.items()}
    runs = {size: recorded(out / f"recorded{size}", samples=size) for size in (4, 8)}
    return findings.Where(out, out / "times.json", runs, live)


@pytest.fixture(scope="module")
def found(where):
    return findings.read(where)


def by_claim(found):
    return {line.claim: line for line in claims.claims(found)}


def test_the_page_holds_every_claim_table_and_figure(found, tmp_path):
    paths = page.write(tmp_path, found, [], quick=False)
    text = (tmp_path / "dynamic_batching.md").read_text()
    assert {path.name for path in paths} == {"dynamic_batching.md", "dynamic_batching.json",
                                             "dynamic_batching_lines.json", "times.png",
                                             "replay.png", "learning.png"}
    for name in ("times", "replay", "learning"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        assert f"({name}.png)" in text
    for line in claims.claims(found):
        assert line.verdict and line.figure in text
    for baseline in ("fixed 1 N", "fixed 1.5 N", "fixed 2 N", "fixed 3 N", *SPEED):
        assert baseline in text
    assert "Missing" not in text and "--quick" not in text
    assert len(json.loads((tmp_path / "dynamic_batching.json").read_text())["claims"]) == len(
        claims.claims(found))
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in text.split("## Claims")[1].split(
        "\n\n")[1].splitlines()]
    assert set(widths) == {6}  # every row of the first table has its five cells


def test_the_page_is_made_of_what_is_there(where, tmp_path):
    nothing = dataclasses.replace(
        where, times=tmp_path / "no.json", recorded={8: tmp_path / "none"},
        live={arm: {0: tmp_path / "none"} for arm in SPEED})
    lost = findings.read(nothing)
    failed = jobs.Failure("recorded/8", "exit status 1; the end of it:\nno memory")
    paths = page.write(tmp_path, lost, [failed], quick=True)
    text = paths[0].read_text()
    assert [path.suffix for path in paths] == [".md", ".json", ".json"]
    assert "No figure here means anything" in text and "no memory" in text
    for missing in ("seconds of a round", "recorded run, G = 8", "live runs, window"):
        assert missing in text


def test_an_unfinished_run_is_named_and_not_used(where, tmp_path):
    half = test_learning.record(tmp_path / "half")
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:-3]))
    live = where.live | {"window": {0: where.live["window"][0], 1: half}}
    found = findings.read(dataclasses.replace(where, recorded={}, live=live))
    assert list(found.live["window"]) == [0]
    assert any("window" in text and "seed 1" in text for text in found.missing)


def test_an_unfinished_recording_is_not_replayed(where, tmp_path):
    half = recorded(tmp_path / "half", samples=4)
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:-1]))
    found = findings.read(dataclasses.replace(where, recorded={4: half}, live={}))
    assert not found.replays and any("G = 4" in text for text in found.missing)


def test_replays_use_the_costs_that_were_measured(found):
    one = found.replays[8]
    row = next(row for row in one.here.rows if row.name == "fixed 1 N")
    costs = findings.costs(found.times, 8)
    assert (costs.round, costs.sample) == pytest.approx((5.0, 1e-2), rel=0.02)
    assert row.seconds.mean == pytest.approx(
        row.rounds * costs.round + row.samples * costs.sample, rel=1e-6)
    assert one.source.rows[0].seconds.mean > 77.9


def test_live_claims_are_what_the_files_say(found):
    lines = by_claim(found)
    assert lines["sampling is over 70 % of a step's time"].verdict == "agrees"
    key, = (key for key in lines if "rollout seconds of a step, `window`" in key)
    assert lines[key].figure.startswith("50.0 % less")
    key, = (key for key in lines if f"accuracy {claims.MAIN}, `window` against `no filter`" in key)
    assert lines[key].figure.startswith("75.0 % less") and lines[key].verdict == "less"


INTERVALS = [((1, 5), 3, "agrees"), ((1, 2), 3, "same direction, smaller here"),
             ((4, 5), 3, "same direction, larger here"),
             ((-1, 1), 3, "no difference shown; the source's figure lies outside"),
             ((-1, 5), 3, "not decided: the interval holds the source's figure and 0"),
             ((-5, -1), 3, "does not agree: the opposite"),
             ((float("nan"),) * 2, 3, verdicts.NO_VERDICT)]


@pytest.mark.parametrize("bounds, source, verdict", INTERVALS)
def test_a_verdict_follows_from_the_interval(bounds, source, verdict):
    value = comparison.Interval(sum(bounds) / 2, *bounds)
    assert claims.against(value, source) == verdict


@pytest.mark.parametrize("source, verdict, place", [
    ("3 %", "agrees", "Agrees with the source"), ("3 %", "larger here", "Other than the source"),
    ("3 %", claims.NO_DIFFERENCE, "Nothing shown"),
    (claims.NOTHING_REPORTED, "less", "Beyond what the source reports"),
    (claims.NOTHING_REPORTED, verdicts.NO_VERDICT, "Nothing shown")])
def test_the_summary_puts_a_claim_where_its_verdict_belongs(source, verdict, place):
    assert claims.standing(verdicts.Line("c", source, "x", "1", verdict)) == place


def test_costs_of_a_fit_that_is_noise_stay_positive():
    noise = [row | {"seconds": 1.0 - 1e-5 * row["prompts"]} for row in calls(0, 0)]
    times = findings.fitted(noise)
    costs = findings.costs(times, 8)
    assert times.by_size[8].sample.mean < 0 < costs.sample <= costs.round


def test_a_prompt_with_a_cost_of_its_own_is_not_booked_as_the_round():
    rows = [row | {"seconds": 0.02 + 0.002 * row["prompts"] + 1e-4 * row["prompts"]
                   * row["samples"]} for row in calls(0, 0)]
    times = findings.fitted(rows)
    for size in (8, 16, 32):
        assert findings.costs(times, size).round == pytest.approx(0.02)
    assert times.wall.round.mean > 0.1  # of all sizes together


# -------------------------------------------------------------------------------------- the command


def options(out, **changes):
    return dataclasses.replace(base.Options(out, False, ("a", "b", "c"), 3, 1), **changes)


def test_every_run_is_planned_once_and_its_settings_pass_the_checks(tmp_path):
    stages = dynamic_batching._stages(options(tmp_path))
    names = [[job.name for job in stage] for stage in stages]
    assert names[0] == ["warm/seed_0", "warm/seed_1", "warm/seed_2"] and names[1] == ["times"]
    assert names[2] == ["recorded/8", "recorded/16", "recorded/32"]
    assert len(set(names[3])) == len(SPEED) * 3
    assert {name.split("/")[2] for name in names[3][:len(SPEED)]} == {"seed_0"}  # arms take turns
    assert set(dynamic_batching.ARMS) == set(SPEED)


def test_parts_that_are_not_asked_for_are_not_run(tmp_path):
    stages = dynamic_batching._stages(options(tmp_path, only=("a",)))
    assert [job.name for stage in stages for job in stage] == ["warm/seed_0", "times"]


def test_a_folder_of_other_settings_is_refused(tmp_path):
    folder = tmp_path / "warm/seed_0"
    folder.mkdir(parents=True)
    cfg = config.to_json(config.Config())
    (folder / "config.json").write_text(json.dumps(cfg))
    with pytest.raises(config.ConfigError, match="belongs to another configuration"):
        dynamic_batching._stages(options(tmp_path))


def test_an_arm_begins_as_a_copy_of_the_warm_start_under_its_own_settings(tmp_path):
    warm, arm = tmp_path / "warm", tmp_path / "live/arm"
    (warm / "checkpoints/260").mkdir(parents=True)
    (warm / "checkpoints/260/weights").write_text("w")
    (warm / "metrics.jsonl").write_text('{"step": 260}\n')
    (warm / "config.json").write_text(json.dumps({"seed": 0, "_environment": {"jax": "x"}}))
    cfg = dataclasses.replace(config.Config(), seed=7)
    runs.adopt(warm, arm, cfg)
    checkpoint.check_config(arm, config.to_json(cfg), free=("_environment",))
    assert (arm / "checkpoints/260/weights").read_text() == "w"
    assert (arm / "metrics.jsonl").read_text() == (warm / "metrics.jsonl").read_text()
    (warm / "checkpoints/260/weights").write_text("changed")
    assert (arm / "checkpoints/260/weights").read_text() == "w"  # no link
    runs.adopt(tmp_path / "failed", tmp_path / "other", cfg)
    assert not (tmp_path / "other").exists()  # the run makes its own warm start


def test_flags_that_name_no_part_are_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="no part 'd'"):
        reproduce.main(["dynamic_batching", f"--out={tmp_path}", "--only=a,d"])
    with pytest.raises(SystemExit):
        reproduce.main(["no_such_study", f"--out={tmp_path}"])
    with pytest.raises(config.ConfigError, match="--seeds=101: at most 100"):
        reproduce.main(["dynamic_batching", f"--out={tmp_path}", "--seeds=101"])


@pytest.mark.parametrize("below", ["", "runs/here"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(config.ConfigError, match="--out: .*file.* cannot be written"):
        reproduce.main(["token_loss", f"--out={tmp_path / 'file' / below}"])


@pytest.mark.slow
def test_the_quick_study_runs_and_goes_on_where_it_stopped(tmp_path, capsys):
    asked = ["dynamic_batching", f"--out={tmp_path}", "--quick", "--seeds=2", "--jobs=2"]
    assert reproduce.main(asked) == 0
    text = (tmp_path / "dynamic_batching.md").read_text()
    assert "Missing" not in text and "c. Live runs" in text
    runs = sorted(path for path in tmp_path.rglob("metrics.jsonl"))
    assert len(runs) == 2 + 2 + 2 * len(SPEED)  # warm starts, recordings, arms
    warm, live = (tmp_path / f"{name}/seed_1/metrics.jsonl" for name in ("warm", "live/window"))
    assert live.read_text().startswith(warm.read_text())  # it went on from the warm start
    before = {path: path.stat().st_mtime_ns for path in runs}
    assert reproduce.main(asked) == 0
    assert before == {path: path.stat().st_mtime_ns for path in runs}
