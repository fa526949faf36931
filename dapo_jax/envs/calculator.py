"""A calculator: <calc>12*34</calc> in the model's text is answered by <result>408</result>.

A turn without a call is the answer, scored as `arithmetic.score` does: its first line, stripped.
Problems are those of `arithmetic`; long multiplications are what a small model cannot do itself.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.envs import arithmetic, base, episodes, exact_sums, tool_calls

CALL, RESULT = "calc", "result"
DIGITS = 6  # of both operands, where nothing is configured
MOST_TURNS = 8  # with a call; the last one ends the episode with reward 0


def records(*, seed: int, split: str, count: int, digits: int = DIGITS) -> list[base.Record]:
    """Multiplications of two numbers of `digits` digits, as `arithmetic.records` makes them."""
    task = config.Task(levels=(((digits, digits), 1.0),), operators="*")
    return arithmetic.records(task, seed=seed, split=split, count=count)


def start(record: Mapping[str, Any], seed: int) -> tuple[dict, list[episodes.Message]]:
    """The problem; no seed changes it."""
    return {"answer": record["answer"], "turns": 0}, episodes.told(record["prompt"])


def step(state: dict, text: str) -> episodes.Turn:
    """Results of the calls in the text; without one, the reward of the answer."""
    found = tool_calls.calls(text, CALL)
    if not found:
        return episodes.Turn("", arithmetic.score(text, state), True)
    results = [_result(call) for call in found[:tool_calls.MOST_CALLS]]
    results += ["error: too many calls"] * (len(found) > tool_calls.MOST_CALLS)
    wrong = sum(result.startswith("error") for result in results)
    turns = state["turns"] + 1
    return episodes.Turn(tool_calls.reply(results, RESULT), 0.0, turns >= MOST_TURNS,
                         state | {"turns": turns}, {"calls": len(found), "tool_errors": wrong})


def _result(call: str) -> str:
    try:
        return exact_sums.shown(exact_sums.value(call))
    except exact_sums.NoValue as error:
        return f"error: {error}".lower()  # of an alphabet that may be small


def _shown(record: Mapping[str, Any]) -> list[str]:
    """The question as a call, a line, then the answer, another: lines are where a turn ends."""
    question = record["prompt"].rsplit("\n", 1)[-1].strip().removesuffix("=").strip()
    return [f"<{CALL}>{question}</{CALL}>\n", f"{record['answer']}\n"]


ENVIRONMENT = episodes.Environment(
    "calculator", start, step, idempotent=True, records=records,
    parts=("calls", "tool_errors"), shown=_shown,
    purpose=f"products too long to do without <{CALL}>12*34</{CALL}>, whose result is told")
