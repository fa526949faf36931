"""Four processes, of which one is killed or told to end at random moments, or whose disk is full:
slow. How often each says DAPO_JAX_KILLS (3 if it is not set): a run is disturbed up to five times.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pods
import pytest

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DAPO_JAX_KILLS", "3"))
CHAIN = 5  # disturbances of one run
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


def moment(workdir, started, draw, kind):
    """Wait for a moment of this kind; false if the run ended before."""
    before = pods.written(workdir)
    if kind == "start":  # imports, reading of the checkpoint, compiles
        time.sleep(draw.uniform(0, 20))
    else:
        least = before + draw.randint(1, 2)
        pods.wait_until(lambda: pods.written(workdir) >= least, started)
        if kind == "save":
            pods.wait_until(lambda: any((workdir / "checkpoints").glob("*tmp*")), started)
            time.sleep(draw.uniform(0, 0.05))
        else:
            time.sleep(draw.uniform(0, 0.3))
    return all(process.poll() is None for process in started)


def ended(started):
    """The statuses of all, and how long after the first the last one ended."""
    pods.wait_until(lambda: False, started)
    begun = time.monotonic()
    statuses = [process.wait(timeout=pods.PATIENCE) for process in started]
    return statuses, time.monotonic() - begun


def disturb(workdir, number, draw, kind):
    """Start the run and send one process the signal at such a moment; what became of it."""
    started = start(workdir)
    if not moment(workdir, started, draw, kind):
        return {"kind": kind, "statuses": ended(started)[0], "step": None}
    place, victim = pods.written(workdir) - 1, draw.randrange(4)
    started[victim].send_signal(number)
    statuses, seconds = ended(started)
    saved = sorted(path.name for path in (workdir / "checkpoints").glob("*"))
    return {"kind": kind, "step": place, "process": victim, "statuses": statuses,
            "seconds": round(seconds, 1), "checkpoints": saved}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("chain", range(-(-KILLS // CHAIN)))
def test_a_disturbed_run_ends_with_the_same_numbers(whole, tmp_path, number, chain):
    draw, workdir = random.Random(1000 * chain + number), tmp_path / "run"
    wanted = min(CHAIN, KILLS - CHAIN * chain)
    kinds = draw.sample(["save", "save", "step", "step", "start"], CHAIN)[:wanted]
    for kind in kinds:
        found = disturb(workdir, number, draw, kind)
        print(number.name, json.dumps(found), flush=True)
        said = found["statuses"]
        assert found["step"] is not None, said  # else the run is too short for so many
        if number == signal.SIGKILL:
            assert said.count(-signal.SIGKILL) == 1 and not FOR_GOOD & set(said), found
        else:
            # A signal before the handlers are set ends that process alone, as a kill does.
            assert set(said) == {143} or (-signal.SIGTERM in said and not FOR_GOOD & set(said))
        assert found["seconds"] < 60
    run(workdir)
    assert_same_run(workdir, whole)


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


def test_a_full_disk_ends_the_run_with_2_and_it_goes_on_with_the_same_numbers(
        whole, disk, tmp_path):
    draw, workdir, filler = random.Random(5), tmp_path / "run", disk / "filler"
    (disk / "run").mkdir()
    workdir.symlink_to(disk / "run")  # what the processes print lies beside it, on another disk
    for kind in ("step", "save", "step", "save", "start")[:max(1, KILLS // 4)]:
        started = start(workdir)
        assert moment(workdir, started, draw, kind)
        fill(filler)
        statuses, seconds = ended(started)
        told = "".join(pods.said(workdir, index) for index in range(4))
        print(json.dumps({"kind": kind, "step": pods.written(workdir) - 1, "statuses": statuses,
                          "seconds": round(seconds, 1)}), flush=True)
        assert 2 in statuses and 0 not in statuses, told
        assert "No space left on device" in told and "error: " in told
        filler.unlink()
    run(workdir)
    assert_same_run(workdir, whole)
