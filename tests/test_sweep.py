"""The sweep command: what is refused before anything starts, what goes on, and the table."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import pytest

from dapo_jax import config, sweep, train
from dapo_jax.studies import jobs, sweep_points, sweep_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATE = "rl.optimizer.learning_rate"
FILE = """
from dapo_jax import sweeps
from tests import tiny_config

get_config = tiny_config.get_config


def sweep():
    return sweeps.product(sweeps.grid({{"config.rl.optimizer.learning_rate": (1e-3, 2e-3)}}),
                          {more})
"""
SEEDS = "sweeps.seeds(2)"
NAMES = [f"{RATE}={rate},seed={seed}" for rate in ("0.001", "0.002") for seed in (0, 1)]


@pytest.fixture
def command(tmp_path):
    def make(more=SEEDS):
        path = tmp_path / "experiment.py"
        path.write_text(FILE.format(more=more))
        return [f"--config={path}", f"--out={tmp_path / 'out'}"]

    return make


def test_a_dry_run_lists_every_setting_and_makes_nothing(command, tmp_path, capsys):
    assert sweep.main([*command(), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{place} {name} new" for place, name in enumerate(NAMES)]
    assert not (tmp_path / "out").exists()


def test_every_setting_is_of_the_file_the_flags_and_itself(command, tmp_path):
    config_flag, _ = command()
    points, _ = sweep_points.read([config_flag, "--config.rl.steps=5"], tmp_path / "out")
    assert [(p.cfg.rl.optimizer.learning_rate, p.cfg.seed, p.cfg.rl.steps, p.cfg.model.d_model)
            for p in points] == [(rate, seed, 5, 32) for rate in (1e-3, 2e-3) for seed in (0, 1)]
    assert [p.workdir for p in points] == [tmp_path / "out" / "runs" / name for name in NAMES]


@pytest.mark.parametrize("more, flags, words", [
    ("[{'rl.stepz': 3}]", [], ["setting 0", "unknown field config.rl.stepz", "rl.steps"]),
    ("[{'rl.steps': 3}, {'rl.steps': 'x'}]", [], ["setting 1", "steps"]),
    ("[{'rl.steps': 3}, {'rl.steps': -3}]", [], ["setting 1", "config.rl.steps is -3"]),
    ("[{'rl.steps': 3}] * 2", [], ["settings 0 and 1", "the same"]),
    ("sweeps.grids({})", [], ["experiment.py, line 10", "grids"]),
    (SEEDS, ["--config.seed=4"], ["config.seed", "sweep varies"]),
    (SEEDS, ["--config.rl.stepz=4"], ["unknown field config.rl.stepz"]),
    (SEEDS, ["--workdir=x"], ["workdir"]),
    (SEEDS, ["--index=4"], ["--index=4", "0 to 3"]),
    (SEEDS, ["--table"], ["--table", "out holds no run of this sweep yet"]),
    (SEEDS, [f"--out={__file__}/out", "--dry-run"], ["--out", "test_sweep.py is no folder"]),
])
def test_what_is_wrong_is_named_before_anything_starts(
        command, tmp_path, monkeypatch, more, flags, words):
    monkeypatch.setattr(jobs, "run", lambda *args, **how: pytest.fail("something was started"))
    with pytest.raises(config.ConfigError) as caught:
        sweep.main([*command(more), *flags])
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_a_sweep_with_what_is_there_and_how_to_go_on(command, monkeypatch, capsys):
    def interrupted(found, *, signals, **how):
        signals.append(2)
        return []

    monkeypatch.setattr(jobs, "run", interrupted)
    assert sweep.main(command()) == 130
    assert "signal 2: start again with the same flags" in capsys.readouterr().err


def test_a_file_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match=r"no function sweep\(\)"):
        sweep.main([f"--config={ROOT / 'configs/quickstart.py'}", f"--out={tmp_path}"])


def test_a_folder_of_another_configuration_is_refused(command, tmp_path):
    workdir = tmp_path / "out/runs" / NAMES[2]
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"seed": 7}))
    with pytest.raises(config.ConfigError, match="seed: 7 there, 0 now"):
        sweep.main([*command(), "--dry-run"])


# ------------------------------------------------------------------------------------------- runs

WRITES = """
import json, pathlib, sys
folder = pathlib.Path({folder!r})
folder.mkdir(parents=True)
if {fails}:
    sys.exit("no such luck")
