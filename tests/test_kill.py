"""One of four processes is killed, or told to end, at random moments: slow. How often each says
DAPO_JAX_KILLS (3 if it is not set)."""

import os
import random
import signal
import time

import pytest
import test_pods

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DAPO_JAX_KILLS", "3"))
CHANGES = ("rl.steps=7", "checkpoint.every=2", "checkpoint.keep=1", "eval.every=3")
PATIENCE = 300  # seconds for one start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, exact(test_pods.run(workdir, 4, *CHANGES))


def test_what_one_process_cannot_read_none_goes_on_from(whole, tmp_path):
    """The newest checkpoint lacks a part that only one of them reads."""
    workdir = tmp_path / "run"
    test_pods.run(workdir, 4, *CHANGES, "checkpoint.keep=9", "rl.steps=5")
    for path in (workdir / "checkpoints" / "6" / "arrays" / "ocdbt.process_2" / "d").iterdir():
        path.write_bytes(b"")
    found = exact(test_pods.run(workdir, 4, *CHANGES, "checkpoint.keep=9"))
    assert found == whole[1]
    assert (workdir / "checkpoints" / "incomplete_6_0").is_dir()


def exact(lines):
    free = (*test_pods.TIMES, "compiles")
    return [{name: value for name, value in line.items() if not name.startswith(free)}
            for line in lines]


def wait_until(fact, started):
    """Until the fact is one, or a process has ended."""
    limit = time.monotonic() + PATIENCE
    while not fact() and all(process.poll() is None for process in started):
        assert time.monotonic() < limit
        time.sleep(0.001)


def disturbed(workdir, number, draw, *, saving):
    """Start the run and send one process the signal, while a checkpoint is written or at any time;
    the statuses of all."""
    started = test_pods.start(workdir, 4, *CHANGES)
    least, metrics = draw.randint(0, 7), workdir / "metrics.jsonl"
    wait_until(lambda: least == 0 or (metrics.is_file()
                                      and metrics.read_bytes().count(b"\n") >= least), started)
    if saving:
        wait_until(lambda: any((workdir / "checkpoints").glob("*tmp*")), started)
    else:
        time.sleep(draw.uniform(0, 20 if least == 0 else 1))
    draw.choice(started).send_signal(number)
    return [process.wait(timeout=PATIENCE) for process in started]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_disturbed_run_ends_with_the_same_numbers(whole, tmp_path, number, kill):
    draw = random.Random(1000 * kill + number)
    said = disturbed(tmp_path / "run", number, draw, saving=kill % 3 == 0)
    if number == signal.SIGKILL:
        # None goes on without the one that is dead; all may have been done already.
        assert -signal.SIGKILL in said and (0 not in said) or set(said) <= {0, -signal.SIGKILL}
    else:
        # A signal before the handlers are set ends that process alone, as a kill does.
        assert set(said) in ({143}, {0}) or -signal.SIGTERM in said
    found = exact(test_pods.run(tmp_path / "run", 4, *CHANGES))
    assert found == whole[1]
    assert test_pods.samples(tmp_path / "run") == test_pods.samples(whole[0])
