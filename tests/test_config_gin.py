"""Fields set in Gin's language: the same fields, the same checks."""

import pathlib
import sys

import pytest

from dapo_jax import command_line, config, config_gin

QUICKSTART = pathlib.Path(__file__).resolve().parent.parent / "configs/quickstart.py"


def parse(*arguments):
    return command_line.parse([f"--config={QUICKSTART}", *arguments], program="p", purpose="",
                              extra={})[0]


@pytest.fixture
def gin_file(tmp_path):
    pytest.importorskip("gin")

    def write(text, name="run.gin"):
        (tmp_path / name).write_text(text)
        return f"--gin_file={tmp_path / name}"

    return write


TEXT = """
rate = 3e-4
config.seed = 3   # a comment
config.rollout.slots = [4, 8]
config.filter.enable = False
config.rl.optimizer:
    learning_rate = %rate
    weight_decay = 1
"""


def test_gin_sets_what_flags_set(gin_file):
    flags = ("--config.seed=3", "--config.rollout.slots=(4,8)", "--config.filter.enable=False",
             "--config.rl.optimizer.learning_rate=3e-4", "--config.rl.optimizer.weight_decay=1")
    found = parse(gin_file(TEXT))
    assert found == parse(*flags) != parse()
    assert type(found.rl.optimizer.weight_decay) is float


def test_later_ones_win_files_then_bindings_then_flags(gin_file):
    first, second = gin_file("config.seed = 1"), gin_file("config.seed = 2", "second.gin")
    assert parse(first, second).seed == 2
    assert parse("--gin_binding=config.seed = 3", first).seed == 3
    assert parse("--gin_binding", "config.seed = 4", "--gin_binding=config.seed = 3").seed == 3
    assert parse("--config.seed=5", "--gin_binding=config.seed = 3").seed == 5


def test_a_file_includes_others_beside_it(gin_file):
    gin_file("rate = 5e-4\nconfig.rl.steps = 7", "base.gin")
    found = parse(gin_file("include 'base.gin'\nconfig.rl.optimizer.learning_rate = %rate\n"))
    assert (found.rl.steps, found.rl.optimizer.learning_rate) == (7, 5e-4)


@pytest.mark.parametrize("text, words", [
    ("config.rl.stepz = 3", ["line 2", "unknown field config.rl.stepz", "did you mean rl.steps"]),
    ("rl.steps = 3", ["line 2", "config.rl.steps?"]),
    ("seed = 3", ["line 2", "%seed", "config.a.b"]),
    ("config.rl.steps = 3.5", ["line 2", "steps"]),
    ("config.rl.steps = 'many'", ["line 2", "steps"]),
    ("config.rl.steps = %many", ["line 2", "%many"]),
    ("config.rl.steps = @many()", ["line 2", "@many"]),
    ("import os", ["line 2", "import"]),
    ("train/config.rl.steps = 3", ["line 2", "train/"]),
    ("config.rl.steps", ["line 2"]),
    ("include 'absent.gin'", ["absent.gin"]),
    ("include 'run.gin'", ["include itself"]),
    ("config.rl.steps = -1", ["config.rl.steps is -1"]),
])
def test_what_is_wrong_is_named_with_its_line(gin_file, text, words):
    with pytest.raises(config.ConfigError) as caught:
        parse(gin_file(f"\n{text}\n"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_unknown_name_is_the_error_that_a_flag_gives():
    pytest.importorskip("gin")
    with pytest.raises(config.ConfigError) as flag:
        parse("--config.rl.stepz=3")
    with pytest.raises(config.ConfigError) as binding:
        parse("--gin_binding=config.rl.stepz = 3")
    fault = str(flag.value).partition(" (")[0]  # a flag also says what lists all
    assert fault in str(binding.value)


def test_without_a_value_or_the_package_the_message_says_so(monkeypatch):
    for given in ("--gin_file", "--gin_file=", "--gin_binding="):
        with pytest.raises(config.ConfigError, match="no value"):
            parse(given)
    monkeypatch.setitem(sys.modules, "gin.config_parser", None)
    with pytest.raises(config.ConfigError, match="gin-config.*requirements-optional.txt"):
        parse("--gin_binding=config.seed = 1")


def test_settings_say_where_they_come_from(gin_file):
    path = gin_file("config.seed = 1\n\nconfig.rl.steps = 2").removeprefix("--gin_file=")
    assert config_gin.read([path], ["config.rl.epochs = 1"]) == [
        config_gin.Setting("seed", 1, f"{path}, line 1"),
        config_gin.Setting("rl.steps", 2, f"{path}, line 3"),
        config_gin.Setting("rl.epochs", 1, "--gin_binding=config.rl.epochs = 1")]
