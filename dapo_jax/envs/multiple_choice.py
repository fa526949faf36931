"""Multiple choice: lettered options; a letter or an option's text answers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.envs import base, templates

MOST = 26  # options: a letter each
_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*+\{([^{}]*+)\}")
_LETTER = re.compile(r"(?:option|choice)?\s*\(?([A-Za-z])(?:\)|[.:](?=\s|$)|(?=$))\s*(.*)",
                     re.DOTALL | re.IGNORECASE)
_SAID = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?:?\s+(?:option\s+)?\(?([A-Z])\)?(?![\w'])")


def convert(row: Mapping[str, Any]) -> base.Record:
    """A record of `prompt`, `choices` and `answer` with its options written under the prompt.

    `choices` is a list of texts; `answer` a letter, the text of an option, or else its number from
    0. ValueError says what is wrong.
    """
    choices = row.get("choices")
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= MOST:
        raise ValueError(f"'choices' must be a list of 2 to {MOST} texts")
    choices = tuple(str(choice) for choice in choices)
    if len({_plain(choice) for choice in choices}) < len(choices):
        raise ValueError("two of 'choices' are the same")
    letter = _gold(str(row["answer"]).strip(), choices)
    return {**row, "prompt": _with_options(row["prompt"], choices), "answer": letter,
            "choices": choices}


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the text's final answer names the right option, by letter or by its text."""
    return float(extract(text, record) == record["answer"])


def extract(text: str, record: Mapping[str, Any]) -> str | None:
    """The letter that the text's final answer names; None if it names none, or several."""
    answer = templates.final_answer(text)
    chosen = chosen_letter(answer, record["choices"])
    if chosen is None and answer == text[-templates.TAIL:].strip():  # nothing marks an answer in it
        said = _SAID.findall(answer)
        chosen = chosen_letter(said[-1], record["choices"]) if said else chosen_letter(
            answer.split("\n", 1)[0], record["choices"])
    return chosen


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the option that `answer` is: "b", "(B)", "B. its text" or its text."""
    answer = _DRESS.sub(r"\1", answer).strip("*$ \t\n").rstrip(".").strip("*$ \t")
    texts = [_plain(choice) for choice in choices]
    named = _LETTER.fullmatch(answer)
    place = ord(named[1].upper()) - ord("A") if named else len(choices)
    # After a letter only that option's own text may stand: "A or B" chooses nothing.
    if named and place < len(choices) and _plain(named[2]) in ("", texts[place]):
        return named[1].upper()
    return _of_text(answer, texts)


def _of_text(answer: str, texts: Sequence[str]) -> str | None:
    """The letter of the option with that text."""
    return chr(ord("A") + texts.index(_plain(answer))) if _plain(answer) in texts else None


def _gold(answer: str, choices: Sequence[str]) -> str:
    if len(answer) == 1 and "A" <= answer.upper() < chr(ord("A") + len(choices)):
        return answer.upper()
    letter = _of_text(answer, [_plain(choice) for choice in choices])
    if letter:
        return letter
    if answer.isdecimal() and int(answer) < len(choices):
        return chr(ord("A") + int(answer))
    raise ValueError(f"'answer' is {answer!r}: neither a letter, text nor number of 'choices'")


def _with_options(prompt: str | list[dict], choices: Sequence[str]) -> str | list[dict]:
    """The options under the prompt, or under the user's last message."""
    if isinstance(prompt, str):
        lines = [f"{chr(ord('A') + place)}. {choice}" for place, choice in enumerate(choices)]
        return "\n".join([prompt, *lines])
    last = max(at for at, message in enumerate(prompt) if message["role"] == "user")
    content = _with_options(prompt[last]["content"], choices)
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1:]]


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


def task(build: base.Build) -> base.Task:
    """The task on records that `build` reads and `convert` has prepared."""
    return base.Task(
        "multiple_choice", build, "dapo_jax.envs.multiple_choice:score",
        "dapo_jax.envs.multiple_choice:extract",
        purpose="records of prompt, choices and answer; a letter or an option's text answers",
        examples=(convert({"prompt": "Which of these is a prime number?", "answer": "B",
                           "choices": ["21", "23", "25"]}),))
