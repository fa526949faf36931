"""Python that the model writes: <python>print(2)</python> is answered by <output>2</output>.

The code runs in a sandbox (sandbox.py) of its own each time, so nothing is kept between calls. A
turn without a call is the answer, scored by `math.score`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax.envs import base, episodes, math, sandbox, tool_calls

CALL, OUTPUT = "python", "output"
MOST_TURNS = 6  # with a call
MOST_CALLS = 2  # run in one turn
LIMITS = sandbox.Limits()
ENDED = {"time": f"stopped after {LIMITS.seconds:g} s", "output": "stopped: too much output"}


def records(*, seed: int, split: str, count: int) -> list[base.Record]:
    """Sums of squares modulo a number: quick with a loop, long without. "eval" has other moduli."""
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is not 'train' or 'eval'")
    rng = np.random.default_rng([seed, split == "eval"])
    return [_record(int(low), int(low + more), 5 * int(base) + (split == "eval"))
            for low, more, base in zip(rng.integers(1, 100, count), rng.integers(50, 500, count),
                                       rng.integers(2, 200, count), strict=True)]


def _record(low: int, high: int, modulus: int) -> base.Record:
    answer = sum(number**2 for number in range(low, high + 1)) % modulus
    question = (f"What is the sum of the squares of the whole numbers from {low} to {high}, modulo "
                f"{modulus}?")
    return {"prompt": f"{question} You may run code: <{CALL}>print(1)</{CALL}>",
            "answer": str(answer)}


def start(record: Mapping[str, Any], seed: int) -> tuple[dict, list[episodes.Message]]:
    """The problem; no seed changes it."""
    return {"answer": record["answer"], "turns": 0}, episodes.told(record["prompt"])


def step(state: dict, text: str) -> episodes.Turn:
    """Outputs of the calls in the text; without one, the reward of the answer."""
    found = tool_calls.calls(text, CALL)
    if not found:
        return episodes.Turn("", float(math.score(text, state)), True)
    outputs = [_output(code) for code in found[:MOST_CALLS]]
    failed = sum(not fine for _, fine in outputs) + max(0, len(found) - MOST_CALLS)
    told = [output for output, _ in outputs]
    told += ["error: too many calls"] * (len(found) > MOST_CALLS)
    turns = state["turns"] + 1
    return episodes.Turn(tool_calls.reply(told, OUTPUT), 0.0, turns >= MOST_TURNS,
                         state | {"turns": turns}, {"calls": len(found), "tool_errors": failed})


def _output(code: str) -> tuple[str, bool]:
    """What the code printed, and whether it ended well."""
    if len(code.encode("utf-8", "replace")) > sandbox.LONGEST_CODE:
        return "error: the code is too long", False
    ran = sandbox.run(code, LIMITS)
    note = ENDED.get(ran.ended, "" if not ran.status else f"exit status {ran.status}")
    return "\n".join(part for part in (ran.output.rstrip("\n"), note and f"[{note}]") if part), (
        not note)


def _ready() -> None:
    sandbox.available()


ENVIRONMENT = episodes.Environment(
    "python", start, step, idempotent=True, ready=_ready, records=records,
    parts=("calls", "tool_errors"),
    purpose=f"problems for code in <{CALL}></{CALL}>, run in a sandbox; its output is told")
