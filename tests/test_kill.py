"""Four processes, of which one is killed or told to end at random moments, or whose disk is full:
slow. How often each says DAPO_JAX_KILLS (3 if it is not set): a run is disturbed several times.
Whole runs take long to start; those that do nothing but save (saving.py) much less.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pods
import pytest
import test_processes

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DAPO_JAX_KILLS", "3"))
# Each process holds a quarter of each parameter, in a file of its own.
CHANGES = ("model.d_model=32", "model.ff=64", "mesh.data=1", "mesh.fsdp=4", "rollout.slots=(4,)",
           "rl.steps=25", "eval.every=13", "checkpoint.every=2", "checkpoint.keep=1")
FOR_GOOD = {0, 2, 3}  # statuses after which no launcher starts again


def run(workdir, *changes, status=0):
    return pods.run(workdir, 4, *CHANGES, *changes, status=status, devices=4)


def start(workdir, *changes):
    return pods.start(workdir, 4, *CHANGES, *changes, devices=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    run(workdir)
    return workdir


def assert_same_run(workdir, wanted):
    assert pods.exact(workdir) == pods.exact(wanted)
    assert pods.samples(workdir) == pods.samples(wanted)


def test_what_one_process_cannot_read_none_goes_on_from(whole, tmp_path):
    """The newest checkpoint lacks a file that holds one process's shards and no other's."""
    workdir = tmp_path / "run"
    run(workdir, "checkpoint.keep=9", "rl.steps=5")
    arrays = workdir / "checkpoints" / "6" / "arrays"
    lost = list((arrays / "ocdbt.process_2" / "d").iterdir())
    assert max(path.stat().st_size for path in lost) > 4096  # shards, no table of contents
    for path in lost:
        path.unlink()
    run(workdir, "checkpoint.keep=9")
    assert_same_run(workdir, whole)
    assert (workdir / "checkpoints" / "incomplete_6_0").is_dir()
    told = pathlib.Path(f"{workdir}_3.log").read_text()
    assert "checkpoint 6 cannot be read, trying an older one: process 2: " in told


# ------------------------------------------------------------------------------------------ signals


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run that can be started again in its folder until it is done."""

    workdir: pathlib.Path
    start: Callable[[], list[subprocess.Popen]]
    steps: str  # the file that gets a line for each step

    def written(self):
        path = self.workdir / self.steps
        return path.read_bytes().count(b"\n") if path.is_file() else 0


def moment(trial, started, draw, kind, *, most):
    """Wait for a moment of this kind; false if the run ended before. `most` seconds of a start."""
    before = trial.written()
    if kind == "start":  # imports, reading of the checkpoint, compiles
        time.sleep(draw.uniform(0, most))
    else:
        least = before + draw.randint(1, 3)
        pods.wait_until(lambda: trial.written() >= least, started)
        if kind == "save":
            pods.wait_until(lambda: any((trial.workdir / "checkpoints").glob("*tmp*")), started)
            time.sleep(draw.uniform(0, 0.1))
        else:
            time.sleep(draw.uniform(0, 0.3))
    return all(process.poll() is None for process in started)


def ended(started):
    """The statuses of all, and how long after the first the last one ended."""
    pods.wait_until(lambda: False, started)
    begun = time.monotonic()
    statuses = [process.wait(timeout=pods.PATIENCE) for process in started]
    return statuses, round(time.monotonic() - begun, 1)


def disturb(trial, number, draw, kind, *, most):
    """Start the run and send one process the signal at such a moment; what became of it."""
    started = trial.start()
    in_time, victim = moment(trial, started, draw, kind, most=most), draw.randrange(4)
    lines = trial.written()
    if in_time:
        started[victim].send_signal(number)
    statuses, seconds = ended(started)
    there = sorted(path.name for path in (trial.workdir / "checkpoints").glob("*"))
    found = {"kind": kind, "lines": lines, "process": victim, "statuses": statuses,
             "seconds": seconds, "checkpoints": there}
    print(number.name, json.dumps(found), flush=True)
    assert in_time, found  # else the run is too short for so many
    return found


def check_statuses(number, found):
    """None goes on alone, and no launcher takes the run for done."""
    statuses = found["statuses"]
    if number == signal.SIGKILL:
        assert statuses.count(-signal.SIGKILL) == 1 and not FOR_GOOD & set(statuses), found
    else:
        # A signal before the handlers are set ends that process alone, as a kill does.
        early = -signal.SIGTERM in statuses and not FOR_GOOD & set(statuses)
        assert set(statuses) == {143} or early, found
    assert found["seconds"] < 200, found  # 10 s without a heartbeat, 120 s if one never joined


