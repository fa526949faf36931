"""What a report makes of its runs: settings, comparisons, curves; and where a run was made."""

import subprocess

import numpy as np
import pytest
from test_report import make_run, many

from dapo_jax import journal, report
from dapo_jax.runtime import environment, panels, report_data


def test_runs_that_differ_in_their_seed_only_are_one_setting(tmp_path):
    runs = report.read(many(tmp_path, {"a": (0.1, 0.2), "b": (0.3, 0.4)}, mesh={"data": 2}))
    assert report_data.grouped(runs) == {"mesh.data = None": [0, 1], "mesh.data = 2": [2, 3]}
    long = {"task": {"template": "x" * 80}}
    runs = report.read(many(tmp_path, {"a": (0.1, 0.2), "b": (0.3, 0.4)}, **long))
    assert report_data.grouped(runs) == {"a": [0, 1], "b": [2, 3]}
    runs = report.read(many(tmp_path, {"a": (0.1,), "b": (0.3,)}, checkpoint={"every": 9}))
    assert list(report_data.grouped(runs).values()) == [[0, 1]]  # what changes no number


def test_what_may_differ_within_a_run_may_differ_within_a_setting():
    for field in journal.FREE:
        assert f"{field}.x".startswith(report_data.APART), field


def test_settings_with_common_seeds_are_compared(tmp_path):
    runs = report.read(many(tmp_path, {"a": (0.1, 0.2, 0.31), "b": (0.3, 0.41, 0.5)},
                            lora={"rank": 2}))
    got = report_data.compared(runs, report_data.grouped(runs))
    assert got["base"] == "lora.rank = None" and [row_[0] for row_ in got["rows"]] == [
        "avg@8", "greedy"]
    assert [got["rows"][0][place] for place in (1, 3, 5)] == [
        "lora.rank = 2", "+0.200 (+0.175 to +0.225)", "0, 1, 2"]
    assert got["rows"][0][2].startswith("a real difference: higher by 0.2")
    one = report.read(many(tmp_path, {"a": (0.1,), "b": (0.3,)}, lora={"rank": 2}))
    assert report_data.compared(one, report_data.grouped(one))["rows"] == []


def test_of_one_run_the_fields_that_are_not_as_by_default_are_shown(tmp_path):
    run, = report.read([make_run(tmp_path / "run", filter={"tolerance": 0.5, "metric": "task"})])
    got = report_data.changes([run])
    assert got["head"] == ["default", "run"]
    assert ["filter.tolerance", "1e-06", "0.5"] in got["rows"]
    assert not any(row_[0] == "filter.metric" for row_ in got["rows"])


def test_long_curves_are_means_of_equal_stretches_that_meet():
    rng = np.random.default_rng(0)
    steps = np.flatnonzero(rng.random(500) < 0.7).astype(float)
    values = rng.random(len(steps))
    xs, ys = report_data.thinned(steps, values, 7)
    want = {}
    for step, value in zip(steps, values):
        want.setdefault(step // 7, []).append(value)
    assert xs == [7 * place + 3 for place in want]
    np.testing.assert_allclose(ys, [np.mean(row_) for row_ in want.values()], rtol=1e-4)
    assert report_data.thinned(steps, values, 1)[0] == steps.tolist()


def test_the_oracle_is_what_the_ratio_says():
    panel = next(panel for panel in panels.PANELS if panel.name == "sampling")
    lines = [{"step": 1}, {"step": 2, "sampling/asked": 112.0, "sampling/oracle_ratio": 1.4},
             {"step": 3, "sampling/asked": 0.0, "sampling/oracle_ratio": None}]
    steps, values = panels.series(panel, lines)["oracle"]
    assert steps.tolist() == [2] and values.tolist() == pytest.approx([80.0])


def test_the_commit_is_gits_and_an_installed_package_has_none(tmp_path):
    def git(*words):
        return subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", *words],
            check=True, capture_output=True, text=True).stdout.strip()
    assert environment.commit(tmp_path) == ""
    git("init", "-q")
    assert environment.commit(tmp_path) == ""  # nothing committed yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "m")
    assert environment.commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("2")
    assert environment.commit(tmp_path).endswith("-dirty")
    assert environment.commit(tmp_path / "inside") == ""
    assert {"python", "jax", "numpy", "device", "cores"} <= environment.described().keys()
