"""Scoring in killable processes: one bad item costs itself alone."""

import os
import signal
import threading
import time
import timeit

import numpy as np
import pool_runs
import pytest

from dapo_jax import config
from dapo_jax.envs import pool


@pytest.mark.parametrize("workers", [1, 3])
def test_rewards_come_back_in_order(workers):
    scores = pool_runs.run("act", [str(n) for n in range(300)], workers=workers)
    assert scores.reward.tolist() == list(range(300))
    assert scores.reward.dtype == np.float32 and scores.valid.dtype == bool
    assert scores.valid.all()
    assert (scores.errors, scores.timeouts, scores.first_failure) == (0, 0, "")


def test_a_reward_that_raises_or_gives_nan_is_masked_and_counted():  # B71
    texts = ["true", "int", "nan", "float", "f32", "i64", "dict", "inf", "beyond f32", "huge",
             "bool_"]
    scores = pool_runs.run("typed", texts)
    assert scores.reward.tolist() == [1, 2, 0, 0.5, 0.25, 3, 4, 0, 0, 0, 1]
    assert scores.valid.tolist() == [text not in ("nan", "inf", "beyond f32", "huge")
                                     for text in texts]
    assert (scores.errors, scores.timeouts) == (4, 0)
    assert scores.first_failure == "item 2: pool_rewards:typed returned nan"
    assert scores.failures["value"] == 4
    scores = pool_runs.run("act", ["1", "raise", "rude", "exit", "2"])
    assert scores.valid.tolist() == [True, False, False, False, True]
    assert scores.errors == scores.failures["error"] == 3
    assert scores.first_failure.startswith("item 1: pool_rewards:act: ")
    assert scores.first_failure.endswith("pool_rewards.py:16: ZeroDivisionError: on purpose")


def test_a_failed_item_gets_the_configured_reward_if_asked():
    scores = pool_runs.run("act", ["1", "raise", "die"], on_failure="reward", failure_reward=-0.5)
    assert scores.reward.tolist() == [1, -0.5, -0.5]
    assert scores.valid.all()
    assert scores.errors == 2


WRONG_TYPES = [
    ("str", "a str"), ("none", "a NoneType"), ("list", "a list"), ("empty dict", "a dict without"),
    ("nested", "a dict"), ("array", "a ndarray"), ("complex", "a complex64")]


@pytest.mark.parametrize("text, kind", WRONG_TYPES)
def test_what_is_no_number_is_refused_with_function_and_type(text, kind):  # B71
    with pool_runs.start("typed") as workers:
        with pytest.raises(pool.RewardTypeError, match=f"pool_rewards:typed returned {kind}"):
            pool.score(workers, [text] * 2, [{}] * 2)
        with pytest.raises(RuntimeError, match="closed"):
            pool.score(workers, ["int"], [{}])
    assert issubclass(pool.RewardTypeError, config.ConfigError)


def test_a_wrong_type_among_numbers_costs_its_sample_only():  # B71
    with pool_runs.start("typed") as workers:
        scores = pool.score(workers, ["int", *(text for text, _ in WRONG_TYPES), "task"], [{}] * 9)
        assert scores.reward.tolist() == [2, *[0] * 7, 0.75]
        assert scores.valid.tolist() == [True, *[False] * 7, True]
        assert scores.failures["type"] == scores.errors == 7
        assert "pool_rewards:typed returned a str" in scores.first_failure
        assert not pool.score(workers, ["str"], [{}]).valid.any()  # it has given numbers before


def test_an_unusable_record_is_a_kind_of_its_own():
    texts, golds = ["5", "5", "6"], ["5", "", "5"]
    with pool.open("dapo_jax.envs.math:score", config.Scoring()) as workers:
        scores = pool.score(workers, texts, [{"answer": gold} for gold in golds])
    assert scores.reward.tolist() == [1, 0, 0] and scores.valid.tolist() == [True, False, True]
    assert scores.failures["record"] == scores.errors == 1
    assert "the right answer '' is empty" in scores.first_failure


@pytest.mark.parametrize("bad", ["die", "killed", "hang", "hang in C"])
@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_item_at_fault_is_lost(bad, workers):
    texts = [str(n) for n in range(40)]
    texts[3] = texts[17] = bad
    scores = pool_runs.run("act", texts, workers=workers, timeout=0.4)
    lost = {3, 17}
    assert scores.valid.tolist() == [n not in lost for n in range(40)]
    assert scores.reward.tolist() == [0 if n in lost else n for n in range(40)]
    hung = bad.startswith("hang")
    assert (scores.errors, scores.timeouts) == ((0, 2) if hung else (2, 0))
    assert ("no answer within 0.4 s" if hung else "ended with status") in scores.first_failure


def test_a_worker_that_its_own_alarm_ends_was_late():
    # As where this process does not get to run when the limit is over.
    scores = pool_runs.run("act", ["1", "alarm", "2"])
    assert scores.valid.tolist() == [True, False, True]
    assert (scores.timeouts, scores.errors) == (1, 0)


def test_a_pool_whose_every_item_kills_ends_and_serves_the_next_call():
    with pool_runs.start("act", workers=2) as workers:
        scores = pool.score(workers, ["die"] * 5, [{}] * 5)
        assert (scores.errors, scores.valid.any()) == (5, False)
        assert pool.score(workers, ["7"], [{}]).reward.tolist() == [7]


def test_the_limit_is_for_one_item_not_for_the_call():
    scores = pool_runs.run("act", ["slow"] * 30, timeout=0.5)
    assert scores.valid.all()


