"""How every entry meets what it cannot use: one line, before anything is computed."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import test_report
from conftest import ROOT

from dapo_jax import (
    command_line,
    config,
    doctor,
    evaluate,
    export,
    plan,
    profile_prompts,
    replay_episodes,
    report,
    setup,
    train,
)
from dapo_jax.planning import whole

CONFIG = f"--config={ROOT / 'tests/tiny_config.py'}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory: a file, a folder, and something that is no text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    return tmp_path


def test_an_interrupt_that_no_entry_waits_for_is_one_line(capsys):
    def main(arguments):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        command_line.leave(main)
    assert left.value.code == command_line.INTERRUPTED == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("code, status, words", [
    ("print('x' * 9, flush=True)", command_line.NO_READER, ""),
    ("raise BrokenPipeError('of a worker')", 1, "of a worker")])
def test_an_output_that_nobody_reads_is_no_error_but_other_pipes_are(code, status, words):
    program = f"from dapo_jax import command_line\ndef main(given):\n    {code}\n    return 0\n"
    reading, writing = os.pipe()
    if status == command_line.NO_READER:
        os.close(reading)
    ended = subprocess.run([sys.executable, "-c", program + "command_line.leave(main)"], text=True,
                           stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=300)
    os.close(writing)
    if status != command_line.NO_READER:
        os.close(reading)
    assert ended.returncode == status
    assert words in ended.stderr if words else not ended.stderr


@pytest.mark.parametrize("argument", ["{}", "--conf={}", "--configuration={}"])
def test_a_configuration_file_without_its_flag_is_recognised(argument):
    path = CONFIG.removeprefix("--config=")
    with pytest.raises(config.ConfigError) as caught:
        train.main([argument.format(path), "--workdir=run"])
    assert str(caught.value).startswith(f"--config=FILE is missing; did you mean {CONFIG}?")


@pytest.mark.parametrize("path, words", [
    ("file/x", "--{flag}: file"), ("there", "--{flag}=there")])
@pytest.mark.parametrize("main, flag, more", [
    (plan.main, "json", ()), (profile_prompts.main, "out", ("--workdir=none",)),
    (export.main, "out", ("--workdir=none",))])
def test_what_cannot_be_written_is_known_before_it_is_computed(
        folder, monkeypatch, main, flag, more, path, words):
    def computed(*args, **how):
        pytest.fail("something was computed first")

    for module, name in ((whole, "planned"), (setup, "prepare"), (evaluate, "starting_point")):
        monkeypatch.setattr(module, name, computed)
    with pytest.raises(config.ConfigError) as caught:
        main([CONFIG, f"--{flag}={path}", *more])
    assert words.format(flag=flag) in str(caught.value)
    assert sorted(one.name for one in folder.iterdir()) == ["binary", "file", "there"]


def test_a_folder_that_can_be_made_is_not_made_by_asking(folder):
    command_line.check_folder(pathlib.Path("there/deep/er"), flag="out")
    assert list((folder / "there").iterdir()) == []
    with pytest.raises(config.ConfigError, match="--out: file cannot be written"):
        command_line.check_folder(pathlib.Path("file"), flag="out")
    with pytest.raises(NotADirectoryError):
        doctor.disk(pathlib.Path("file"))


def test_a_report_that_cannot_be_written_is_refused(folder, capsys):
    test_report.make_run(folder / "ended")
    assert report.main(["ended", "--out=file/page"]) == command_line.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --out: file/page cannot be written")


@pytest.mark.parametrize("given, words", [
    ("--nonsense=1", "replay_episodes --help"), ("", "replay_episodes --help"),
    ("binary", "it is not UTF-8"), ("there", "there cannot be read: Is a directory")])
def test_episodes_are_replayed_of_logs_only(folder, capsys, given, words):
    assert replay_episodes.main(given.split()) == command_line.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and given in line and words in line
