r"""Prompt templates by name: the text around a prompt, and the form an answer to it has.

A template and a scorer are configured apart, so each named template also says how an answer to it
looks; self_check.py gives the scorer such an answer before anything is sampled.
"""

import dataclasses
import re
from collections.abc import Sequence

from dapo_jax import config

TAIL = 20_000  # characters of a text in which a final answer is looked for

_MARKS = re.compile(r"\\(?:boxed|fbox)\s*+\{|[{}]")
_TAGS = re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.DOTALL)
_LINE = re.compile(r"answer[ \t*]*+:[ \t*]*+(\S[^\n]*+)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*+(\S[^\n]*+)")


@dataclasses.dataclass(frozen=True)
class Template:
    """Text around a prompt, and around an answer to it."""

    text: str  # holds {prompt}
    answer: str  # holds {answer}: a completion that answers in the template's own form
    joint: str = "\n\n"  # between solved examples
    chat: bool = False  # the text is the user's message in the tokenizer's chat template


_DAPO = ("Solve the following math problem step by step. The last line of your response should be "
         "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
         "\n\n{prompt}\n\nRemember to put your answer on its own line after \"Answer:\".")
_BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

TEMPLATES = {
    # Base models: the answer follows at once.
    "plain": Template("{prompt}", "{answer}"),
    "line": Template("{prompt} ", "{answer}", joint="\n"),
    "qa": Template("Question: {prompt}\nAnswer:", " {answer}"),
    # Base or chat models: the answer stands at the end of a worked solution.
    "dapo": Template(_DAPO, "I work it out.\nAnswer: {answer}"),  # arXiv 2503.14476, released data
    "boxed": Template(_BOXED, "I work it out: \\boxed{{answer}}"),
    "hashes": Template("{prompt}\n\nThink step by step. End with a line that holds \"#### \" and "
                       "the answer.", "I work it out.\n#### {answer}"),  # GSM8K, arXiv 2110.14168
    "tags": Template("{prompt}\n\nThink first, inside <think> </think>, then give the answer "
                     "alone inside <answer> </answer>.",
                     "<think>I work it out.</think>\n<answer>{answer}</answer>"),
    # Chat models, whatever config.task.chat says.
    "chat": Template(_BOXED, "I work it out: \\boxed{{answer}}", chat=True),
}


def named(template: str) -> Template:
    """The template of that name, or the given text with answers that stand alone.

    ConfigError: neither a name nor a text with "{prompt}".
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{prompt}" not in template:
        raise config.ConfigError(
            f"config.task.template = {template!r} is neither a text that holds '{{prompt}}' nor "
            f"one of: {', '.join(TEMPLATES)}")
    return Template(template, "{answer}")


def apply(template: str, prompt: str) -> str:
    """The prompt inside the template, in place of each "{prompt}"; other braces stay."""
    return named(template).text.replace("{prompt}", prompt)


def answered(template: str, answer: str) -> str:
    """A completion that gives `answer` in the template's form."""
    return named(template).answer.replace("{answer}", answer)


def few_shot(template: str, solved: Sequence[tuple[str, str]], prompt: str) -> str:
    """`solved` (prompt, answer) pairs as the template has them, then the prompt to answer."""
    chosen = named(template)
    shown = [apply(template, question) + answered(template, answer) for question, answer in solved]
    return chosen.joint.join([*shown, apply(template, prompt)])


def final_answer(text: str) -> str:
    r"""What `text` gives as its answer, stripped but not normalised.

    The last `<answer>` element, else the last balanced `\boxed{}` or `\fbox{}`, else the last
    "Answer:" line, else the last "#### " line, else all of the text. Linear in the last `TAIL`
    characters, the only ones looked at.
    """
    tail = text[-TAIL:]
    tagged = _TAGS.findall(tail)
    if tagged:
        return tagged[-1].strip()
    boxed = _last_box(tail)
    if boxed is not None:
        return boxed.strip()
    for pattern in (_LINE, _HASHES):
        found = pattern.findall(tail)
        if found:
            return found[-1].strip()
    return tail.strip()


def _last_box(text: str) -> str | None:
    """Content of the balanced box that starts last."""
    opened: list[re.Match] = []
    best: tuple[int, str] | None = None
    for brace in _MARKS.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start[0] != "{" and (best is None or start.start() > best[0]):
                best = (start.start(), text[start.end():brace.start()])
    return best[1] if best else None
