"""A run that is killed and started again gives the numbers of one that was not, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import runs
from conftest import ROOT

from dapo_jax import command_line, config, evaluate
from dapo_jax.runtime import checkpoint, metrics, samples_log

PATIENCE = 600  # seconds for one process, on a busy machine


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    runs.reuse_programs(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The work directory of an uninterrupted run in a process of its own."""
    workdir = tmp_path_factory.mktemp("whole")
    process = _start(workdir)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == command_line.DONE, errors
    return workdir


def _start(workdir, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "dapo_jax.train", "--config=tests/tiny_config.py",
         f"--workdir={workdir}", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def _progress(workdir):
    """Lines written so far."""
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill(workdir, *, lines, delay):
    """Start the run and kill it `delay` seconds after it has so many lines; false if it ended."""
    process = _start(workdir)
    limit = time.monotonic() + PATIENCE
    while _progress(workdir) < lines and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    errors = process.communicate()[1]
    assert process.returncode in (-signal.SIGKILL, command_line.DONE), errors
    return process.returncode != command_line.DONE


def _finish(workdir):
    process = _start(workdir)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == command_line.DONE, errors


# ------------------------------------------------------------------------------------------ SIGKILL


def test_two_kills_change_nothing(tmp_path, whole):
    assert _kill(tmp_path, lines=4, delay=0.03)  # near the end of SFT
    assert _kill(tmp_path, lines=8, delay=0.05)  # in RL
    _finish(tmp_path)
    runs.assert_same_run(tmp_path, whole)
    assert [line["compiles"] for line in runs.lines(whole)] == [0] * 11


@pytest.mark.slow
def test_many_kills_at_random_moments_change_nothing(tmp_path, whole):
    draw = random.Random(0)
    kills = 0
    for target in range(1, 12):  # ever later, or no run would get far
        kills += _kill(tmp_path / "once", lines=target, delay=draw.uniform(0, 0.08))
    _finish(tmp_path / "once")
    runs.assert_same_run(tmp_path / "once", whole)
    while kills < 16:  # each from the beginning: also while it starts, compiles and saves
        workdir = tmp_path / str(kills)
        late = draw.random() < 0.3
        _kill(workdir, lines=0 if late else draw.randint(1, 10),
              delay=draw.uniform(0, 8) if late else draw.uniform(0, 0.08))
        _finish(workdir)
        runs.assert_same_run(workdir, whole)
        kills += 1


class Crash(BaseException):
    """Stands for a kill, where the very place matters."""


@pytest.mark.parametrize("module, name, count, after", [
    (samples_log, "write", 3, False), (samples_log, "write", 3, True),
    (samples_log, "write_eval", 4, True), (metrics, "write", 8, False), (metrics, "write", 8, True),
    (checkpoint, "save", 2, False), (checkpoint, "save", 4, False), (checkpoint, "save", 4, True)])
def test_an_end_between_any_two_writes_changes_nothing(tmp_path, whole, module, name, count, after):
    original, calls = getattr(module, name), []

    def crash(*arguments, **options):
        calls.append(arguments)
        if len(calls) < count or after:
            original(*arguments, **options)
        if len(calls) == count:
            raise Crash()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, crash)
        with pytest.raises(Crash):
            runs.run(tmp_path)
    assert runs.run(tmp_path) == command_line.DONE
    runs.assert_same_run(tmp_path, whole)


