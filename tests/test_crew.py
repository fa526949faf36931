"""Workers forked from a process that has imported what they serve, and their replacement."""

import ctypes
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pool_runs
import pytest

from dapo_jax import config
from dapo_jax.envs import crew, nursery, pool, processes


@pytest.fixture
def imports(tmp_path, monkeypatch):
    monkeypatch.setenv("CREW_IMPORTS", str(tmp_path / "imports"))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else nothing is left to print
    return tmp_path / "imports"


def opened(**settings):
    return pool.open("crew_rewards:act", config.Scoring(**{"timeout": 20.0, **settings}))


def scored(workers, *texts, records=None):
    return pool.score(workers, texts, records or [{}] * len(texts))


def test_what_is_served_is_imported_once_however_many_workers_are_lost(imports, capfd):
    with opened(workers=2) as workers:
        scores = scored(workers, *["die", "print"] * 6)
    assert scores.valid.tolist() == [False, True] * 6
    assert imports.read_text() == "imported\n"
    printed = capfd.readouterr().err
    assert (printed.count("while imported"), printed.count("a line")) == (1, 6)


def test_a_forked_worker_has_what_a_fresh_one_has(monkeypatch):
    texts = ["files", "threads", "leads", "token", "token"]
    with opened() as workers:
        forked = scored(workers, "die", *texts).reward[1:].tolist()
        assert isinstance(workers.crew.workers[0].process, nursery.Forked)
        assert scored(workers, "parent").reward[0] == workers.crew.nursery.process.pid
    monkeypatch.setattr(nursery, "possible", lambda: False)
    with opened() as workers:
        fresh = scored(workers, *texts).reward.tolist()
        assert workers.crew.nursery is None
    assert forked[:3] == fresh[:3] == [6, 2, 1]  # three standard ones, two pipes and the listing
    assert forked[3] == forked[4] == 2 and fresh[3] == fresh[4] == 0  # the third process's own


def test_a_token_is_written_over_one_of_its_length_only(monkeypatch):
    monkeypatch.setenv(processes.TOKEN, "")
    memory = ctypes.create_string_buffer(b"1-a.000000000.")
    processes.rename(ctypes.addressof(memory), processes.numbered("1-a", 12))
    assert memory.value.decode() == os.environ[processes.TOKEN] == "1-a.000000012."
    assert processes.crew_of("1-a.000000012.") == "1-a."
    with pytest.raises(ValueError, match="not as long"):
        processes.rename(ctypes.addressof(memory), "1-a.0000000123.")


def test_forked_workers_draw_numbers_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "uses_numpy.py").write_text("import numpy.random\nfrom crew_rewards import act")
    drawn = []
    with pool.open("uses_numpy:act", config.Scoring(timeout=20.0)) as workers:
        for _ in range(3):
            drawn.append(scored(workers, "random", "numpy", "die").reward[:2])
        assert isinstance(workers.crew.workers[0].process, nursery.Forked)
    for numbers in zip(*drawn, strict=True):  # the standard library's, then numpy's
        assert len(set(numbers)) == 3


@pytest.mark.parametrize("line, why", [
    ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "1 threads running"),
    ("kept = open(__file__)", "leaves open /.*leaves_something.py"),
    ("kept = subprocess.Popen(['sleep', '1000'])", "leaves a process behind")])
def test_where_forking_is_unsafe_workers_are_fresh_and_a_line_says_so(
        line, why, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaves_something.py").write_text(
        f"import subprocess, threading, time\nfrom crew_rewards import act\n{line}\n")
    with caplog.at_level(logging.WARNING), \
            pool.open("leaves_something:act", config.Scoring(timeout=20.0)) as workers:
        assert scored(workers, "1", "die", "2").reward.tolist() == [1, 0, 2]
        assert workers.crew.nursery is None and not workers.crew.forks
        mark = workers.crew.mark
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("reward 'leaves_something:act': its import leaves")
    assert re.search(why, said), said
    assert processes._marked(f"{processes.TOKEN}={mark}".encode()) == []


