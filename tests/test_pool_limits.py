"""What a scoring process may use, and that nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pool_runs
import pytest

from dapo_jax import config
from dapo_jax.envs import pool


@pytest.mark.parametrize("hog", ["hog", "hog by fork"])
def test_memory_beyond_the_limit_costs_its_item_only(hog):
    texts = ["1", hog, "2", hog, "3"]
    scores = pool_runs.run("act", texts, memory_mb=300)
    assert scores.reward.tolist() == [1, 0, 2, 0, 3]
    assert scores.valid.tolist() == [True, False, True, False, True]
    assert scores.failures["memory"] == scores.errors == 2
    assert "pool_rewards:act needed more memory" in scores.first_failure


def test_memory_that_rewards_leave_behind_costs_one_item_in_a_while_not_all():
    scores = pool_runs.run("leaks", ["x"] * 12, memory_mb=300)
    assert 0 < scores.failures["memory"] <= 5
    assert scores.valid.sum() == 12 - scores.failures["memory"]


def test_without_a_limit_a_reward_may_allocate():
    assert pool_runs.run("act", ["hog"], memory_mb=0).reward.tolist() == [600]


def test_a_limit_below_what_the_reward_imports_is_named():
    heavy = pool.open("heavy_rewards:score", config.Scoring(memory_mb=60))
    with heavy as workers, pytest.raises(config.ConfigError, match="memory_mb = 60"):
        pool.ready(workers)


def test_a_reward_that_forks_and_comes_back_twice_answers_once(capfd):
    scores = pool_runs.run("act", ["fork", "1", "fork", "2"])
    assert capfd.readouterr().err == ""  # the copies end quietly
    assert scores.reward.tolist() == [7, 1, 7, 2] and scores.valid.all()


@pytest.mark.parametrize("way, end", [
    ("fork", "hang"), ("daemon", "hang"), ("setsid", "die"), ("subprocess", "die"),
    ("daemon", "stay")])
def test_what_a_reward_started_ends_with_its_worker(way, end, tmp_path):
    note = tmp_path / "child"
    workers = pool.open("pool_rewards:starts", config.Scoring(timeout=0.7))
    pool.score(workers, ["1"], [{}])
    scores = pool.score(workers, [way, "1"], [{"note": str(note), "end": end}, {}])
    assert scores.valid.tolist() == [end == "stay", True]
    if end == "stay":
        assert not pool_runs.gone(int(note.read_text()), within=0)
    pool.close(workers)
    assert pool_runs.gone(int(note.read_text()))


def test_a_reward_that_writes_into_the_pipe_costs_its_item_only():
    scores = pool_runs.run("act", ["1", "garbage", "2", "flood", "3"])
    assert scores.reward.tolist() == [1, 0, 2, 0, 3]
    assert scores.failures["ended"] == scores.errors == 2


def test_ctrl_c_in_the_middle_of_scoring_leaves_no_process(tmp_path):
    note = tmp_path / "child"
    workers = pool.open("pool_rewards:starts", config.Scoring(timeout=100.0))
    pool.ready(workers)
    pids = [worker.process.pid for worker in workers.crew.workers]

    def interrupt():
        while not (note.exists() and note.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's job in the background starts with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        pool.score(workers, ["setsid"], [{"note": str(note), "end": "hang"}])
    signal.signal(signal.SIGINT, before)
    assert all(pool_runs.gone(pid) for pid in [*pids, int(note.read_text())])


def test_what_a_late_reward_started_is_killed_with_it(tmp_path):
    note = tmp_path / "child"
    pool_runs.run("act", ["hang with child"], [{"note": str(note)}], timeout=1.0)
    assert pool_runs.gone(int(note.read_text()))


PARENT = '''
import sys
from dapo_jax import config
from dapo_jax.envs import parts, pool
workers = pool.open("pool_rewards:pid", config.Scoring(timeout=float(sys.argv[2])))
pool.score(workers, [sys.argv[1]], [{"note": sys.argv[3]}])
'''


@pytest.mark.parametrize("text, timeout", [("hang", "100"), ("hang in C", "1")])
def test_no_worker_outlives_a_parent_that_is_killed(text, timeout, tmp_path):
    note = tmp_path / "worker"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, text, timeout, str(note)],
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    limit = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < limit:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    assert pool_runs.gone(int(note.read_text()))
