"""A whole run in several processes of this machine, slow: each compiles all of it."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from test_processes import free_port

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN = (
    "model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=2", "model.head_size=8",
    "model.ff=16", "task.train_size=64", "task.levels=((1,1.0),)",
    "task.reward=dapo_jax.envs.coin:score", "rollout.slots=(8,)", "rollout.max_new_tokens=3",
    "sft.steps=1", "sft.prompts_per_step=8", "sft.microbatch_slots=8", "rl.steps=3",
    "rl.prompts_per_step=4", "rl.samples_per_prompt=4", "rl.microbatch_slots=8",
    "dynamic_sampling.at_limit=partial", "eval.every=2", "eval.prompts=4", "eval.samples=2",
    "checkpoint.every=2", "mesh.data=4", "mesh.fsdp=2", "rl.optimizer.schedule=constant")
TIMES = ("time/", "tokens_per_second/", "processes/")


def start(workdir, count, *changes):
    """`count` processes with eight devices between them."""
    port, started = free_port(), []
    for index in range(count):
        flags = [f"--config.{change}" for change in (*RUN, *changes)]
        if count > 1:
            flags += ["--cluster=manual", f"--coordinator=127.0.0.1:{port}", "--heartbeat=10",
                      f"--processes={count}", f"--process={index}"]
        with open(f"{workdir}_{index}.log", "w") as log:
            started.append(subprocess.Popen(
                [sys.executable, "-m", "dapo_jax.train", "--config=configs/quickstart.py",
                 f"--workdir={workdir}", *flags], cwd=ROOT, stdout=log, stderr=log,
                env={**os.environ,
                     "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // count}"}))
    return started


def run(workdir, count, *changes, status=0):
    for index, process in enumerate(start(workdir, count, *changes)):
        said = process.wait(timeout=600)
        assert said == status, pathlib.Path(f"{workdir}_{index}.log").read_text()[-3000:]
    return lines(workdir)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_same(found, wanted):
    """Counts alike; what devices sum in another order to 1e-5."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        names = {name for name in one | other if not name.startswith(TIMES)}
        for name in names:
            value, number = other[name], isinstance(other[name], int | float)
            expected = pytest.approx(value, rel=1e-5, abs=1e-5) if number else value
            assert one[name] == expected, (one["step"], name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    return workdir, run(workdir, 1)


def samples(workdir):
    return {path.name: path.read_text() for path in sorted((workdir / "samples").iterdir())}


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
