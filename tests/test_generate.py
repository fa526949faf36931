"""The command that completes a prompt, and what it refuses."""

import io

import pytest
import runs

from dapo_jax import command_line, config, evaluate, generate, setup

FLAGS = ["--config=tests/tiny_config.py"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.reuse_programs(monkeypatch)
    monkeypatch.chdir(runs.ROOT)


@pytest.fixture(scope="module")
def model():
    return setup.open_model(runs.configure())


@pytest.fixture(scope="module")
def params(model):
    return setup.initial_params(model)


def texts(model, params, prompts, **options):
    options = {"samples": 4, "greedy": False} | options
    return [one.text for one in generate.generate(model, params, prompts, **options)[0]]


def test_the_command_prints_a_line_for_each_sample_and_the_speed(capsys):
    assert generate.main([*FLAGS, "--prompt=1+2=", "--samples=4"]) == command_line.DONE
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert "tokens per second" in printed.err


def test_prompts_are_read_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n\n3+4=\n"))
    assert generate.main([*FLAGS, "--prompt=-", "--samples=4"]) == command_line.DONE
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_completions_depend_on_the_prompt_and_repeat(model, params):
    first = texts(model, params, ["1+2=", "3+4="])
    assert first == texts(model, params, ["1+2=", "3+4="])
    assert first[:4] == texts(model, params, ["1+2="])
    assert len(set(first)) > 2


def test_greedy_completions_are_all_alike_and_equal_to_the_evaluations(model, params):
    made = texts(model, params, ["1+2="], greedy=True)
    assert len(made) == 4 and len(set(made)) == 1
    assert made != texts(model, params, ["1+2="])


def test_a_runs_checkpoint_is_what_generates(tmp_path, capsys):
    assert runs.run(tmp_path, {"rl.steps": 0, "sft.steps": 2}) == command_line.DONE
    parts = setup.prepare(runs.configure({"rl.steps": 0, "sft.steps": 2}))
    _, trained = evaluate.checkpointed(parts, str(tmp_path), wanted=-1)
    made, _ = generate.generate(parts, trained, ["1+2="], samples=4, greedy=False)
    capsys.readouterr()
    changed = ["--config.rl.steps=0", "--config.sft.steps=2"]
    assert generate.main([*FLAGS, *changed, f"--workdir={tmp_path}", "--prompt=1+2=",
                          "--samples=4"]) == command_line.DONE
    lines = capsys.readouterr().out.splitlines()
    wanted = [one.text.rstrip("\n") + ("" if one.stopped else " [cut at the limit]")
              for one in made]
    assert lines == wanted


@pytest.mark.parametrize("flags, told", [
    (["--prompt=12345678901234567890"], "buckets"), (["--prompt=é"], "cannot be encoded"),
    (["--prompt=1+1=", "--samples=0"], "--samples=0"), ([], "--prompt is missing")])
def test_bad_prompts_are_refused_before_anything_compiles(flags, told, monkeypatch):
    monkeypatch.setattr(generate.engines, "compile_engine", None)
    with pytest.raises(config.ConfigError, match=told):
        generate.main([*FLAGS, *flags])
