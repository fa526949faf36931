"""Where prompts come from: the tasks by name, and JSON Lines files read with every fault named."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from dapo_jax import config
from dapo_jax.data import identity
from dapo_jax.envs import arithmetic, base, countdown, math, multiple_choice, reasoning_gym

NAMED = 20  # bad lines that a message names; the rest are counted
BOM = b"\xef\xbb\xbf"


def load(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split`, "train" or "eval", of the configured task, and counts of what is missing.

    Counts: "bad" lines left out (jsonl), "missing" problems that do not exist (arithmetic).
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is neither 'train' nor 'eval'")
    return task(cfg.task.name).build(cfg, split)


def task(name: str) -> base.Task:
    """The task of that name; ConfigError for an unknown one."""
    if name not in TASKS:
        raise config.ConfigError(f"config.task.name is {name!r}; there are: {', '.join(TASKS)}")
    return TASKS[name]


def prompt_key(record: base.Record) -> str:
    """32 hexadecimal digits that name a record's prompt, as files of pass rates do."""
    return identity.prompt_key(record)


def read_jsonl(path: str, *, prompt_field: str, answer_field: str, on_bad: str = "error",
               limit: int = 0) -> tuple[list[base.Record], list[str]]:
    """Records of the first `limit` good lines (0: all), and a sentence for each bad line.

    A record is its line's object with "prompt" and "answer" set from the two fields; the prompt
    may be a list of chat messages, the answer a number. Blank lines do not count. ConfigError if
    the file cannot be read or has no good line, and, with `on_bad` "error", if any line is bad.
    """
    records: list[base.Record] = []
    bad: list[str] = []
    for number, line in _lines(path):
        try:
            records.append(_parse(line, prompt_field=prompt_field, answer_field=answer_field))
        except ValueError as error:
            bad.append(f"{path}, line {number}: {error}")
        if len(records) == limit > 0:
            break
    if bad and on_bad == "error":
        raise config.ConfigError(_listing(bad) + "\ncorrect them, or set config.task.bad_records = "
                                 "'skip' to leave them out")
    if not records:
        raise config.ConfigError("\n".join(
            [f"{path} holds no usable record", *([_listing(bad)] if bad else [])]))
    return records, bad


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank, without its end and a leading BOM."""
    try:
        # Bytes: text mode would also end lines at a lone \r, and fail on a whole block at once.
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise config.ConfigError(f"cannot read {path!r}: {error.strerror}") from error


def _parse(line: bytes, *, prompt_field: str, answer_field: str) -> base.Record:
    """The record of one line; ValueError says what is wrong with it."""
    row = _decode(line)
    if not isinstance(row, dict):
        raise ValueError(f"it holds a {type(row).__name__}, not an object")
    missing = [field for field in (prompt_field, answer_field) if field not in row]
    if missing:
        raise ValueError("it has no " + " and no ".join(map(repr, missing)))
    prompt, answer = row[prompt_field], row[answer_field]
    _check_prompt(prompt, prompt_field)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"{answer_field!r} is a {type(answer).__name__}, not a text or number")
    answer = str(answer)
    if answer.strip() in ("", "inf", "-inf"):  # JSON's 1e999 is read as infinity
        raise ValueError(f"{answer_field!r} is {answer.strip() or 'empty'}")
    if not isinstance(row.get("demonstration", ""), str):
        raise ValueError(f"'demonstration' is a {type(row['demonstration']).__name__}, not a text")
    return {**row, "prompt": prompt, "answer": answer}


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


def _decode(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    try:
        row = json.loads(text, parse_constant=_refuse)
        # JSON may spell half of a surrogate pair, which no text that is written or hashed can hold.
        json.dumps(row, ensure_ascii=False).encode("utf-8")
        return row
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON ({error})") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _listing(bad: list[str]) -> str:
    rest = [f"and {len(bad) - NAMED} more"] if len(bad) > NAMED else []
    return "\n".join([f"{len(bad)} bad lines:" if len(bad) > 1 else "1 bad line:", *bad[:NAMED],
                      *rest])


def _build_jsonl(
    cfg: config.Config, split: str, *, prepare: Callable[..., list[base.Record]] | None = None
) -> tuple[list[base.Record], dict[str, int]]:
    """Rows of the split's own file, or of the training file with some held out; `prepare` makes
    the task's records of them."""
    files = {"train": cfg.task.train_path, "eval": cfg.task.eval_path}
    if not cfg.task.train_path:
        raise config.ConfigError("config.task.train_path is empty: name the training file")
    size = {"train": cfg.task.train_size, "eval": cfg.eval.prompts}[split]
    if cfg.task.eval_path:
        rows, bad = _read(cfg.task, files[split], limit=size)
    else:
        rows, bad = _read(cfg.task, cfg.task.train_path, limit=0)
        train, held_out = _hold_out(rows, cfg.eval.prompts, path=cfg.task.train_path)
        rows = held_out if split == "eval" else train[:size or None]
    if prepare:
        rows = prepare(rows, source=files[split] or cfg.task.train_path)
    records = [{**row, "prompt": _templated(cfg.task.template, row["prompt"])} for row in rows]
    return records, {"bad": len(bad)}


def _templated(template: str, prompt: str | list[dict]) -> str | list[dict]:
    """The template around the prompt, or around the last message of the user."""
    if isinstance(prompt, str):
        return base.apply_template(template, prompt)
    last = max(at for at, message in enumerate(prompt) if message["role"] == "user")
    content = base.apply_template(template, prompt[last]["content"])
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1:]]


def _read(settings: config.Task, path: str, *, limit: int) -> tuple[list[base.Record], list[str]]:
    rows, bad = read_jsonl(path, prompt_field=settings.prompt_field,
                           answer_field=settings.answer_field, on_bad=settings.bad_records,
                           limit=limit)
    if bad:
        logging.getLogger(__name__).warning("left out of %s: %s", path, _listing(bad))
    return rows, bad


def _hold_out(rows: list[base.Record], count: int, *,
              path: str) -> tuple[list[base.Record], list[base.Record]]:
    """(training rows, `count` held-out rows of as many different prompts).

    The prompts whose hash comes last are held out, so neither the order of the file nor the seed
    moves a prompt from one side to the other; all rows of a held-out prompt leave the training.
    """
    first = {_identity(row): row for row in reversed(rows)}
    if len(first) <= count:
        raise config.ConfigError(
            f"{path} has {len(first)} different prompts; config.eval.prompts = {count} of them to "
            "hold out would leave none to train on: name config.task.eval_path or hold out fewer")
    ordered = sorted(first, key=lambda prompt: hashlib.blake2b(prompt.encode()).digest())
    held_out = set(ordered[len(ordered) - count:])
    return ([row for row in rows if _identity(row) not in held_out],
            [row for prompt, row in first.items() if prompt in held_out][::-1])


def _identity(row: base.Record) -> str:
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


TASKS = {
    "arithmetic": arithmetic.TASK,
    "countdown": countdown.TASK,
    "reasoning_gym": reasoning_gym.TASK,
    "math": math.task(_build_jsonl),
    "multiple_choice": multiple_choice.task(
        functools.partial(_build_jsonl, prepare=multiple_choice.checked)),
    "jsonl": base.Task("jsonl", _build_jsonl, "dapo_jax.envs.math_answers:last_number",
                       purpose="records of prompt and answer; the answer's text counts too",
                       examples=math.EXAMPLES),
}
