"""Episodes in the log and on pages: turn by turn, what was told apart, and played again."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import test_eval_page
import test_report

from dapo_jax import config, replay_episodes, report
from dapo_jax.envs import calculator, episode_play, episode_pool, episodes
from dapo_jax.rollout import episodes_log, outcomes
from dapo_jax.runtime import checkpoint, eval_page, run_files

RECORD = {"prompt": "12*34=", "answer": "408", "level": "2"}
NASTY = "</script><img src=x onerror=alert(1)>\u202e"


def calculated(texts, *, seed=3, record=RECORD):
    """The episode in which the model writes these texts."""
    state, messages = calculator.start(record, seed)
    one = episode_play.Episode("calculator", record, seed, tuple(messages))
    for text in texts:
        turn = calculator.step(state, text)
        state = turn.state
        one = episode_play.Episode(
            one.environment, record, seed, one.messages, (*one.turns, episode_play.Played(
                text, turn.reply, turn.reward, turn.done, turn.parts, 0.0123)))
    return one


def played(*found, ends=None):
    return outcomes.Played(
        found, tuple(ends or ("done",) * len(found)), np.arange(len(found), dtype=np.int32),
        np.full(len(found), 2, np.int32), np.array([0.1, 0.2, 0.3]), retries=2, refused=1)


GOOD = calculated(["<calc>12*34</calc>\n", "408\n"])
BAD = episode_play.Episode("calculator", RECORD, 4, GOOD.messages, GOOD.turns[:1], "error",
                           NASTY, NASTY)


def logged(one, place=0):
    """As a line of DIR/samples that was read again."""
    own = {"prompt": one.record["prompt"], "answer": one.record["answer"], "reward": one.reward,
           "episode": episodes_log.row(played(one), place)}
    return json.loads(json.dumps(own))


def test_an_episode_comes_back_from_its_row():
    for one in (GOOD, BAD):
        assert episodes_log.episode(logged(one)) == one
    assert episodes_log.episode({"prompt": "1+1=", "completion": "2"}) is None


def test_answers_are_looked_for_in_what_the_model_wrote_last():
    both = played(GOOD, BAD)
    assert episodes_log.finals(both) == ["408\n", NASTY]
    assert episodes_log.texts(both) == ["<calc>12*34</calc>\n408\n", "<calc>12*34</calc>\n" + NASTY]


def test_metrics_tell_of_turns_tools_failures_and_latency():
    found = episodes_log.metrics([played(GOOD, BAD, ends=("done", "failed")), played(GOOD)])
    wanted = {"turns/mean": 5 / 3, "turns/max": 2, "turns/calls": 1, "turns/tool_errors": 0,
              "invalid/env_error": 1, "invalid/kind_error": 1, "invalid/kind_timeout": 0,
              "turns/ended_done": 2 / 3, "time/environment_p50": 0.2,
              "time/environment_p95": 0.3, "environment/retries": 4,
              "environment/refused": 2, "turns/reply_tokens": 1 / 3,
              "turns/cut": 2}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert {f"invalid/kind_{kind}" for kind in episodes.FAILURES} <= set(found)


def test_a_log_is_played_again_and_what_differs_is_counted(tmp_path, capsys):
    rows = [logged(GOOD), logged(calculated(["409\n"])), {"prompt": "1", "completion": "2"}]
    path = tmp_path / "step_000001.jsonl"

    def run():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return replay_episodes.main([str(path)]), json.loads(capsys.readouterr().out)

    status, found = run()
    assert (status, found) == (0, {"episodes": 2, "differing": 0, "failed": 0, "skipped": 1,
                                   "first": ""})
    rows[0]["episode"]["turns"][0]["reply"] = "<result>409</result>\n"
    status, found = run()
    assert (status, found["differing"]) == (1, 1) and "turn 0: reply is" in found["first"]
    rows[0]["episode"]["environment"] = "hostile_environments:BROKEN"
    path.write_text(json.dumps(rows[0]) + "\n")
    assert replay_episodes.main([str(path)]) == 2  # an error of the environment's own `ready`
    assert "ready raised ZeroDivisionError: on purpose" in capsys.readouterr().err
    path.write_text('{"episode": {}}\n')
    assert replay_episodes.main([str(path)]) == 2 and f"{path}:1" in capsys.readouterr().err


def test_a_log_is_played_again_under_the_limits_of_its_run(tmp_path):
    path = tmp_path / "samples" / "step_000001.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(logged(GOOD)) + "\n")
    assert [row.limits for row in replay_episodes.read(path)] == [episode_pool.Limits()]
    own = config.Environment(workers=3, timeout=77.0, memory_mb=500, retries=1, backoff=0.5,
                             bound=5, pause=4.0)
    checkpoint.write_config(tmp_path, {"environment": vars(own)})
    (row,) = replay_episodes.read(path)
    assert vars(row.limits) == {name: getattr(own, name) for name in (
        "workers", "timeout", "memory_mb", "retries", "backoff", "bound", "pause")}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(config.ConfigError, match="config.json is no configuration of a run"):
        replay_episodes.read(path)


ROWS = [test_eval_page._row(0, "408", verdict="right", episode=logged(GOOD)["episode"]),
        test_eval_page._row(1, NASTY, verdict="invalid", episode=logged(BAD)["episode"]),
        test_eval_page._row(2, "5")]


def test_the_evaluations_page_holds_every_turn_and_none_becomes_markup():
    page = eval_page.render("T", test_eval_page.REPORT, ROWS, limit=0)
    tags, prompts = test_eval_page._parsed(page)
    assert tags.tags.count("script") == 2 and "img" not in tags.tags
    shown = prompts[0]["responses"][0]["episode"]
    assert [turn["text"] for turn in shown["turns"]] == ["<calc>12*34</calc>\n", "408\n"]
    assert shown["turns"][0]["reply"] == "<result>408</result>\n"
    assert prompts[1]["responses"][0]["episode"]["message"] == NASTY
    assert "episode" not in prompts[2]["responses"][0]
    assert "neither scored nor learned" in page
    assert "neither scored" not in eval_page.render("T", test_eval_page.REPORT, ROWS[2:], limit=0)


def test_the_report_shows_what_was_told_apart(tmp_path):
    rows = [test_report.row(0, 1.0, episode=logged(GOOD)["episode"]),
            test_report.row(1, 0.0, valid=False, episode=logged(BAD)["episode"]),
            test_report.row(2, 0.0, completion="plain"),
            test_report.row(3, 0.5, episode=logged(calculated(["<calc>1/0</calc>\n"]))["episode"])]
    workdir = test_report.make_run(tmp_path / "run", samples=rows)
    shown = {row["reward"]: row for row in run_files.read(workdir, name="r").samples}
    good, bad, plain, wrong = shown["1"], shown["failed"], shown["0"], shown["0.5"]
    assert good["turns"] == [
        {"text": "<calc>12*34</calc>\n", "reply": "<result>408</result>\n", "fault": False,
         "note": "turn 1 · reward 0 · 0.012 s · calls 1 · tool errors 0"},
        {"text": "408\n", "reply": "", "note": "turn 2 · reward 1 · 0.012 s", "fault": False}]
    assert (good["failure"], good["ended"]) == ("", "done")
    assert bad["turns"][1] == {"text": NASTY, "reply": "", "note": "", "fault": False}
    assert bad["failure"] == f"error: {NASTY}"
    assert wrong["turns"][0]["fault"] and "tool errors 1" in wrong["turns"][0]["note"]
    assert "turns" not in plain and plain["completion"] == "plain"
    assert report.main([str(workdir)]) == 0
    assert "<img src=x" not in (workdir / "report.html").read_text()


def looked_at(path):
    """The page as a browser makes it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium to look at the page with")
    return subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_a_browser_shows_turns_with_their_times(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(eval_page.render("T", test_eval_page.REPORT, ROWS, limit=0), encoding="utf-8")
    body = looked_at(path).split("<main", 1)[1].split("</main>")[0]
    assert body.count('class="text told"') == 2 and "0.012 s" in body
    assert "turn 2 · reward 1" in body and "failed (error): &lt;/script&gt;" in body
    assert "<img" not in body and "calls 1" in body


@pytest.mark.slow
def test_a_browser_shows_the_reports_turns_with_times_and_tool_errors(tmp_path):
    rows = [test_report.row(0, 1.0, episode=logged(GOOD)["episode"]),
            test_report.row(1, 0.0, valid=False, episode=logged(BAD)["episode"]),
            test_report.row(2, 0.0, episode=logged(calculated(["<calc>1/0</calc>\n"]))["episode"])]
    workdir = test_report.make_run(tmp_path / "run", samples=rows)
    assert report.main([str(workdir)]) == 0
    body = looked_at(workdir / "report.html")
    assert body.count('class="text told"') == body.count("<article>") > 0  # one in each
    assert '<div class="faint">turn 2 · reward 1 · 0.012 s</div>' in body
    assert '<div class="wrong">turn 1 · reward 0 · 0.012 s · calls 1 · tool errors 1</div>' in body
    assert "ended: done" in body and "failed: error: &lt;/script&gt;" in body
