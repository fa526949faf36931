"""From a row of a data set to a record: which fields hold what, and what is wrong with the row."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.data import identity

Row = Mapping[str, Any]
Record = dict[str, Any]
BUILT = "dapo_jax_record"  # the one field of a data set built here: a record as JSON


@dataclasses.dataclass(frozen=True)
class Format:
    """Fields by name; "a.b" is field b of the object a, "a|b" the first that a row has."""

    prompt: str = "prompt"  # a text, or chat messages
    answer: str = "answer"
    rule: str = "whole"  # how the answer stands in its field: a name in RULES
    demonstration: str = "demonstration"
    about: str = ""  # the published files that are laid out so


def of(task: config.Task, given: Mapping[str, Any]) -> Format:
    """The format that a task asks for, `given` instead of its fields where a source has its own."""
    asked: dict[str, Any] = {"format": task.format, "prompt_field": task.prompt_field,
             "answer_field": task.answer_field, "answer_rule": task.answer_rule,
             "demonstration_field": task.demonstration_field, **given}
    shown = asked["demonstration_field"]
    if asked["format"] == "fields":
        return Format(asked["prompt_field"], asked["answer_field"], asked["answer_rule"], shown)
    return dataclasses.replace(FORMATS[asked["format"]], demonstration=shown)


def record(row: Row, form: Format) -> Record:
    """The record of a row; ValueError says what is wrong with it.

    It is the row with "prompt", "answer" (a text) and, where there is one, "demonstration" set. A
    solution out of which the answer is taken is kept as "solution".
    """
    if BUILT in row:
        return json.loads(row[BUILT])
    prompt, answer = (find(row, path) for path in (form.prompt, form.answer))
    missing = [path for path, found in ((form.prompt, prompt), (form.answer, answer))
               if found is ABSENT]
    if missing:
        raise ValueError("it has no " + " and no ".join(map(repr, missing)))
    _check_prompt(prompt, form.prompt)
    made = {**row, "prompt": prompt, "answer": _answer(answer, form)}
    if form.rule != "whole":
        made.setdefault("solution", answer)
    return made | _shown(row, form)


def find(row: Row, path: str) -> Any:
    """What stands at a path as in `Format`, or ABSENT."""
    for choice in path.split("|"):
        value = row[choice] if choice in row else _inner(row, choice)
        if value is not ABSENT:
            return value
    return ABSENT


def _inner(value: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return ABSENT
        value = value[name]
    return value


def _answer(answer: Any, form: Format) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"{form.answer!r} is a {type(answer).__name__}, not a text or number")
    text = RULES[form.rule](str(answer))
    if text is None:
        raise ValueError(f"{form.answer!r} does not end in an answer: {_MARKS[form.rule]}")
    # JSON's 1e999 is read as infinity; a Parquet column of numbers may hold NaN.
    if not text.strip() or isinstance(answer, float) and answer - answer != 0:
        raise ValueError(f"{form.answer!r} is {text.strip() or 'empty'}")
    return text


def _shown(row: Row, form: Format) -> Record:
    """The demonstration, if the row has one."""
    shown = find(row, form.demonstration)
    if shown is ABSENT:
        return {}
    if not isinstance(shown, str):
        raise ValueError(f"{form.demonstration!r} is a {type(shown).__name__}, not a text")
    return {"demonstration": shown}


def _check_prompt(prompt: Any, field: str) -> None:
    """ValueError unless it is a text with content, or messages with the fields that all have."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{field!r} is empty")
        return
    if not isinstance(prompt, list):
        raise ValueError(f"{field!r} is a {type(prompt).__name__}, not a text")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict) or not all(
                isinstance(message.get(name), str) for name in ("role", "content")):
            raise ValueError(f"message {number} of {field!r} is no object with the texts 'role' "
                             "and 'content'")
    if not any(message["role"] == "user" for message in prompt):
        raise ValueError(f"{field!r} holds no message of the user")


def labelled(made: Record, dataset: str) -> Record:
    """The record with the key of its prompt and the name of the data set it is from."""
    return {"dataset": dataset, **identity.keyed(made)}


# ------------------------------------------------------------------------------------ answer rules

# A box, a brace, or what takes the meaning of a brace or backslash away.
_BRACES = re.compile(r"(\\(?:boxed|fbox)\{)|\\\\|\\[{}]|[{}]")


def _after_hashes(text: str) -> str | None:
    """What follows the last "####", as GSM8K's solutions end."""
    before, mark, after = text.rpartition("####")
    return after.strip() or None if mark else None


def _in_box(text: str) -> str | None:
    r"""What is in the last balanced \boxed{} or \fbox{}, as MATH's solutions end.

    Without any, what follows the last "\boxed ", as in "\boxed 5". Linear in the text.
    """
    opened: list[re.Match[str]] = []
    last: tuple[int, str] | None = None
    for mark in _BRACES.finditer(text):
        if mark[0] == "}" and opened:
            start = opened.pop()
            if start[1] and (last is None or start.start() > last[0]):
                last = start.start(), text[start.end():mark.start()]
        elif mark[0] == "{" or mark[1]:
            opened.append(mark)
    if last is not None:
        return last[1].strip() or None
    _, spaced, after = text.rpartition("\\boxed ")
    return (after.strip(" $.\n") or None) if spaced else None


class _Absent:
    """What a row has at a path that it does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
RULES: dict[str, Callable[[str], str | None]] = {
    "whole": str, "hashes": _after_hashes, "boxed": _in_box}
_MARKS = {"hashes": "there is no '#### ' with something after it",
          "boxed": "there is no balanced \\boxed{} with something in it"}
FORMATS = {
    "fields": Format(about="JSONL or Parquet with the fields that the configuration names"),
    "gsm8k": Format("question", "answer", "hashes", about="train.jsonl, test.jsonl, or Parquet"),
    "math": Format("problem", "solution", "boxed", about="JSONL or Parquet of problem, level, "
                   "type, solution"),
    "math500": Format("problem", "answer", about="test.jsonl of problem, solution, answer, "
                      "subject, level, unique_id"),
    "aime": Format("problem|Problem|question|Question", "answer|Answer", about="JSONL or Parquet "
                   "of problem and answer"),
    "dapo": Format("prompt", "reward_model.ground_truth", about="dapo-math-17k.parquet"),
}