def test_a_worker_killed_while_idle_is_replaced_at_no_cost():
    with pool_runs.start("pid") as workers:
        first = int(pool.score(workers, [""], [{}]).reward[0])
        os.kill(first, signal.SIGKILL)
        assert pool_runs.gone(first)
        scores = pool.score(workers, [""] * 3, [{}] * 3)
        assert scores.valid.all()
        assert int(scores.reward[0]) != first


def test_a_worker_that_stops_before_it_reads_costs_no_item():
    texts = [str(n) + " " * 300_000 for n in range(4)]
    with pool_runs.start("act", timeout=1.0) as workers:
        pool.ready(workers)
        stopped = workers.crew.workers[0].process.pid
        os.kill(stopped, signal.SIGSTOP)
        rescue = threading.Timer(10, os.kill, (stopped, signal.SIGKILL))
        rescue.start()  # a pool that waits until the worker reads is freed, and found too slow
        begin = time.monotonic()
        scores = pool.score(workers, texts, [{}] * 4)
        rescue.cancel()
    assert scores.reward.tolist() == [0, 1, 2, 3]
    assert scores.valid.all()
    assert time.monotonic() - begin < 8


def test_prints_and_reads_of_a_reward_do_not_touch_the_protocol():
    scores = pool_runs.run("act", ["print", "stdin", "2", "print"])
    assert scores.reward.tolist() == [1, 5, 2, 1]
    assert scores.valid.all()


def test_workers_import_neither_jax_nor_the_parents_main():
    texts = ["jax", "pytest", "flax", "dapo_jax.types", "json"]
    assert pool_runs.run("modules", texts).reward.tolist() == [0, 0, 0, 0, 1]
    with pool.open("dapo_jax.envs.arithmetic:score", config.Scoring()) as workers:
        scores = pool.score(workers, ["47", "48"], [{"answer": "47"}] * 2)
    assert scores.reward.tolist() == [1, 0]


def test_a_reward_that_uses_jax_gets_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert pool_runs.run("platform", ["cpu", "cuda"]).reward.tolist() == [1, 0]


def test_workers_that_keep_ending_before_they_begin_are_an_error_not_a_loop(
        tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "SPARE_RESTARTS", 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ends_on_items.py").write_text(
        "import os\nfrom dapo_jax.envs import worker\n"
        "worker._serve = lambda *_: os._exit(4)\ndef score(text, record): return 1\n")
    with pool.open("ends_on_items:score", config.Scoring()) as workers, \
            pytest.raises(RuntimeError, match="keep ending between items.*status 4"):
        pool.score(workers, ["1"], [{}])


@pytest.mark.parametrize("reward, words", [
    ("no_such_module:score", "cannot import module 'no_such_module'"),
    ("pool_rewards:acts", "has no 'acts'; did you mean act"),
    ("exits_at_import:score", "SystemExit: 7"),
    ("dies_at_import:score", "ended with status 5 before it could score"),
])
def test_a_reward_that_cannot_be_used_is_an_error_not_a_loop(
        reward, words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(7)")
    (tmp_path / "dies_at_import.py").write_text("import os; os._exit(5)")
    with pool.open(reward, config.Scoring(workers=2)) as workers, \
            pytest.raises(config.ConfigError, match=words):
        pool.ready(workers)
    with pool.open(reward, config.Scoring()) as workers, \
            pytest.raises(config.ConfigError, match=words):
        pool.score(workers, ["1"], [{}])


def test_records_that_the_worker_cannot_read_are_an_error_not_a_loop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "vanishing.py").write_text("class Thing: pass")
    import vanishing
    with pool_runs.start("act") as workers:
        pool.ready(workers)
        (tmp_path / "vanishing.py").unlink()
        with pytest.raises(config.ConfigError, match="vanishing"):
            pool.score(workers, ["1"], [{"thing": vanishing.Thing()}])


def test_large_texts_pass_both_ways():
    texts = [str(n) + " " * 300_000 for n in range(40)]
    assert pool_runs.run("act", texts, workers=2).reward.tolist() == list(range(40))


def test_no_items_and_unequal_lengths():
    with pool_runs.start("act") as workers:
        scores = pool.score(workers, [], [])
        assert (scores.reward.shape, scores.valid.shape, scores.errors) == ((0,), (0,), 0)
        with pytest.raises(ValueError, match="2 texts but 1 records"):
            pool.score(workers, ["1", "2"], [{}])


def test_closing_ends_workers_and_may_be_repeated():
    workers = pool_runs.start("act", workers=2)
    pool.ready(workers)
    pids = [worker.process.pid for worker in workers.crew.workers]
    pool.close(workers)
    pool.close(workers)
    assert all(pool_runs.gone(pid) for pid in pids)


def test_a_reward_is_not_interrupted_by_ctrl_c():
    with pool_runs.start("act") as workers:
        pool.ready(workers)
        pid = workers.crew.workers[0].process.pid
        os.kill(pid, signal.SIGINT)
        assert pool.score(workers, ["1"], [{}]).valid.all()
        assert not pool_runs.gone(pid, within=0)


def test_trivial_answers_are_scored_quickly_once_warm():
    texts, records = ["47\n"] * 512, [{"prompt": "12+35=", "answer": "47"}] * 512
    with pool.open("dapo_jax.envs.arithmetic:score", config.Scoring()) as workers:
        pool.ready(workers)
        seconds = timeit.repeat(lambda: pool.score(workers, texts, records), number=1, repeat=20)
    assert min(seconds) < 0.05  # 5 ms; the best of many, as the machine may be busy
