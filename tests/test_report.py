"""The report: what is read, and what the page holds."""

import html.parser
import json
import re

import matplotlib.figure
import numpy as np
import pytest

from dapo_jax import report
from dapo_jax.runtime import panels, plots, report_data, run_files

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(workdir, *, steps=4, accuracy=0.5, samples=(), seed=7, **config):
    """A run of one SFT step and some RL steps, as files."""
    lines = [{"step": 0, "phase": "start", "eval/avg@8": 0.125, "eval/greedy": 0.25}]
    lines += [{"step": 1, "phase": "sft", "policy/loss": 2.0, "time/step": 30.0}]
    lines += [{"step": step, "phase": "rl", "policy/loss": 0.1, "reward/mean": step / 10,
               "policy/kl": None, "groups/all_zero": 1, "groups/informative": 2,
               "groups/all_one": 1, "time/rollout": 1.0, "time/update": 1.0, "time/step": 30.0,
               "compiles": 0,
               "sampling/tokens": 1000.0} for step in range(2, steps + 1)]
    lines[-1] |= {"eval/avg@8": accuracy, "eval/greedy": accuracy}
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "config.json").write_text(json.dumps(
        {"seed": seed, "rl": {"steps": steps}, "_environment": {"jax": "0.0.1"}, "_config": "x.py"}
        | config))
    (workdir / "samples").mkdir(exist_ok=True)
    for step in (1, steps):
        (workdir / "samples" / f"step_{step:06d}.jsonl").write_text(
            "".join(json.dumps({"step": step} | row) + "\n" for row in samples))
    return workdir


def row(prompt_id, reward, completion="12", **more):
    return {"prompt_id": prompt_id, "prompt": "5+7=", "completion": completion, "answer": "12",
            "reward": reward, "valid": True, "stopped": True, "length": 3, "kept": True} | more


def many(tmp_path, values, **changed):
    """Runs by folder name: arm A and arm B with seeds, of these last accuracies."""
    return [make_run(tmp_path / f"{arm}/seed_{seed}", accuracy=value, seed=seed,
                     **(changed if arm == "b" else {}))
            for arm, row_ in values.items() for seed, value in enumerate(row_)]


