"""--help of every entry and script: it says what the command is for, with examples that work."""

import re
import subprocess

import pages
import pytest
from conftest import ROOT
from test_pages import main_of, understood

ENTRIES = sorted(
    ".".join(path.relative_to(ROOT / "dapo_jax").with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "dapo_jax").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text() and "worker" not in path.name
    and "sandbox" not in path.name)
SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh")
                 if path.name != "environment.sh")


def examples(text, start):
    """Words of the help's example lines; what stands in brackets is no example but a form."""
    lines = re.findall(rf"^ +({re.escape(start)}(?:.*\\\n)*.*)$", text, re.M)
    return [re.sub(r"\\\n\s*|  +.*$", " ", line).split() for line in lines
            if not set("[|") & set(line)]


def test_the_entries_are_found():
    assert {"train", "sweep", "envs", "data.build", "rollout.bounds"} <= set(ENTRIES)
    assert len(ENTRIES) >= 16


@pytest.mark.parametrize("name", ENTRIES)
def test_help_of_an_entry_has_an_example_that_its_flags_allow(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        status = main_of(name)(["--help"])
    except SystemExit as left:
        status = left.code
    assert not status
    text = capsys.readouterr().out
    found = examples(text, f"python -m dapo_jax.{name}")
    assert found, text
    for words in found:
        assert all(line.startswith(("configs/", "FILE")) for word in words
                   for line in re.findall(r"^--config=(.*)", word)), words
        if "--config=FILE" not in words:
            assert understood(words), words


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_a_script_has_an_example_and_installs_nothing(script):
    told = subprocess.run([ROOT / "launch" / script, "--help"], capture_output=True, text=True,
                          cwd=ROOT, timeout=60)
    assert told.returncode == 0 and not told.stderr
    assert examples(told.stdout, f"launch/{script}"), told.stdout


def test_what_stands_in_brackets_is_no_example():
    text = ("    python -m dapo_jax.x --a=1 \\\n        --b=2   # why\n"
            "    python -m dapo_jax.x [--c]\n")
    assert examples(text, "python -m dapo_jax.x") == [["python", "-m", "dapo_jax.x", "--a=1",
                                                       "--b=2"]]
    assert pages.entry(["python", "-m", "dapo_jax.x", "--a"]) == ("x", ["--a"])