(folder / "metrics.jsonl").write_text(json.dumps(
    {{"step": 1, "eval/avg@4": {value}, "eval/greedy": 0.5}}) + "\\n")
(folder / "finished.json").write_text({cfg!r})
"""


def stand_ins(monkeypatch, fails):
    """Jobs that write what a run leaves, but for the points whose names `fails` holds."""
    started = []

    def job(point, out, flags):
        code = WRITES.format(
            folder=str(point.workdir), fails=point.name in fails, cfg=json.dumps(
                config.to_json(point.cfg)),
            value=10 * point.cfg.rl.optimizer.learning_rate + point.cfg.seed / 10)
        return jobs.Job(point.name, ("-c", code), out / "logs" / f"{point.name}.txt",
                        done=lambda: sweep_points.done(point),
                        prepare=lambda: started.append(point.name))

    monkeypatch.setattr(sweep, "_job", job)
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    return started


def test_one_that_fails_is_named_the_others_go_on_and_a_second_start_finishes(
        command, tmp_path, monkeypatch, capsys):
    started = stand_ins(monkeypatch, fails={NAMES[1]})
    assert sweep.main([*command(), "--parallel=2"]) == sweep.SOME_FAILED
    shown = capsys.readouterr()
    assert f"failed: {NAMES[1]}" in shown.err and "no such luck" in shown.err
    assert started == NAMES
    page = (tmp_path / "out/sweep.md").read_text()
    assert f"{NAMES[1]}: failed; log: {tmp_path}/out/logs/" in page
    assert "| 0.001 | 1 of 2 | 0.01 |" in page and "| 0.002 | 2 of 2 | **0.07**" in page
    (tmp_path / "out/runs" / NAMES[1]).rmdir()
    again = stand_ins(monkeypatch, fails=set())
    assert sweep.main(command()) == 0
    assert again == [NAMES[1]]
    page = (tmp_path / "out/sweep.md").read_text()
    assert "Without a result" not in page
    assert page.count("**0.5**") == 2  # greedy is alike, so none is below the other
    assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sweep.main([*command(), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"{place} {name} done" for place, name in enumerate(NAMES)]


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_is_done_only_if_it_came_to_its_end_and_then_stays(
        command, tmp_path, monkeypatch, status):
    called = []

    def trained(cfg, workdir):
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
        called.append((cfg.rl.optimizer.learning_rate, cfg.seed, workdir))
        return status

    monkeypatch.setattr(train, "train", trained)
    assert sweep.main([*command(), f"--index={NAMES[3]}"]) == status
    assert sweep.main([*command(), "--index=3"]) == status
    assert called == [(2e-3, 1, f"{tmp_path}/out/runs/{NAMES[3]}")] * (1 if status == 0 else 2)


def test_a_child_is_told_its_setting_by_name(command, tmp_path):
    config_flag, _ = command()
    flags = [config_flag, "--config.rl.steps=5"]
    points, _ = sweep_points.read(flags, tmp_path / "out")
    assert sweep._job(points[1], tmp_path / "out", flags).arguments == (
        "-m", "dapo_jax.sweep", *flags, f"--out={tmp_path}/out", f"--index={NAMES[1]}")


def test_names_of_folders_are_short_plain_and_different():
    long = [sweep_points.name_of({"task.template": f"{'Q: {prompt}/ ' * 30}{end}"})
            for end in ("a", "b")]
    assert long[0] != long[1] and all(len(name) < 140 for name in long)
    assert not set("/{} ") & set("".join(long))
    assert sweep_points.name_of({}) == "as_it_is"
    assert sweep_points.name_of({"a": "x y"}) != sweep_points.name_of({"a": "x_y"})


# ------------------------------------------------------------------------------------------ table


def finished(points, values):
    """Runs that ended with these accuracies, after an evaluation that does not count."""
    for point, value in zip(points, values, strict=True):
        point.workdir.mkdir(parents=True)
        lines = [{"step": 0, "eval/avg@4": 0.0}, {"step": 1, "eval/avg@4": value}, {"step": 2}]
        (point.workdir / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines))
        sweep_points.finish(point)


def test_seeds_are_averaged_with_students_interval(command, tmp_path):
    config_flag, _ = command("sweeps.seeds(3)")
    points, _ = sweep_points.read([config_flag], tmp_path / "out")
    finished(points, [0.1, 0.2, 0.6, 0.5, 0.5, 0.5])
    first, second = sweep_table.rows(points, ("eval/avg@4", "absent"))
    # Of 0.1, 0.2, 0.6: deviation 0.264575, over sqrt(3) and times t(0.975, 2) = 4.302653.
    value = first.values["eval/avg@4"]
    assert value.mean == pytest.approx(0.3, abs=1e-9)
    assert value.high - value.mean == pytest.approx(0.657236, abs=1e-5)
    assert second.values["eval/avg@4"].low == pytest.approx(0.5) and second.ended == 3
    assert first.values["absent"] is None
    sweep_table.write(tmp_path / "out", points, ("eval/avg@4", "absent"), failed=(), flags=["-x"])
    with open(tmp_path / "out/sweep.csv", newline="") as file:
        row, other = csv.DictReader(file)
    assert (float(row[RATE]), float(other[RATE]), row["runs"]) == (1e-3, 2e-3, "3")
    assert float(row["eval/avg@4 low"]) == pytest.approx(value.low) and row["absent"] == ""
    assert "0.3 (-0.3572 to 0.9572)" in (tmp_path / "out/sweep.md").read_text()


def test_settings_with_common_seeds_are_compared_in_words(command, tmp_path):
    config_flag, _ = command("sweeps.seeds(3)")
    points, _ = sweep_points.read([config_flag], tmp_path / "out")
    finished(points, [0.10, 0.20, 0.31, 0.30, 0.41, 0.50])
    sweep_table.write(tmp_path / "out", points, ("eval/avg@4",), failed=(), flags=["-x"])
    text = (tmp_path / "out/sweep.md").read_text()
    line, = (line for line in text.splitlines() if line.startswith("| eval/avg@4 | rl"))
    # t(0.975, 2) x 0.01 / sqrt(3); of the 27 means of resamples the lowest is -0.21, then -0.20667.
    assert f"| {RATE} = 0.001 | -0.2 (-0.2248 to -0.1752) | -0.2 (-0.2078 to -0.1922) |" in line
    assert "a real difference: lower by 0.2" in line
    config_flag, _ = command("sweeps.seeds(1)")
    points, _ = sweep_points.read([config_flag], tmp_path / "one")
    finished(points, [0.1, 0.2])
    sweep_table.write(tmp_path / "one", points, ("eval/avg@4",), failed=(), flags=["-x"])
    assert "real difference" not in (tmp_path / "one/sweep.md").read_text()


def test_the_usual_metrics_are_what_the_runs_measure(command, tmp_path):
    config_flag, _ = command("sweeps.grid({'eval.samples': (2, 4)})")
    points, _ = sweep_points.read([config_flag], tmp_path)
    assert sweep_table.usual(points) == ("eval/avg@2", "eval/greedy", "eval/avg@4")
    points, _ = sweep_points.read([config_flag, "--config.eval.greedy=False"], tmp_path)
    assert sweep_table.usual(points) == ("eval/avg@2", "eval/avg@4")


@pytest.mark.slow
def test_a_sweep_of_two_settings_runs_and_ends_with_a_table(tmp_path, command):
    arguments = [*command("[{'rl.steps': 1}]"), "--config.sft.steps=1", "--parallel=2"]
    done = subprocess.run(
        [sys.executable, "-m", "dapo_jax.sweep", *arguments], cwd=ROOT, capture_output=True,
        text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and all(0 <= float(row["eval/avg@4"]) <= 1 for row in rows)
