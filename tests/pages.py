"""The blocks of README.md and docs/*.md, how each says it is tried, and shortened commands.

A block stands behind a comment that says how it is tried:

    <!-- run -->                as it stands
    <!-- run: short -->         commands with the flags of `shortened`, which make them small
    <!-- run: short, fast -->   the same, and in the fast suite too
    <!-- run: dry -->           commands with --dry-run
    <!-- file: NAME -->         written under this name, for the commands of the page
    <!-- fields -->             Python: changes of a configuration c, which is then checked
    <!-- flags -->              flags of dapo_jax.train, parsed with configs/quickstart.py
    <!-- output -->             what a command prints; nothing to try

or begins with the line `# not run here: REASON`, which readers see. Started as a program, this file
is the interpreter of a page's folder: it shortens a command, if it is told to, and becomes it.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<how>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
                   re.M | re.S)
NOT_RUN = "# not run here: "
HOWS = ("run", "run: short", "run: short, fast", "run: dry", "fields", "flags", "output")

MODEL = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=2",
         "model.head_size=8", "model.ff=32")
SIZES = ("rl.steps=1", "rl.updates_per_step=1", "rl.prompts_per_step=4", "rl.samples_per_prompt=4",
         "rl.microbatch_slots=4", "eval.prompts=4", "eval.samples=2", "eval.greedy=False",
         "dynamic_sampling.max_rounds=1", "dynamic_sampling.at_limit=partial", "rollout.slots=(4,)")
SFT = ("sft.steps=1", "sft.prompts_per_step=4", "sft.microbatch_slots=4")
REAL = ("rl.steps=1", "eval.prompts=2", "eval.samples=1", "eval.greedy=False",
        "dynamic_sampling.max_rounds=1", "dynamic_sampling.at_limit=partial", "rollout.slots=(8,)")
TRAINERS = ("train", "evaluate", "generate", "export", "profile_prompts", "sweep", "bench")
EXTRA = {"bench": ["--repeats=1"], "reproduce": ["--quick", "--seeds=1", "--jobs=2"],
         "simulate": ["--runs=2", "--steps=20"], "profile_prompts": ["--samples=2"]}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; `how` is "" where the page does not say."""

    page: str
    line: int
    language: str
    how: str
    text: str

    @property
    def commands(self):
        """Words of each command of a bash block."""
        if self.language != "bash":
            return []
        text = self.text.replace("\\\n", " ")
        words = [shlex.split(line, comments=True) for line in text.splitlines()]
        return [line for line in words if line]


def blocks(path):
    """The page's blocks in their order."""
    text, found = path.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        how = match["how"] or ("not run" if match["text"].startswith(NOT_RUN) else "")
        found.append(Block(path.relative_to(ROOT).as_posix(),
                           text.count("\n", 0, match.start("language")) + 1, match["language"],
                           how, match["text"]))
    return found


def entry(words):
    """NAME of `.venv/bin/python -m dapo_jax.NAME ARGUMENTS`, and the arguments; "" for others."""
    if words[1:2] == ["-m"] and words[2].startswith("dapo_jax."):
        return words[2].removeprefix("dapo_jax."), words[3:]
    return "", words


def shortened(words):
    """The command made small: few steps of a tiny model, or of the real one, few repetitions."""
    name, arguments = entry(words)
    more = list(EXTRA.get(name, []))
    if name in TRAINERS and "--help" not in arguments:
        more += [f"--config.{field}" for field in fields(arguments)]
    if words[1:3] == ["-m", "pytest"]:
        more += ["--collect-only", "-q", "tests/test_types.py"]
    given = {word.split("=")[0] for word in more}
    return [word for word in words if word.split("=")[0] not in given] + more


def fields(arguments):
    """Changes that make a configuration small; real weights keep their shape."""
    config = next((word.partition("=")[2] for word in arguments if word.startswith("--config=")),
                  "")
    text = (pathlib.Path(config).read_text(encoding="utf-8") if os.path.isfile(config) else "")
    if "model.source" in text or "smollm2" in text:
        return REAL
    return MODEL + SIZES + (SFT if "sft.steps" in text or "quickstart" in text else ())


if __name__ == "__main__":
    command = [os.environ["PAGES_PYTHON"], *sys.argv[1:]]
    if os.environ.get("PAGES_SHORT") == "yes":
        command = shortened(command)
    os.execv(command[0], command)
