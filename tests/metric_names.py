"""The names of docs/metrics.md, and which of them a written line bears out."""

import json
import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def documented():
    """Names as the tables' first cells give them; words in capitals stand for something."""
    cells = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(), re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name):
    """A documented name as a regular expression for written ones."""
    return re.compile("".join(".+" if re.fullmatch("[A-Z]+", part) else re.escape(part)
                              for part in re.split(r"([A-Z]+)", name)))


def explained(written, names):
    """The documented names that the written one is."""
    return [name for name in names if pattern(name).fullmatch(written)]


def check_lines(path):
    """Every name of a metrics.jsonl is documented; a run that a test made says which is not."""
    names = documented()
    written = {name for line in path.read_text().splitlines() for name in json.loads(line)}
    missing = sorted(name for name in written if not explained(name, names))
    assert not missing, f"docs/metrics.md does not name {missing}"
    return written