class Page(html.parser.HTMLParser):
    """Tags, addresses and the data of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.data, self._inside = [], [], None, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self._inside = ("id", "data") in attrs

    def handle_data(self, data):
        if self._inside:
            self.data = json.loads(data)
            self._inside = False


def parsed(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_loads_nothing_and_its_figures_lie_beside_it(tmp_path, capsys):
    workdir = make_run(tmp_path / "run", samples=[row(0, 1.0)])
    assert report.main([str(workdir)]) == 0
    assert capsys.readouterr().out.strip() == str(workdir / "report.html")
    found = parsed(workdir / "report.html")
    assert found.addresses == ["data:,"]
    assert found.tags.count("script") == 3 and not {"iframe", "img"} & set(found.tags)
    files = {path.stem: path.read_bytes() for path in (workdir / "report").iterdir()}
    assert all(image.startswith(PNG) for image in files.values())
    assert files.keys() == {"accuracy", "reward", "groups", "loss", "time", "compiles"}
    assert [panel["name"] for panel in found.data["panels"]] == [
        panel.name for panel in panels.PANELS if panel.name in files]


def test_missing_metrics_are_named_and_their_old_files_removed(tmp_path):
    workdir = make_run(tmp_path / "run")
    (workdir / "report").mkdir()
    (workdir / "report" / "entropy.png").write_bytes(b"old")
    report.main([str(workdir)])
    left_out = parsed(workdir / "report.html").data["missing"]
    assert "Entropy of the policy" in left_out and "Task reward" not in left_out
    assert not (workdir / "report" / "entropy.png").exists()


def test_the_head_sums_the_run_up(tmp_path):
    workdir = make_run(tmp_path / "run", steps=4, accuracy=0.75)
    got = report_data.summary(run_files.read(workdir, name="run"))
    assert got["steps"] == "4, 1 sft, 3 rl"
    assert got["held-out avg@8"] == "0.125 → 0.75" and got["held-out greedy"] == "0.25 → 0.75"
    assert got["mean reward"] == "0.2 → 0.4" and got["tokens sampled"] == "3,000"
    assert got["time in steps"] == "2.0 min"
    report.main([str(workdir)])
    data = parsed(workdir / "report.html").data
    assert data["environment"] == [["jax", "0.0.1"], ["config", "x.py"]]
    assert '"seed": 7' in data["runs"][0]["config"]
    assert data["phases"] == [[["rollout", 3.0], ["update", 3.0], ["other", 114.0]]]
    assert data["runs"][0]["borders"] == [[1.5, "rl"]]


def test_right_and_wrong_samples_of_steps_spread_over_the_run_are_shown(tmp_path):
    many = [row(n % 6, float(n % 2), completion=f"completion {n}") for n in range(60)]
    workdir = make_run(tmp_path / "run", samples=many)
    for step in range(2, 80):
        (workdir / "samples" / f"step_{step:06d}.jsonl").write_text(json.dumps(many[0]) + "\n")
    (workdir / "samples" / "eval_000004.jsonl").write_text(json.dumps(row(9, 0.0)) + "\n")
    shown = run_files.read(workdir, name="run", rows=8).samples
    first = [r for r in shown if r["step"] == 1]
    assert [r["right"] for r in first] == [True] * 4 + [False] * 4
    assert [r["completion"] for r in first[:3]] == ["completion 1", "completion 3", "completion 5"]
    steps = list(dict.fromkeys(r["step"] for r in shown if r["kind"] == "training"))
    assert len(steps) == run_files.STEP_FILES and (steps[0], steps[-1]) == (1, 79)
    assert shown[-1]["kind"] == "held out" and shown[-1]["kept"] == "yes"
    assert shown[-1]["reward"] == "0"


NASTY = "</script><script>alert(1)</script>{{ 7 * 7 }}<!--\n\t\x00\x1b[31m\u202e\ud800\x85&amp;"


def test_sample_text_stays_within_the_data(tmp_path):
    workdir = make_run(tmp_path / "<b>run", samples=[
        row(0, 1.0, completion=NASTY, prompt=NASTY, answer=NASTY),
        row(1, 0.0, completion="z" * 5000),
        row(2, 0.0, valid=False, kept=None, stopped=None, answer=None)])
    report.main([str(workdir)])
    raw = (workdir / "report.html").read_bytes()
    assert not set(raw) & {*range(0x00, 0x0A), *range(0x0B, 0x20), 0x7F}
    assert b'\xe2\x80\xae' not in raw and b'\xc2\x85' not in raw
    found = parsed(workdir / "report.html")
    assert found.tags.count("script") == 3 and "b" not in found.tags
    assert b"alert(1)" in raw and b"<script>alert" not in raw
    shown = {one["prompt"]: one for one in found.data["runs"][0]["samples"]}
    assert NASTY in shown and shown[NASTY]["completion"] == shown[NASTY]["answer"] == NASTY
    long, = (one["completion"] for one in found.data["runs"][0]["samples"]
             if one["completion"].startswith("zz") and one["step"] == 1)
    assert long == f"{'z' * run_files.TEXT_LIMIT} … {5000 - run_files.TEXT_LIMIT} more characters"
    assert any(one["reward"] == "failed" for one in found.data["runs"][0]["samples"])


def test_several_runs_are_overlaid_in_the_first_directory_or_out(tmp_path):
    first = make_run(tmp_path / "a" / "run")
    second = make_run(tmp_path / "b" / "run", steps=9)
    alone = plots.draw(panels.PANELS[0], {"a": run_files.read(first, name="a").lines})
    assert report.main([str(first), str(second)]) == 0
    assert (first / "report.html").exists() and not (second / "report.html").exists()
    data = parsed(first / "report.html").data
    assert [one["name"] for one in data["runs"]] == ["a/run", "b/run"]
    assert data["title"] == "2 runs"
    assert data["changes"] == {"head": ["a/run", "b/run"], "rows": [["rl.steps", "4", "9"]]}
    assert (first / "report" / "accuracy.png").read_bytes() != alone
    out = tmp_path / "out"
    assert report.main([str(first), str(second), "--out", str(out)]) == 0
    assert (out / "report.html").exists() and (out / "report" / "groups.png").exists()


@pytest.mark.parametrize("content, message", [
    (None, "metrics.jsonl does not exist"), ("", "holds no metrics yet"),
    ('{"ste', "holds no metrics yet"),
])
def test_a_directory_without_metrics_is_an_error(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert report.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_an_unreadable_config_is_an_error_and_torn_files_are_noted(tmp_path, capsys):
    workdir = make_run(tmp_path / "run", samples=[row(0, 1.0)])
    for path in (workdir / "metrics.jsonl", workdir / "samples" / "step_000004.jsonl"):
        path.write_text(path.read_text() + '{"step": 5, ')
    run = run_files.read(workdir, name="run")
    assert [line["step"] for line in run.lines] == [0, 1, 2, 3, 4]
    assert run.notes == ("metrics.jsonl is torn after line 5; the rest is left out",
                         "step_000004.jsonl is torn after row 1; the rest is left out")
    (workdir / "config.json").write_text("{")
    assert report.main([str(workdir)]) == 2
    assert "config.json is no JSON object" in capsys.readouterr().err


def test_help_names_what_is_written(capsys):
    with pytest.raises(SystemExit) as left:
        report.main(["--help"])
    assert left.value.code == 0
    assert "report.html" in capsys.readouterr().out


def test_the_running_mean_is_that_of_equal_stretches_on_both_sides():
    values = np.array([1.0, 5.0, np.nan, 2.0, 8.0, 3.0, 4.0])
    want = []
    for place in range(len(values)):
        reach = min(place, len(values) - 1 - place, 2)
        want.append(np.nanmean(values[place - reach:place + reach + 1]))
    np.testing.assert_allclose(plots._running_mean(values, 2), want, rtol=1e-12)


@pytest.mark.parametrize("panel", panels.PANELS, ids=lambda panel: panel.name)
def test_each_panel_draws_its_metrics_for_one_run_and_two(panel):
    names = [re.sub(r"\(.*\)", "pass@8" if "pass" in pattern else "avg@8", pattern)
             for pattern, _ in panel.metrics]
    lines = [{"step": step, "phase": "sft" if step < 3 else "rl",
              **{name: 0.1 * step for name in names}} for step in range(6)]
    assert plots.draw(panel, {"one": lines}).startswith(PNG)
    assert plots.draw(panel, {"one": lines, "two": lines[:1]}).startswith(PNG)
    assert plots.draw(panel, {"one": [{"step": 1, names[0]: None}]}) is None


def test_the_difficulty_map_shows_of_the_prompts_seen_the_share_at_each_pass_rate():
    lines = [{"step": 4, "history/unseen": 0.5, "history/rate_0": 0.4, "history/rate_1": 0.1},
             {"step": 6, "history/unseen": 0.0, "history/rate_0": 0.25, "history/rate_1": 0.75}]
    panel = next(panel for panel in panels.PANELS if panel.kind == "map")
    axes = matplotlib.figure.Figure().subplots()
    plots._map(axes, panel, panels.series(panel, lines))
    drawn = axes.collections[0]
    np.testing.assert_allclose(drawn.get_array().reshape(2, 2), [[0.8, 0.25], [0.2, 0.75]])
    corners = drawn.get_coordinates()
    assert corners[0, :, 0].tolist() == [3.5, 5, 6.5] and corners[:, 0, 1].tolist() == [0, 0.5, 1]


def test_the_last_evaluation_is_shown_with_its_data_sets_and_its_page(tmp_path):
    one = {"value": 0.25, "low": 0.125, "high": 0.5}
    figures = {"avg@4": one, "length": one, "invalid": one}
    workdir = make_run(tmp_path / "run")
    (workdir / "eval").mkdir()
    for step in (3, 20):
        (workdir / "eval" / f"step_{step:06d}.html").write_text("")
        (workdir / "eval" / f"step_{step:06d}.json").write_text(json.dumps(
            {"step": step, "prompts": 9, "samples": 4, "overall": figures, "levels": {},
             "sets": {"aime<24>": figures | {"prompts": 5}}}))
    lines = (workdir / "metrics.jsonl").read_text()
    more = {"step": 5, "eval/aime<24>/avg@4": 0.25, "eval/interval/avg@4_low": 0.1}
    (workdir / "metrics.jsonl").write_text(lines + json.dumps(more) + "\n")
    run = run_files.read(workdir, name="run")
    shown = parsed(report.write([run], tmp_path)).data["runs"][0]
    assert (shown["evaluation"]["step"], shown["evaluation"]["samples"]) == (20, 4)
    assert shown["pages"][-1] == "eval/step_000020.html"
    assert shown["evaluation"]["rows"][1][:3] == ["aime<24>", "5", "0.250 (0.125–0.500)"]
    assert report_data.summary(run)["held-out aime<24>/avg@4"] == "0.25 → 0.25"
    assert not any("interval" in label for label in report_data.summary(run))
