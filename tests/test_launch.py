"""The scripts of launch/: what they would run, and how several processes end."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jsonschema
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "launch").iterdir())

# Acts by its flags, as a process of the run would: --fail=INDEX with --status=S, --stay until told.
STAND_IN = """#!/usr/bin/env bash
[ "$1" = -c ] && { echo 12345; exit; }
for one in "$@"; do
    case "$one" in
        --process=*) index="${one#*=}" ;; --fail=*) fail="${one#*=}" ;;
        --status=*) status="${one#*=}" ;; --stay) stay=yes ;;
    esac
done
echo "hello of $index"
trap 'echo told; exit 143' TERM
if [ "$index" = "${fail:-}" ]; then exit "$status"; fi
while [ "${stay:-}" = yes ]; do sleep 0.1; done
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON_OF_RUN", str(path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def call(script, *arguments):
    return subprocess.run([ROOT / "launch" / script, *arguments], capture_output=True, text=True,
                          cwd=ROOT, timeout=60)


def test_shellcheck_finds_nothing():
    beside = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=beside) or pytest.skip("no shellcheck")
    checked = subprocess.run([program, "-x", *(f"launch/{name}" for name in SCRIPTS)],
                             capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", ["processes.sh", "slurm.sh", "sweep.sh", "tpu_pod.sh",
                                    "gke_jobset.sh"])
def test_help_is_the_head_of_the_script_and_nonsense_is_refused(script):
    told = call(script, "--help")
    assert told.returncode == 0 and f"launch/{script}" in told.stdout and "#" not in told.stdout
    refused = call(script, "nonsense", "--dry-run")
    assert refused.returncode == 2 and "error: " in refused.stderr and not refused.stdout


TPU = ("--image=registry/it's:1", "--accelerator=tpu-v5-lite-podslice", "--topology=4x4")
POD = ("--name=n", "--zone=z", "--accelerator=v5litepod-16", "--runtime=v")


@pytest.mark.parametrize("script, flags, said", [
    ("processes.sh", (), "N, the number of processes, is missing"), ("processes.sh", ("0",), "0"),
    ("processes.sh", ("2", "3"), "'3' is no flag, and N is 2 already"),
    ("processes.sh", ("2", "--devices=0"), "0 must be at least 1"),
    ("processes.sh", ("2", "--restarts=08"), "'08' is no number"),
    ("processes.sh", ("2", "--platform=vulkan"), "platform 'vulkan' is none of"),
    ("slurm.sh", ("--workdir=/r", "--nodes=0"), "0 must be at least 1"),
    ("slurm.sh", ("--workdir=/r", "--tasks-per-node=two"), "'two' is no number"),
    ("slurm.sh", ("--workdir=/r", "--requeues=many"), "'many' is no number"),
    ("slurm.sh", ("--workdir=/r", "--leave=-5"), "'-5' is no number"),
    ("slurm.sh", ("--workdir=/r", "--platform=vulkan"), "platform 'vulkan' is none of"),
    ("tpu_pod.sh", ("train", *POD, "--workdir=/r", "--restarts=x"), "'x' is no number"),
    ("tpu_pod.sh", ("fly", *POD), "'fly' is none of create"),
    ("gke_jobset.sh", (*TPU, "--hosts=0"), "0 must be at least 1"),
    ("gke_jobset.sh", (*TPU, "--grace=1m"), "'1m' is no number"),
    ("gke_jobset.sh", (*TPU, "--topology="), "--topology is missing")])
def test_what_would_fail_only_later_is_refused_by_name(stand_in, script, flags, said):
    refused = call(script, *flags, "--dry-run")
    assert refused.returncode == 2 and said in refused.stderr and not refused.stdout


def test_a_dry_run_here_prints_the_command_and_makes_nothing():
    shown = call("local.sh", "--dry-run", "--config.rl.steps=1").stdout.split()
    assert shown[1:] == ["-m", "dapo_jax.train", "--config=configs/quickstart.py",
                         "--workdir=runs/quickstart", "--config.rl.steps=1"]