def test_a_nursery_that_ends_costs_what_its_workers_were_at_and_is_replaced(imports):
    with opened(workers=2) as workers:
        first = scored(workers, "parent").reward[0]
        scores = scored(workers, *map(str, range(6)), "orphan", *map(str, range(6)))
        lost = np.flatnonzero(~scores.valid)
        assert 6 in lost and len(lost) <= 2  # what the other worker was at, if anything
        assert "of the process that forked it, -9" in scores.first_failure
        assert scored(workers, "parent").reward[0] not in (0, first)
    assert imports.read_text() == "imported\n" * 2


def test_what_was_answered_before_a_nursery_ended_counts_however_late_it_is_seen(monkeypatch):
    look = crew._wait

    def late(found, seconds):
        """The answer comes after this look, and the nursery's end before it is acted on."""
        events, limit = look(found, seconds), time.monotonic() + 0.5
        while time.monotonic() < limit and found.nursery and found.nursery.ready and any(
                worker.work and not worker.unsent for worker in found.workers):
            if nursery.readable(found.nursery.control):
                return events - {worker.process.stdout.fileno() for worker in found.workers}
            time.sleep(0.01)
        return events

    with opened() as workers:
        pool.ready(workers)
        monkeypatch.setattr(crew, "_wait", late)
        scores = scored(workers, *["1", "orphan"] * 4)  # the first four are given together
    assert scores.valid.tolist() == [True, False] * 4


def test_nurseries_that_keep_ending_are_an_error_not_a_loop(monkeypatch):
    monkeypatch.setattr(crew, "BIRTHS", 2)
    workers = opened()
    scores = scored(workers, *["1", "orphan"] * 4)
    assert scores.valid.tolist() == [True, False] * 4  # each was of use before
    with pytest.raises(RuntimeError, match="forks workers for reward 'crew_rewards:act' keeps"):
        scored(workers, *["orphan"] * 9)
    assert workers.crew.births == 0 and workers.crew.closed


def test_a_nursery_that_stands_still_is_done_without(monkeypatch):
    monkeypatch.setattr(nursery, "ANSWER_SECONDS", 0.5)
    with opened() as workers:
        pool.ready(workers)
        os.kill(workers.crew.nursery.process.pid, signal.SIGSTOP)
        assert scored(workers, "die", "1").valid.tolist() == [False, True]


def test_a_lost_worker_leaves_neither_a_process_nor_an_open_file():
    with opened(workers=2) as workers:
        scored(workers, "die", "1")
        files = len(os.listdir("/proc/self/fd"))
        scored(workers, *["die"] * 12)
        pool.ready(workers)
        assert len(os.listdir("/proc/self/fd")) == files
        told = [own.process.pid for own in workers.crew.workers]
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(workers.crew.nursery.process.pid)],
            capture_output=True, text=True, check=True).stdout.split()
        assert sorted(map(int, children)) == sorted(told)  # no zombie either


PARENT = '''
import sys
from dapo_jax import config
from dapo_jax.envs import pool
workers = pool.open("crew_rewards:act", config.Scoring(timeout=100.0))
pool.score(workers, ["leave"], [{"note": sys.argv[1]}])
'''


def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    note = tmp_path / "child"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(note)],
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    limit = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < limit:
        time.sleep(0.01)
    marked = processes._marked(f"{processes.TOKEN}={parent.pid}-".encode())
    assert len(marked) >= 3  # the nursery, a worker and what left it
    stat = pathlib.Path(f"/proc/{note.read_text()}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGSTOP)  # the worker sees nothing
    parent.kill()
    parent.wait()
    assert all(pool_runs.gone(pid) for pid in [*marked, int(note.read_text())])


def test_an_import_that_hangs_ends_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hangs_at_import.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.setattr(crew, "START_SECONDS", 1.0)
    with pool.open("hangs_at_import:act", config.Scoring()) as workers, \
            pytest.raises(config.ConfigError, match="status -9 before it could score, or took"):
        scored(workers, "1")
    code = PARENT.replace("crew_rewards", "hangs_at_import")
    parent = subprocess.Popen([sys.executable, "-c", code, ""],
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not (
            marked := processes._marked(f"{processes.TOKEN}={parent.pid}-".encode())):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert marked and all(pool_runs.gone(pid) for pid in marked)
