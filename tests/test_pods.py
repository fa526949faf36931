"""A whole run in several processes of this machine, slow: each compiles all of it."""

import pathlib
import signal
import time

import pytest
from pods import assert_same, lines, run, samples, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    return workdir, run(workdir, 1)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_any_number_of_processes_samples_and_learns_the_same(alone, tmp_path, count):
    workdir, wanted = alone
    found = run(tmp_path / "run", count)
    assert_same(found, wanted)
    assert {line["compiles"] for line in found if line["phase"] != "start"} == {0}
    ours, theirs = samples(tmp_path / "run"), samples(workdir)
    assert ours.keys() == theirs.keys()
    assert ours["step_000002.jsonl"] == theirs["step_000002.jsonl"]
    logs = sorted((tmp_path / "run" / "logs").iterdir())
    assert [path.name for path in logs] == [f"process_{i:04d}.log" for i in range(count)]


def test_streaming_in_two_processes_is_that_of_one(tmp_path):
    """Rewards are scored by both, and exchanged where their boundary takes them in."""
    wanted = run(tmp_path / "one", 1, "rollout.mode=streaming")
    assert_same(run(tmp_path / "two", 2, "rollout.mode=streaming"), wanted)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")


def test_a_run_goes_on_in_another_number_of_processes(alone, tmp_path):
    run(tmp_path / "run", 2, "rl.steps=1")
    assert_same(run(tmp_path / "run", 4), alone[1])


def test_a_signal_to_one_process_ends_all_in_order(tmp_path):
    workdir = tmp_path / "run"
    started = start(workdir, 2, "rl.steps=2000")
    wait_for_step(workdir, 4)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=120) for process in started] == [143, 143]
    last = lines(workdir)[-1]["step"]
    assert (workdir / "checkpoints" / str(last)).is_dir()


def test_the_death_of_one_process_ends_the_others_within_the_heartbeat(tmp_path):
    workdir = tmp_path / "run"
    started = start(workdir, 2, "rl.steps=2000")
    wait_for_step(workdir, 4)
    started[1].kill()
    begun = time.monotonic()
    assert started[0].wait(timeout=120) != 0 and time.monotonic() - begun < 40
    assert "stopped sending heartbeats" in pathlib.Path(f"{workdir}_0.log").read_text()
    saved = max(int(path.name) for path in (workdir / "checkpoints").iterdir()
                if path.name.isdigit())
    again = run(workdir, 2, f"rl.steps={saved + 3}")
    assert again[-1]["step"] == saved + 4


def wait_for_step(workdir, step):
    for _ in range(600):
        time.sleep(0.5)
        path = workdir / "metrics.jsonl"
        if path.is_file() and path.read_text().count("\n") > step:
            return
    raise AssertionError(f"no step {step} after 300 s")