def test_a_dry_run_prints_the_variables_that_the_command_needs(stand_in, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (line,) = call("processes.sh", "1", "--devices=3", "--dry-run").stdout.splitlines()
    assert r"XLA_FLAGS=--xla_force_host_platform_device_count=3\ " in line.split("-m ")[0]
    job = call("slurm.sh", "--dry-run", "--workdir=/r", "--gpus", "--requeues=3").stdout
    assert "env DAPO_JAX_PLATFORM=gpu DAPO_JAX_REQUEUES=3 sbatch " in job


# --------------------------------------------------------------------------------- processes here


def test_output_stands_behind_its_process_and_all_done_is_0(stand_in):
    ran = call("processes.sh", "3")
    assert ran.returncode == 0
    assert sorted(ran.stdout.splitlines()) == [f"[{i}] hello of {i}" for i in range(3)]


def test_one_that_fails_is_named_and_the_others_are_ended(stand_in):
    ran = call("processes.sh", "3", "--fail=1", "--status=7", "--stay", "--grace=1")
    assert ran.returncode == 7
    assert "process 1 of 3 ended with status 7" in ran.stderr


@pytest.mark.parametrize("status, starts", [(9, 3), (2, 1), (3, 1)])
def test_starts_again_are_bounded_and_not_for_bad_input_or_limits(stand_in, status, starts):
    ran = call("processes.sh", "1", "--fail=0", f"--status={status}", "--restarts=2")
    assert ran.returncode == status
    assert ran.stdout.count("hello of 0") == starts


def test_a_signal_reaches_all_and_nothing_is_started_again(stand_in):
    process = subprocess.Popen([ROOT / "launch" / "processes.sh", "2", "--stay", "--restarts=5"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(2):
        assert "hello of" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert sorted(out.splitlines()) == ["[0] told", "[1] told"]


def test_a_signal_that_comes_before_the_processes_is_told_to_them(stand_in, tmp_path):
    """The interpreter that looks for a port is slow: the signal comes while it does."""
    slow = tmp_path / "slow"
    slow.write_text(f'#!/usr/bin/env bash\n[ "$1" = -c ] && {{ echo seen >&2; sleep 2; }}\n'
                    f'exec {tmp_path}/python "$@"\n')
    slow.chmod(0o755)
    process = subprocess.Popen(
        [ROOT / "launch" / "processes.sh", "2", "--stay"], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHON_OF_RUN": str(slow)})
    assert process.stderr.readline() == "seen\n"
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=30)
    finally:
        process.terminate()
    assert process.returncode == 143


def test_each_process_has_its_own_gpus_and_place(stand_in):
    lines = call("processes.sh", "2", "--gpus=2", "--dry-run", "--x=a b").stdout.splitlines()
    assert [line.split()[1] for line in lines] == [
        r"CUDA_VISIBLE_DEVICES=0\,1", r"CUDA_VISIBLE_DEVICES=2\,3"]
    for index, line in enumerate(lines):
        assert f"--processes=2 --process={index} --x=a\\ b" in line


def test_flags_for_xla_exist():
    """XLA ends a process at once for a flag that it does not know."""
    probe = (". launch/environment.sh && platform_flags gpu && platform_flags gpu-deterministic && "
             'exec "$0" -c "import jax; jax.devices()"')
    ran = subprocess.run(["bash", "-c", probe, sys.executable], capture_output=True, text=True,
                         cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stderr


# ------------------------------------------------------------------------------- clusters, printed


def test_slurm_is_asked_for_tasks_a_warning_before_the_limit_and_the_job(stand_in):
    line = call("slurm.sh", "--dry-run", "--nodes=4", "--tasks-per-node=8", "--gpus", "--leave=120",
                "--sbatch=--partition=long", "--workdir=/shared/run").stdout
    for part in ("--nodes=4", "--ntasks-per-node=8", "--signal=TERM@120", "--gpus-per-task=1",
                 "--partition=long", "launch/slurm.sbatch --workdir=/shared/run"):
        assert part in line
    job = call("slurm.sbatch", "--dry-run", "--workdir=/shared/run").stdout
    assert job.startswith("srun ") and "dapo_jax.train --cluster=slurm --workdir=/shared" in job


def test_a_sweep_is_an_array_with_a_task_for_each_setting(tmp_path, monkeypatch):
    listing = tmp_path / "python"  # checks nothing: three settings, whatever the flags
    listing.write_text('#!/usr/bin/env bash\necho "$@" >>"${0%/*}/asked"\n'
                       'printf "%s\\n" "0 a=1 new" "1 a=2 done" "2 it_s-5c new"\n')
    listing.chmod(0o755)
    monkeypatch.setenv("PYTHON_OF_RUN", str(listing))
    flags = ("--config=f.py", "--config.rl.steps=5", "--out=/shared/out")
    line = call("sweep.sh", "--dry-run", "--parallel=4", "--time=60", *flags).stdout
    assert (tmp_path / "asked").read_text().split() == [
        "-m", "dapo_jax.sweep", *flags, "--dry-run"]
    assert "--array=0-2%4" in line and "--time=60" in line
    assert line.split("launch/slurm.sbatch ")[1].split() == list(flags)
    assert "--output=/shared/out/slurm-%j.out" in line
    assert call("sweep.sh", "--dry-run", "--config=f.py").returncode == 2  # no folder
    listing.write_text("#!/usr/bin/env bash\necho error: unknown field >&2\nexit 2\n")
    refused = call("sweep.sh", "--dry-run", *flags)
    assert refused.returncode == 2 and not refused.stdout and "unknown field" in refused.stderr
    monkeypatch.setenv("PYTHON_OF_RUN", str(tmp_path / "none"))
    (line,) = call("sweep.sh", "--dry-run", *flags).stderr.splitlines()
    assert f"there is no {tmp_path / 'none'}: launch/local.sh makes it" in line


def test_a_task_of_a_submitted_array_runs_the_setting_that_was_listed_at_its_place(
        tmp_path, monkeypatch):
    for name, text in (("python", 'printf "%s\\n" "0 a=1 new" "1 it_s-5c new"\n'),
                       ("sbatch", 'echo "$DAPO_JAX_SETTINGS"\n')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PYTHON_OF_RUN", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    flags = ("--config=f.py", f"--out={tmp_path / 'out'}")
    settings = call("sweep.sh", *flags).stdout.strip()
    monkeypatch.setenv("DAPO_JAX_SETTINGS", settings)
    monkeypatch.setenv("DAPO_JAX_MODULE", "dapo_jax.sweep")
    for task, name in ((0, "a=1"), (1, "it_s-5c")):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        job = call("slurm.sbatch", "--dry-run", *flags).stdout
        assert job.split("-m ")[1].split() == [
            "dapo_jax.sweep", "--cluster=slurm", *flags, f"--index={name}"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    refused = call("slurm.sbatch", "--dry-run", *flags)
    assert refused.returncode == 2 and f"{settings} has no line for task 2" in refused.stderr


def test_a_tpu_slice_is_asked_for_and_trained_on_by_all_hosts():
    options = ("--dry-run", "--name=n", "--zone=z", "--accelerator=v5litepod-16", "--runtime=v")
    queue = call("tpu_pod.sh", "queue", *options, "--spot").stdout
    assert queue.startswith("gcloud compute tpus queued-resources create n --zone=z ")
    assert "--accelerator-type=v5litepod-16" in queue and "--spot" in queue
    ran = call("tpu_pod.sh", "train", *options, "--workdir=/mnt/run").stdout
    assert "ssh n --zone=z --worker=all" in ran and r"--cluster=auto\ --workdir=/mnt/run" in ran
    assert call("tpu_pod.sh", "train", *options).returncode == 2  # no work directory


@pytest.mark.parametrize("stopped, status, runs", [(False, 143, 3), (True, 3, 1)])
def test_a_run_on_a_tpu_slice_is_not_started_again_once_it_was_stopped(
        tmp_path, monkeypatch, stopped, status, runs):
    """gcloud runs on this machine what it is given for all hosts, and pkill ends nothing."""
    home = tmp_path / "dapo_jax"
    stop = f"{ROOT}/launch/tpu_pod.sh stop {' '.join(POD)}" if stopped else "true"
    for path, text in {
            tmp_path / "gcloud": f'cd {tmp_path}; last="${{*: -1}}"; bash -c "${{last#*=}}"',
            tmp_path / "pkill": "exit 0",
            home / ".venv" / "bin" / "python": f"echo ran >>{tmp_path}/runs; {stop}; exit 143",
            }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for times in (1, 2):  # another train begins anew, whatever was stopped before
        ran = call("tpu_pod.sh", "train", *POD, "--restarts=2", "--workdir=/r")
        assert ran.returncode == status, ran.stderr
        assert (tmp_path / "runs").read_text().count("ran") == times * runs
    assert ("stopped by tpu_pod.sh stop" in ran.stderr) == stopped


SCHEMA = json.loads((ROOT / "tests" / "cases" / "jobset_schema.json").read_text())


@pytest.mark.parametrize("options", [
    TPU, (*TPU, "--slices=2", "--claim=runs"),
    ("--image=i", "--gpus", "--accelerator=nvidia-h100-80gb", "--hosts=2", "--chips=8")])
def test_the_manifest_is_a_jobset(options):
    text = call("gke_jobset.sh", *options, "--workdir=/runs/a", "--config.x=('a',1)").stdout
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, SCHEMA)
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == options[0].removeprefix("--image=")
    parsed = subprocess.run(["bash", "-c", f"exec() {{ printf '%s\\n' \"$@\"; }}; "
                             f"JOB_INDEX=1 JOB_COMPLETION_INDEX=1; {container['args'][0]}"],
                            capture_output=True, text=True).stdout.splitlines()
    assert parsed[:5] == ["python", "-m", "dapo_jax.train", "--workdir=/runs/a",
                          "--config.x=('a',1)"]
    assert parsed[-1] == ("--process=3" if "--gpus" in options else "--cluster=auto")


def test_a_sweep_is_a_jobset_for_each_setting(tmp_path, monkeypatch):
    listing = tmp_path / "python"
    names = ["rl.steps=1,seed=0", "it_s-5c8851de"]
    lines = "\\n".join(f"{place} {name} new" for place, name in enumerate(names))
    listing.write_text(f'#!/usr/bin/env bash\nprintf "{lines}\\n"\n')
    listing.chmod(0o755)
    monkeypatch.setenv("PYTHON_OF_RUN", str(listing))
    flags = ("--config=f.py", "--config.rl.steps=5", "--out=/runs/it's", "--metrics=eval/greedy")
    text = call("sweep.sh", "--jobset", *TPU, "--claim=c", "--name=s", *flags).stdout
    manifests = list(yaml.safe_load_all(text))
    assert [one["metadata"]["name"] for one in manifests] == ["s-0", "s-1"]
    for manifest, name in zip(manifests, names, strict=True):
        jsonschema.validate(manifest, SCHEMA)
        (job,) = manifest["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        parsed = subprocess.run(
            ["bash", "-c", f"exec() {{ printf '%s\\n' \"$@\"; }}; {container['args'][0]}"],
            capture_output=True, text=True).stdout.splitlines()
        assert parsed == ["python", "-m", "dapo_jax.sweep", *flags, f"--index={name}",
                          "--cluster=auto"]
    applied = call("sweep.sh", "--jobset", "--apply", "--dry-run", *TPU, *flags).stdout
    assert applied.startswith("kubectl apply -f -") and applied.count("kind: JobSet") == 2
    for wrong in (["--jobset", "--parallel=2"], ["--apply"], ["--jobset", "--xpk"],
                  ["--jobset", "--index=1"]):
        refused = call("sweep.sh", *wrong, *TPU, *flags)
        assert refused.returncode == 2 and not refused.stdout, wrong
    missing = call("sweep.sh", "--jobset", *flags)
    assert missing.returncode == 2 and "--image is missing" in missing.stderr


def test_the_schema_refuses_what_is_no_jobset():
    manifest = yaml.safe_load(call("gke_jobset.sh", *TPU).stdout)
    manifest["spec"]["replicatedJobs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(manifest, SCHEMA)