def chains(length):
    """(which, how many): KILLS disturbances in runs of at most `length`."""
    return [(first, min(length, KILLS - first)) for first in range(0, KILLS, length)]


BOTH = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM],
                               ids=["SIGKILL", "SIGTERM"])


@BOTH
@pytest.mark.parametrize("first, count", chains(5))
def test_a_disturbed_run_ends_with_the_same_numbers(whole, tmp_path, number, first, count):
    draw, workdir = random.Random(1000 * first + number), tmp_path / "run"
    trial = Trial(workdir, lambda: start(workdir), "metrics.jsonl")
    for kind in draw.sample(["save", "save", "step", "step", "start"], 5)[:count]:
        check_statuses(number, disturb(trial, number, draw, kind, most=20))
    run(workdir)
    assert_same_run(workdir, whole)


# ----------------------------------------------------------------------------------------- saves

STEPS = 50


def saving(workdir):
    """Start what tests/saving.py is."""
    workdir.mkdir(exist_ok=True)
    address, started = f"127.0.0.1:{test_processes.free_port()}", []
    for index in range(4):
        with open(f"{workdir}_{index}.log", "w") as log:
            started.append(subprocess.Popen(
                [sys.executable, "tests/saving.py", str(workdir), address, str(index), str(STEPS)],
                cwd=pods.ROOT, stdout=log, stderr=log, env={**os.environ, "XLA_FLAGS": ""}))
    return started


def saved_to_the_end(workdir):
    assert ended(saving(workdir))[0] == [0] * 4, pods.said(workdir, 0)
    return dict(np.load(workdir / "end.npz"))


def assert_same_end(found, wanted):
    assert found.keys() == wanted.keys() and int(found["updates"]) == STEPS
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return saved_to_the_end(tmp_path_factory.mktemp("undisturbed") / "run")


@BOTH
@pytest.mark.parametrize("first, count", chains(5))
def test_saves_that_are_disturbed_at_any_moment_cost_nothing_but_time(
        undisturbed, tmp_path, number, first, count):
    draw, workdir = random.Random(7 + 1000 * first + number), tmp_path / "run"
    trial = Trial(workdir, lambda: saving(workdir), "steps")
    for kind in draw.sample(["save", "save", "save", "step", "start"], 5)[:count]:
        check_statuses(number, disturb(trial, number, draw, kind, most=10))
    assert_same_end(saved_to_the_end(workdir), undisturbed)


# --------------------------------------------------------------------------------------- full disks


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder],
                             capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path):
    """Write until nothing more fits, not even a small file's first page."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_up(trial, disk, draw, kind, *, most):
    """Start the run and fill its disk; it ends with 2 and says why. Then there is room again."""
    started = trial.start()
    assert moment(trial, started, draw, kind, most=most)
    fill(disk / "filler")
    statuses, seconds = ended(started)
    told = "".join(pods.said(trial.workdir, index) for index in range(4))
    print("disk", json.dumps({"kind": kind, "lines": trial.written(), "statuses": statuses,
                              "seconds": seconds}), flush=True)
    assert 2 in statuses and 0 not in statuses, told
    assert "No space left on device" in told and "error: " in told
    (disk / "filler").unlink()


def on_disk(disk, tmp_path):
    """A folder on the disk; what the processes print lies beside its name, on another disk."""
    (disk / "run").mkdir()
    (tmp_path / "run").symlink_to(disk / "run")
    return tmp_path / "run"


def test_a_full_disk_ends_the_run_with_2_and_it_goes_on_with_the_same_numbers(
        whole, disk, tmp_path):
    draw, workdir = random.Random(5), on_disk(disk, tmp_path)
    trial = Trial(workdir, lambda: start(workdir), "metrics.jsonl")
    for kind in ("step", "save", "start", "save", "step")[:max(1, KILLS // 4)]:
        fill_up(trial, disk, draw, kind, most=20)
    run(workdir)
    assert_same_run(workdir, whole)


def test_saves_on_a_disk_that_is_full_lose_nothing(undisturbed, disk, tmp_path):
    draw, workdir = random.Random(6), on_disk(disk, tmp_path)
    trial = Trial(workdir, lambda: saving(workdir), "steps")
    for kind in ("save", "step", "save", "step", "save")[:max(1, KILLS // 4)]:
        fill_up(trial, disk, draw, kind, most=10)
    assert_same_end(saved_to_the_end(workdir), undisturbed)
