"""Our sampler, update and whole step beside google-tunix, TRL and a loop written by hand.

    python tests/bench/side_by_side.py --environments=DIR [--make-environments] [--rounds=2]
        [--repeats=3] [--only=dapo_jax,plain,tunix,trl] [--parts=rollout,update,step] [--out=FILE]

Each runs in an environment of its own (DIR/tunix and DIR/trl, made with pinned versions by
--make-environments; ours is the Python of this command, in which the loop by hand runs too), on
one processor core, in rounds that take turns. Compared are processor seconds, which other work on
the machine disturbs least; still, ratios under 1.25 of different systems mean little. The model and
the work are those of peers/workload.py; each was given the fastest of the microbatches 1, 4 and 16
prompts, which for all of them is 1 or not to be told from it. Prints a Markdown table of medians
over all rounds, least and most in brackets. Without --parts it takes about ten processor minutes.
"""

import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
PINNED = {
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8",
              "optax==0.2.8", "qwix==0.1.8", "orbax-checkpoint==0.12.8", "transformers==5.12.1",
              "numpy==2.4.6"),
    "trl": ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0",
            "datasets==5.2.0", "tokenizers==0.23.3", "numpy==2.4.6"),
}
PEERS = {"dapo_jax": None, "plain": None, "tunix": "tunix", "trl": "trl"}  # -> environment
TOKENS = {"rollout": 16 * 8 * 64, "update": 16 * 8 * (32 + 64), "step": 16 * 8 * 64}
CHECKED = -8.63741  # mean log-probability of fixed tokens: all compute the same function


def make(folder: pathlib.Path) -> None:
    """The environments that are not there yet."""
    for name, packages in PINNED.items():
        if not (folder / name).exists():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
            subprocess.run([folder / name / "bin" / "python", "-m", "pip", "install", "-q",
                            *packages], check=True)


def one(name: str, python: str, *, core: int, repeats: int, parts: str) -> dict:
    """Run one of them, bound to a core before any thread pool counts the cores."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [python, "-W", "ignore", HERE / "peers" / f"of_{name}.py", f"--repeats={repeats}",
         f"--parts={parts}"], capture_output=True, text=True, timeout=3600,
        env=os.environ | limits | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode or not lines:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(lines[-1])
    if abs(found["check"] - CHECKED) > 1e-4:
        raise SystemExit(f"{name} computes another function: {found['check']}, not {CHECKED}")
    return found


def table(rows: list[dict], parts: list[str]) -> str:
    """Markdown: processor seconds, tokens a processor second, and how often ours."""
    by_peer: dict[str, list[dict]] = collections.defaultdict(list)
    for row in rows:
        by_peer[row["peer"]].append(row)
    times = {peer: {part: sum((row[part] for row in of), []) for part in parts}
             for peer, of in by_peer.items()}
    ours = times.get("dapo_jax")
    lines = ["| processor seconds of one thread | " + " | ".join(parts) + " |",
             "|---|" + "---|" * len(parts)]
    for peer, of in times.items():
        cells = []
        for part in parts:
            median = statistics.median(of[part])
            cell = (f"{median:.2f} ({min(of[part]):.2f}-{max(of[part]):.2f}), "
                    f"{TOKENS[part] / median:,.0f} tok/s")
            if ours and peer != "dapo_jax":
                cell += f", {median / statistics.median(ours[part]):.2f} x ours"
            cells.append(cell)
        lines.append(f"| {peer} ({by_peer[peer][0]['versions']}) | " + " | ".join(cells) + " |")
    counts = {len(of[part]) for of in times.values() for part in parts}
    return "\n".join([*lines, "", f"{hardware()}; {datetime.date.today()}; {len(rows)} processes, "
                      f"{min(counts)} to {max(counts)} calls of each."])


def hardware() -> str:
    """The processor and how many of its cores this process may use."""
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*: (.*)", text)
    return f"{len(os.sched_getaffinity(0))} cores of {model.group(1) if model else 'a processor'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path("environments"))
    parser.add_argument("--make-environments", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--parts", default=",".join(TOKENS))
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=pathlib.Path, help="file that gets a line of JSON a process")
    given = parser.parse_args()
    if given.make_environments:
        make(given.environments)
    rows = []
    for number in range(given.rounds):
        for name in given.only.split(","):
            environment = PEERS[name]
            python = sys.executable if environment is None else str(
                given.environments.resolve() / environment / "bin" / "python")
            rows.append(one(name, python, core=given.core, repeats=given.repeats,
                            parts=given.parts))
            print(f"round {number + 1}: {json.dumps(rows[-1])}", file=sys.stderr)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows, given.parts.split(",")))


if __name__ == "__main__":
    main()
