"""Every command of README.md runs, shortened; those on real weights are slow."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHORT = ["--config.sft.steps=1", "--config.rl.steps=1", "--config.eval.prompts=4",
         "--config.eval.samples=2", "--config.dynamic_sampling.max_rounds=1",
         "--config.dynamic_sampling.at_limit=partial", "--config.rollout.slots=(64,)"]
SHORT_REAL = ["--config.rl.steps=1", "--config.eval.prompts=2", "--config.eval.samples=1",
              "--config.eval.greedy=False", "--config.dynamic_sampling.max_rounds=1",
              "--config.rollout.slots=(8,)"]


def commands():
    """Lines of the README's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def of(name, *, real):
    """Commands of `python -m dapo_jax.<name>`, those on real weights or the others."""
    return [line[3:] for line in commands() if line[1:3] == ["-m", f"dapo_jax.{name}"]
            and any("smollm2" in word or "jsonl" in word for word in line) == real]


def run(folder, name, arguments):
    """The command as a user starts it, with the folder for the runs moved to `folder`."""
    moved = [word.replace("runs/", f"{folder}/") for word in arguments]
    done = subprocess.run([sys.executable, "-m", f"dapo_jax.{name}", *moved], cwd=ROOT,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_names_only_commands_that_are_tried_here():
    tried = {"train", "evaluate", "report", "export", "generate", "bench", "reproduce", "plan",
             "sweep", "doctor"}
    for line in commands():
        if line[0].startswith("launch/"):
            assert (ROOT / line[0]).is_file()
        else:
            assert line[0] == ".venv/bin/python" and line[1] == "-m", line
            assert line[2].removeprefix("dapo_jax.") in tried, line


def test_commands_on_the_default_run_work(tmp_path):
    help_text, = (line for line in of("train", real=False) if line == ["--help"])
    assert "rl.algorithm.clip_high" in run(tmp_path, "train", help_text)
    mine, = (line for line in of("train", real=False) if line != ["--help"])
    run(tmp_path, "train", mine + SHORT)
    run(tmp_path, "train", ["--config=configs/quickstart.py", f"--workdir={tmp_path}/quickstart",
                            *SHORT])
    evaluation, = of("evaluate", real=False)
    figures = json.loads(run(tmp_path, "evaluate", evaluation + SHORT))
    last = json.loads((tmp_path / "mine/metrics.jsonl").read_text().splitlines()[-1])
    assert figures["eval/avg@2"] == last["eval/avg@2"]
    generate, = of("generate", real=False)
    assert len(run(tmp_path, "generate", generate + SHORT).splitlines()) == 4
    bench, = of("bench", real=False)
    assert "row use" in run(tmp_path, "bench", [*bench, *SHORT, "--repeats=1"])
    for arguments in of("report", real=False):
        run(tmp_path, "report", arguments)
        assert "Held-out accuracy" in (tmp_path / "mine/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("study", ["dynamic_batching", "token_loss"])
def test_the_studies_work(tmp_path, study):
    arguments, = (line for line in of("reproduce", real=False) if line[0] == study)
    run(tmp_path, "reproduce", [*arguments, "--quick", "--seeds=1", "--jobs=2"])
    assert (tmp_path / study / f"{study}.md").is_file()


def test_the_sweep_is_four_runs(tmp_path):
    arguments, = of("sweep", real=False)
    listed = run(tmp_path, "sweep", [one for one in arguments if "parallel" not in one]
                 + ["--dry-run"])
    assert [line.split()[2] for line in listed.splitlines()] == ["new"] * 4


@pytest.mark.slow
def test_the_sweep_ends_with_a_table_of_all_its_runs(tmp_path):
    arguments, = of("sweep", real=False)
    run(tmp_path, "sweep", arguments + SHORT)
    assert (tmp_path / "rates/sweep.md").read_text().count("| 1 of 1 |") == 4


@pytest.mark.slow
def test_the_doctor_finds_all_well(tmp_path):
    arguments, = of("doctor", real=False)
    assert run(tmp_path, "doctor", arguments).splitlines()[-1] == "all well"


@pytest.mark.slow
def test_the_plan_works(tmp_path):
    arguments, = of("plan", real=False)
    assert "20480" in run(tmp_path, "plan", arguments).replace(",", "")


@pytest.mark.slow
def test_commands_on_real_weights_work(tmp_path, smollm2):
    problems = tmp_path / "problems.jsonl"
    rows = ({"prompt": f"1 + 1 = 2\n{i} + 3 = ", "answer": i + 3} for i in range(40))
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of("train", real=True)
    assert len(found) == 2
    for arguments in found:
        arguments = [word.replace("=problems.jsonl", f"={problems}") for word in arguments]
        run(tmp_path, "train", arguments + SHORT_REAL)
    export, = of("export", real=True)
    out = tmp_path / "trained"
    run(tmp_path, "export", [word.replace("=smollm2_trained", f"={out}") for word in export]
        + SHORT_REAL)
    assert (out / "config.json").is_file() and list(out.glob("*.safetensors"))
