"""The command that builds TFDS data sets from published files."""

import pathlib

import pytest
from conftest import ROOT

from dapo_jax import config
from dapo_jax.data import build, sources

CASES = ROOT / "tests" / "cases"


def records(folder, split="train", **task):
    chosen = config.Task(name="math", train_path=str(folder), eval_path=str(folder),
                         train_split=split, **{"train_size": 0, **task})
    return sources.load(config.Config(task=chosen), "train")[0]


@pytest.mark.parametrize("name, file", [
    ("gsm8k", "gsm8k.jsonl"), ("math", "math.jsonl"), ("math500", "math500.jsonl"),
    ("aime", "aime.jsonl"), ("dapo", "dapo.parquet")])
def test_a_built_data_set_holds_the_records_of_its_file(name, file, tmp_path, capsys):
    path = CASES / file
    build.main([f"--name={name}", f"--test={path}", f"--out={tmp_path}"])
    folder = pathlib.Path(capsys.readouterr().out.strip())
    assert folder == tmp_path / name / "1.0.0"
    found = records(folder, "test")
    assert found == [record | {"dataset": name} for record in records(path, format=name)]
    assert found


def test_bad_rows_and_bad_flags_are_named(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n')
    good = [f"--train={path}", f"--out={tmp_path}"]
    for arguments, words in (
            (["--name=gsm8k", *good], "d.jsonl, line 2: it has no 'answer'"),
            (good, "--name is missing"), (["--name=a/b", *good], "--name=a/b"),
            (["--name=gsm8k", f"--out={tmp_path}"], "--train is missing"),
            (["--name=gsm8k", f"--train={path}"], "--out is missing"),
            (["--name=gsm8k", "--trian=x", *good], "trian"),
            (["--name=gsm8k", "x", *good], "unexpected argument 'x'")):
        with pytest.raises(config.ConfigError) as caught:
            build.main(arguments)
        assert words in str(caught.value)
    build.main(["--name=gsm8k", "--bad_records=skip", *good])
    with pytest.raises(config.ConfigError, match="exists"):
        build.main(["--name=gsm8k", "--bad_records=skip", *good])


def test_help_names_every_flag_and_layout(capsys):
    with pytest.raises(SystemExit):
        build.main(["--help"])
    text = capsys.readouterr().out
    for word in (*(f"--{name}=" for name in build.FLAGS), "gsm8k:", "dapo:"):
        assert word in text
