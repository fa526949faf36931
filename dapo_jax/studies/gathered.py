"""The page of all studies: claim, source, our command, our figure with its interval, verdict."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.studies import pages, verdicts

TITLE = "What the sources claim, and what shows here"
WORDS = (
    "Each table is made of what a study left in its folder; the command runs it again (`python -m "
    "dapo_jax.` before it, `--out=DIR` behind it). Intervals are 95 %. `shown` and `agrees`: the "
    "interval decides for the claim. `not shown`: 0 lies in the interval, which with three seeds "
    "of a small model says little. `contradicted`: it decides against the claim.",
    "The models here have 0.3 million parameters and the tasks are sums: a verdict is about this "
    "size, not about the source's.")
# Configurations of the sources' own runs: what they are, the file, and a command that plans them.
FULL_SIZE = (
    ("DAPO, Qwen2.5-32B on DAPO-Math-17k (arXiv 2503.14476)", "configs/dapo_qwen2_5_32b.py",
     "plan --config=configs/dapo_qwen2_5_32b.py --chip=v5p"),
    ("its ladder of techniques, six settings", "configs/sweeps/dapo_ladder_32b.py",
     "sweep --config=configs/sweeps/dapo_ladder_32b.py --out=DIR --dry-run"))


def read(folder: pathlib.Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """What the studies of these names left in `folder` (NAME_lines.json) or in a folder of their
    name in it; in that order. Raises ConfigError where there is none at all."""
    found = []
    for name in names:
        paths = [folder / f"{name}{pages.LINES}", folder / name / f"{name}{pages.LINES}"]
        found += [_read(path) for path in paths if path.is_file()][:1]
    if not found:
        raise config.ConfigError(
            f"{folder} holds no result of a study ({names[0]}{pages.LINES} and the like); run one "
            "with --out there, or in a folder of its name")
    return found


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["lines"] = [verdicts.Line(**line) for line in content["lines"]]
    except (ValueError, KeyError, TypeError) as error:
        raise config.ConfigError(f"{path} holds no result of a study: {error}") from error
    return content


def markdown(studies: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The page of these results; studies among `names` that have none are named."""
    text = [f"# {TITLE}", ""]
    text += [f"- {words}" for words in WORDS]
    text += ["", *pages.table(("study", "lines", "verdicts"), [
        (one["name"], str(len(one["lines"])), _counted(one["lines"])) for one in studies]), ""]
    there = {one["name"] for one in studies}
    if without := [name for name in names if name not in there]:
        text += [f"Without a result here: {', '.join(without)}.", ""]
    for one in studies:
        text += _study(one)
    text += ["## At full size", "", "Not run here: what runs on accelerators was not at hand.", "",
             *pages.table(("run", "configuration", "what can be done without them"), [
                 (what, f"`{path}`", f"`python -m dapo_jax.{command}`")
                 for what, path, command in FULL_SIZE]), ""]
    return "\n".join(text)


def _counted(lines: Sequence[verdicts.Line]) -> str:
    """How often each verdict stands, the first words of it."""
    counts: dict[str, int] = {}
    for line in lines:
        verdict = line.verdict.split(":")[0].split(";")[0]
        counts[verdict] = counts.get(verdict, 0) + 1
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _study(one: dict[str, Any]) -> list[str]:
    text = [f"## {one['title']}", "", f"`python -m dapo_jax.reproduce {one['name']} --out=DIR`, on "
            f"{one['machine']}; {one['date']}.", ""]
    if one["quick"]:
        text += ["**--quick: a few steps of a tiny model. No figure here means anything.**", ""]
    text += [*pages.table(("claim", "source", "our command", "our figure", "verdict"), [
        (line.claim, line.source, f"`{line.command}`", line.figure, line.verdict)
        for line in one["lines"]]), ""]
    if one["missing"]:
        text += [f"Missing: {'; '.join(one['missing'])}.", ""]
    return text


def write(folder: pathlib.Path, out: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    """Write OUT/reproduction.md of the results in `folder`; returns its path."""
    text = markdown(read(folder, names), names)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "reproduction.md"
    path.write_text(text, encoding="utf-8")
    return path
