"""A whole run in several processes of this machine, slow: each compiles all of it."""

import json
import pathlib
import shutil
import signal
import time

import pytest
from pods import PATIENCE, assert_same, lines, run, said, samples, start

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


def evaluated(run, workdir, count):
    """What `count` processes print of the newest checkpoint of a copy of the run."""
    shutil.copytree(run, workdir)
    programs = dict.fromkeys(range(count), ("-m", "dapo_jax.evaluate"))
    for index, process in enumerate(start(workdir, count, programs=programs)):
        assert process.wait(timeout=PATIENCE) == 0, said(workdir, index)
    printed = [[line for line in pathlib.Path(f"{workdir}_{index}.log").read_text().splitlines()
                if line.startswith('{"step"')] for index in range(count)]
    assert [len(found) for found in printed] == [1] + [0] * (count - 1)
    return json.loads(printed[0][0])


def test_two_processes_evaluate_a_checkpoint_as_one_does(alone, tmp_path):
    """It is what the run itself measured at its end; process 0 alone prints and writes."""
    workdir, wanted = alone
    one, two = (evaluated(workdir, tmp_path / str(count), count) for count in (1, 2))
    assert two["step"] == 4 and two == pytest.approx(one, rel=1e-5)
    figures = {name: value for name, value in wanted[-1].items() if name.startswith("eval/")}
    assert {name: two[name] for name in figures} == pytest.approx(figures, rel=1e-5)
    name = "eval_000004.jsonl"
    assert samples(tmp_path / "2")[name] == samples(tmp_path / "1")[name] == samples(workdir)[name]


def test_streaming_in_two_processes_is_that_of_one(tmp_path):
    """Rewards are scored by both, and exchanged where their boundary takes them in."""
    wanted = run(tmp_path / "one", 1, "rollout.mode=streaming")
    assert_same(run(tmp_path / "two", 2, "rollout.mode=streaming"), wanted)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")


@pytest.mark.parametrize("changes", [
    ("rl.prompts_per_step=16",),  # two microbatches of 8 slots
    ("rl.packed_prompts=24", "rl.packed_rows=2")],
    ids=["stacks", "packed"])
def test_stacks_and_packed_rows_in_two_processes_are_those_of_one(tmp_path, changes):
    changes += ("rl.steps=1", "eval.every=0")
    wanted = run(tmp_path / "one", 1, *changes)
    assert_same(run(tmp_path / "two", 2, *changes), wanted)


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