def test_a_checkpoint_that_was_not_completed_is_not_the_latest(tmp_path, whole, caplog):  # B68
    assert runs.run(tmp_path, {"checkpoint.keep": 9}) == command_line.DONE
    folder = tmp_path / "checkpoints"
    for step in (6, 8, 10):
        (folder / str(step) / "_CHECKPOINT_METADATA").unlink()
    (folder / "12.orbax-checkpoint-tmp").mkdir()  # as a killed save leaves it
    assert runs.run(tmp_path) == command_line.DONE
    assert "incomplete: 10, 12.orbax-checkpoint-tmp, 6, 8; the newest complete is 4" in caplog.text
    runs.assert_same_run(tmp_path, whole)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_what_it_wrote(tmp_path):
    assert runs.run(tmp_path, {"rl.steps": 1, "sft.steps": 1}) == command_line.DONE
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "_CHECKPOINT_METADATA").unlink()
    for _ in range(2):
        with pytest.raises(config.ConfigError, match="holds no complete checkpoint, but .*1, 2;"):
            runs.run(tmp_path, {"rl.steps": 3, "sft.steps": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# ------------------------------------------------------------------------ signals and second starts


def test_a_deadline_ends_the_run_after_a_step_which_each_start_takes(tmp_path, whole, caplog):
    for step in (1, 2):
        caplog.clear()
        assert runs.run(tmp_path, {"checkpoint.deadline": 1e-3}) == command_line.TERMINATED
        assert f"checkpoint.deadline: saved after step {step}; start again" in caplog.text
        assert (tmp_path / "checkpoints" / str(step)).is_dir()
    assert runs.run(tmp_path, {"checkpoint.deadline": 1e6}) == command_line.DONE
    runs.assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_its_step(tmp_path, whole, caplog, number, status):
    write = metrics.write

    def write_then_signal(writer, line):
        write(writer, line)
        if line["step"] == 7:  # no step of a checkpoint
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "write", write_then_signal)
        assert runs.run(tmp_path) == status
    assert f"signal {int(number)}: saved after step 7" in caplog.text
    assert (tmp_path / "checkpoints" / "7").is_dir()
    assert runs.lines(tmp_path)[-1]["step"] == 7
    assert runs.run(tmp_path) == command_line.DONE
    runs.assert_same_run(tmp_path, whole)


def test_a_signal_during_the_first_compile_saves_too(tmp_path, whole):
    compile_evaluator = evaluate.compile_evaluator

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_evaluator(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "compile_evaluator", interrupted)
        assert runs.run(tmp_path) == 143
    assert runs.run(tmp_path) == command_line.DONE
    runs.assert_same_run(tmp_path, whole)


def test_a_finished_run_started_again_compiles_and_writes_nothing(whole, monkeypatch):
    monkeypatch.setattr(evaluate, "compile_evaluator", None)
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert runs.run(whole) == command_line.DONE
    after = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert after == before


def test_three_steps_and_three_more_are_six(tmp_path, whole):  # B64
    assert runs.run(tmp_path, {"rl.steps": 3}) == command_line.DONE
    assert runs.lines(tmp_path)[-1]["step"] == 7
    assert runs.run(tmp_path, {"rl.steps": 6}) == command_line.DONE
    cut = [{name: value for name, value in line.items() if not name.startswith("eval/")}
           for line in runs.exact(tmp_path)]
    wanted = [{name: value for name, value in line.items() if not name.startswith("eval/")}
              for line in runs.exact(whole)]
    assert cut == wanted  # the shorter run was also evaluated at its end
    for step in range(5, 11):  # prompts, tokens and rewards
        assert runs.rollouts(tmp_path, step) == runs.rollouts(whole, step) != []
    runs.assert_same_state(runs.state(tmp_path), runs.state(whole))
    # Fewer steps than were taken: there is nothing left to do.
    assert runs.run(tmp_path, {"rl.steps": 2}) == command_line.DONE


def test_more_steps_are_refused_where_they_change_the_schedule(tmp_path):
    changes = {"sft.steps": 0, "rl.optimizer.schedule": "linear"}
    assert runs.run(tmp_path, changes | {"rl.steps": 3}) == command_line.DONE
    with pytest.raises(config.ConfigError, match=r"rl\.steps: 3 there, 4 now"):
        runs.run(tmp_path, changes | {"rl.steps": 4})


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [
    ({"mesh.data": 4}, {"mesh.fsdp": 4}), ({"mesh.fsdp": 2, "mesh.tensor": 2}, {}),
    ({"mesh.tensor": 2}, {"mesh.data": 2, "rollout.slots": (8,), "rl.microbatch_slots": 8})])
def test_a_run_goes_on_over_other_devices_with_the_same_samples(tmp_path, whole, first, then):
    """The numbers are those of the undisturbed run up to the order of sums: 1e-5 of them."""
    assert runs.run(tmp_path, {"rl.steps": 3} | first) == command_line.DONE
    assert runs.run(tmp_path, then) == command_line.DONE
    ours, wanted = runs.exact(tmp_path), runs.exact(whole)
    assert [line["step"] for line in ours] == [line["step"] for line in wanted]
    for one, other in zip(ours, wanted, strict=True):
        # These three are of the split itself; the shorter run was evaluated at its end too.
        split = {"update/padding", "sampling/row_use", "rollout/weights_bytes"}
        for name in one.keys() & other.keys() - split:
            expected = other[name]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert one[name] == expected, (one["step"], name)
    drawn = [[(row["prompt_id"], row["sample"], row["completion"])
              for step in range(5, 11) for row in runs.rollouts(workdir, step)]
             for workdir in (tmp_path, whole)]
    assert drawn[0] == drawn[1] and len(drawn[0]) > 90
