"""Jobs under a SLURM of this test's own: one of two tasks trains, leaves on a signal, is queued
again and finishes; a sweep is an array. Slow; needs the right to be root, and Debian's munge,
slurmctld and slurmd."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pods
import pytest
import test_pods
import test_processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
MISSING = [name for name in NEEDED if shutil.which(name, path=PATH) is None]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0, reason=f"not root, or missing: {', '.join(MISSING)}")]

SETTINGS = """
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={first}
SlurmdPort={second}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A controller and a node, in the foreground under a folder of their own."""
    for name in ("munge", "state", "spool"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "munge" / "key").write_bytes(os.urandom(1024))
    (tmp_path / "munge" / "key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    settings = tmp_path / "slurm.conf"
    settings.write_text(SETTINGS.format(
        host=host, folder=tmp_path, first=test_processes.free_port(),
        second=test_processes.free_port(),
        cores=len(os.sched_getaffinity(0))))
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(settings))
    monkeypatch.setenv("PYTHON_OF_RUN", sys.executable)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    munge = [f"--{name}={tmp_path}/munge/{file}" for name, file in (
        ("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"),
        ("seed-file", "seed"))]
    commands = (["munged", "--foreground", "--force", *munge],
                ["slurmctld", "-D", "-f", settings], ["slurmd", "-D", "-f", settings, "-N", host])
    with open(tmp_path / "daemons.log", "w") as log:
        started = []
        for command in commands:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(2)
        yield tmp_path
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=30)


def job(number):
    """Fields of `scontrol show job`."""
    text = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True,
                          check=True).stdout
    return dict(part.split("=", 1) for part in text.split() if "=" in part)


def wait_for(number, states, folder):
    for _ in range(600):
        if job(number)["JobState"] in states:
            return job(number)
        time.sleep(1)
    raise AssertionError((job(number), *(path.read_text()[-3000:]
                                         for path in folder.glob("run/slurm-*.out"))))


def test_a_job_of_two_tasks_trains_leaves_on_a_signal_and_finishes_when_queued_again(slurm):
    workdir = slurm / "run"
    changes = (*pods.RUN, "mesh.data=2", "mesh.fsdp=1", "rl.steps=40", "checkpoint.every=10",
               "eval.every=0")
    sent = subprocess.run(
        ["launch/slurm.sh", "--tasks-per-node=2", "--time=60", "--config=configs/quickstart.py",
         f"--workdir={workdir}", *(f"--config.{change}" for change in changes)],
        cwd=ROOT, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
    number = sent.stdout.split()[-1]
    test_pods.wait_for_step(workdir, 4)
    subprocess.run(["scancel", "--signal=TERM", number], check=True)
    assert wait_for(number, {"PENDING"}, slurm)["Restarts"] == "1"
    left = pods.lines(workdir)[-1]["step"]
    assert 3 < left < 41 and (workdir / "checkpoints" / str(left)).is_dir()
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)
    assert wait_for(number, {"COMPLETED"}, slurm)["ExitCode"] == "0:0"
    assert [line["step"] for line in pods.lines(workdir)] == list(range(42))
    assert sorted(path.name for path in (workdir / "logs").iterdir()) == [
        "process_0000.log", "process_0001.log"]


def test_a_submitted_sweep_trains_each_setting_and_has_a_table(slurm):
    changes = (*pods.RUN, "mesh.data=1", "mesh.fsdp=1", "rl.steps=2", "eval.every=2")
    flags = ("--config=configs/sweeps/quickstart_lr.py", f"--out={slurm / 'run'}",
             *(f"--config.{change}" for change in changes))
    sent = subprocess.run(["launch/sweep.sh", "--parallel=2", "--time=60", *flags], cwd=ROOT,
                          capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
    array = sent.stdout.split()[-1]
    for task in range(4):
        assert wait_for(f"{array}_{task}", {"COMPLETED"}, slurm)["ExitCode"] == "0:0"
    table = subprocess.run([sys.executable, "-m", "dapo_jax.sweep", *flags, "--table"], cwd=ROOT,
                           capture_output=True, text=True)
    assert table.returncode == 0, table.stderr
    rows = (slurm / "run" / "sweep.md").read_text()
    for rate in (5e-5, 1e-4, 2e-4, 4e-4):
        (workdir,) = (slurm / "run" / "runs").glob(f"*learning_rate={rate}*")
        assert pods.lines(workdir)[-1]["step"] == 3
        assert f"| {rate} | 1 of 1 |" in rows
