"""Whole tiny runs in several processes of this machine, and what they leave."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from test_processes import free_port

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
PATIENCE = 600  # seconds for one start, on a busy machine
TRAIN = ("-m", "dapo_jax.train")


def start(workdir, count, *changes, devices=8, programs=None):
    """`count` processes with `devices` between them, which write to WORKDIR_0.log and so on;
    `programs` has, by process, arguments of python that take the place of the trainer's."""
    port, started = free_port(), []
    values = dict(change.split("=", 1) for change in (*RUN, *changes))  # the last of a field counts
    for index in range(count):
        flags = [f"--config.{name}={value}" for name, value in values.items()]
        if count > 1:
            flags += ["--cluster=manual", f"--coordinator=127.0.0.1:{port}", "--heartbeat=10",
                      "--join=120", f"--processes={count}", f"--process={index}"]
        with open(f"{workdir}_{index}.log", "w") as log:
            started.append(subprocess.Popen(
                [sys.executable, *(programs or {}).get(index, TRAIN),
                 "--config=configs/quickstart.py", f"--workdir={workdir}", *flags],
                cwd=ROOT, stdout=log, stderr=log, env={
                    **os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // count}"}))
    return started


def run(workdir, count, *changes, status=0, devices=8):
    """Start them and wait for all; the metrics, if each ended with `status`."""
    for index, process in enumerate(start(workdir, count, *changes, devices=devices)):
        assert process.wait(timeout=PATIENCE) == status, said(workdir, index)
    return lines(workdir)


def said(workdir, index):
    """The end of what a process wrote."""
    return pathlib.Path(f"{workdir}_{index}.log").read_text()[-3000:]


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def exact(workdir):
    """Its metrics without what may differ between equal runs."""
    free = (*TIMES, "compiles")
    return [{name: value for name, value in line.items() if not name.startswith(free)}
            for line in lines(workdir)]


def samples(workdir):
    return {path.name: path.read_text() for path in sorted((workdir / "samples").iterdir())}


def assert_same(found, wanted):
    """Counts alike; what devices sum in another order to 1e-5."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        names = {name for name in one | other if not name.startswith(TIMES)}
        for name in names:
            value, number = other[name], isinstance(other[name], int | float)
            expected = pytest.approx(value, rel=1e-5, abs=1e-5) if number else value
            assert one[name] == expected, (one["step"], name)


def wait_until(fact, started):
    """Until the fact is one, or a process has ended."""
    limit = time.monotonic() + PATIENCE
    while not fact() and all(process.poll() is None for process in started):
        assert time.monotonic() < limit
        time.sleep(0.001)
