"""python -m dapo_jax.envs: every task has an example, and its right answer gets reward 1."""

import importlib
import sys

import pytest

from dapo_jax import config
from dapo_jax.data import sources

LIST = importlib.import_module("dapo_jax.envs.__main__")
HERE = [name for name in sources.TASKS if name not in ("reasoning_gym", "environment")]


@pytest.mark.parametrize("name", HERE)
def test_a_task_shows_problems_whose_right_answer_gets_1(name, capsys):
    assert LIST.main([name]) == 0
    shown = capsys.readouterr().out
    assert shown.count("reward of it: 1\n") == shown.count("right answer: ") >= 1
    assert sources.task(name).purpose


def test_the_list_has_every_task_and_says_what_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert LIST.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}  " in f"\n{shown}" for name in HERE)
    assert "not installed" in shown and "requirements-optional.txt" in shown


def test_data_sets_of_reasoning_gym_are_tasks_of_their_own(capsys):
    pytest.importorskip("reasoning_gym")
    assert LIST.main(["spell_backward", "2"]) == 0
    assert capsys.readouterr().out.count("reward of it: 1\n") == 2
    assert "reasoning_gym:countdown" in LIST._tasks() and len(LIST._tasks()) > 105
    assert "create an expression" in LIST.records("reasoning_gym:countdown", 1)[0]["prompt"]
    assert LIST.main(["spel_backward"]) == 2
    assert "did you mean spell_backward" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["a", "b"], ["a", "1", "2"], ["--nonsense=1"], ["-x", "1"]])
def test_other_arguments_are_named_in_one_line_that_says_where_help_is(arguments, capsys):
    assert LIST.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert " ".join(arguments) in line and "python -m dapo_jax.envs --help" in line


def test_help_is_given_wherever_it_is_asked_for(capsys):
    assert LIST.main(["countdown", "--help"]) == 0
    assert "python -m dapo_jax.envs countdown 5" in capsys.readouterr().out


@pytest.mark.slow
def test_all_data_sets_of_reasoning_gym_have_an_example():
    pytest.importorskip("reasoning_gym")
    for name in LIST._tasks():
        try:
            assert LIST.records(name, 1)[0]["prompt"]
        except config.ConfigError as error:
            pytest.fail(f"{name}: {error}")


def test_an_environment_of_ones_own_is_shown_or_refused(capsys):
    assert LIST.main(["talk_environments:FAULTY"]) == 0
    assert capsys.readouterr().out == (
        "faulty: several turns; it has no problems of its own and is played on those of the task\n")
    assert LIST.main(["dapo_jax.envs.guess_number:ENVIRONMENT", "2"]) == 0
    assert capsys.readouterr().out.count("Guess it") == 2
    assert LIST.main(["talk_environments:FAULTI"]) == 2
    assert "did you mean FAULTY" in capsys.readouterr().err
