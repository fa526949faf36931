"""Chat templates: messages to text, and which of it the assistant wrote.

A template comes with a model, so it is a stranger's: it runs in jinja's sandbox, which gives it
no attribute with a leading underscore, no module, file or function but the helpers below, and
cannot change what it is given. The sandbox does not bound time or memory: a template that counts
without end hangs the start, before anything is trained.
"""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from dapo_jax import config
from dapo_jax.text import tokenizer as tokenizers

Message = Mapping[str, Any]  # role, content (texts); templates may know more
Segment = tuple[str, bool]  # a stretch of a rendered chat; whether the assistant generates it

# Around what a generation block holds, while it is looked for; no text has them (Unicode, 23.7).
_BEGIN, _END = "\ufdd0", "\ufdd1"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A template and what it is told beside the messages."""

    template: str
    specials: tuple[tuple[str, str], ...] = ()  # ("bos_token", its text) and the like
    date: str = ""  # YYYY-MM-DD: today; empty: there is no strftime_now


def configured(cfg: config.Tokenizer, tokenizer: tokenizers.Tokenizer) -> Chat | None:
    """The chat of a tokenizer, None if it has no template; ConfigError: one that is not jinja."""
    if not tokenizer.chat_template:
        return None
    if cfg.chat_date:
        try:
            datetime.date.fromisoformat(cfg.chat_date)
        except ValueError as error:
            raise config.ConfigError(f"config.tokenizer.chat_date: {error}") from error
    chat = Chat(tokenizer.chat_template, tuple(tokenizer.specials.items()), cfg.chat_date)
    _compiled(chat, marks=False)
    return chat


def render(chat: Chat, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """The chat as a text, up to where the assistant goes on if `add_generation_prompt`.

    ConfigError: the template refuses the messages, or asks for what the sandbox does not give.
    """
    return _render(chat, messages, add_generation_prompt=add_generation_prompt, marks=False)


def segments(chat: Chat, messages: Sequence[Message], *, first: int) -> list[Segment]:
    """A conversation cut where the assistant begins and ends, from message `first` on.

    The first segment is what a rollout of the assistant's turn `first` would be prompted with.
    What the assistant generates is found by the template's generation blocks, or else by
    rendering the conversation up to each turn. ConfigError: the text of the whole conversation
    does not begin with the text of its first turns, so that nobody could have generated it.
    """
    prompt = render(chat, messages[:first])
    whole = _render(chat, messages, add_generation_prompt=False, marks=True)
    found = (_after(prompt, _marked(whole)) if _BEGIN in whole
             else _by_prefixes(chat, messages, first))
    return [(prompt, False), *found]


def encode(tokenizer: tokenizers.Tokenizer, parts: Sequence[Segment], *, start: bool
           ) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[n] of the segments, and bool[n]: the assistant generates it.

    Each segment is encoded by itself, as prompt and completion of a rollout are. A turn ends at
    its first stop token; what a template writes after that is not generated.
    """
    ids: list[np.ndarray] = []
    mask: list[np.ndarray] = []
    for text, generated in parts:
        tokens = np.asarray(tokenizer.encode(text, start=start and not ids), np.int32)
        stops = np.isin(tokens, tokenizer.stop_ids)
        ids.append(tokens)
        mask.append(np.asarray((np.cumsum(stops) - stops == 0) & generated))
    return np.concatenate(ids), np.concatenate(mask)


# --------------------------------------------------------------------------------------- segments


def _by_prefixes(chat: Chat, messages: Sequence[Message], first: int) -> list[Segment]:
    parts: list[Segment] = []
    done = render(chat, messages[:first])
    for at in range(first, len(messages)):
        if messages[at]["role"] != "assistant":
            continue
        before = render(chat, messages[:at])
        parts += [(_rest(done, before, at), False)] if before != done else []
        done = render(chat, messages[:at + 1], add_generation_prompt=False)
        parts.append((_rest(before, done, at), True))
    return parts


def _rest(before: str, after: str, at: int) -> str:
    if not after.startswith(before):
        same = len(os.path.commonprefix([before, after]))
        raise config.ConfigError(
            f"the chat template changes earlier text when message {at} is added: "
            f"{before[same:same + 40]!r} becomes {after[same:same + 40]!r}, so what the assistant "
            "generated cannot be told. Give fewer turns, or a template with {% generation %}")
    return after[len(before):]


def _marked(whole: str) -> list[Segment]:
    """Segments of a text with marks, the first not generated."""
    parts: list[Segment] = []
    for at, stretch in enumerate(whole.split(_BEGIN)):
        generated, end, rest = stretch.partition(_END)
        parts += [(generated, True), (rest, False)] if end else [(stretch, False)]
        if bool(end) != bool(at):
            raise config.ConfigError("the chat template's generation blocks lie in one another")
    return parts


def _after(prompt: str, parts: Sequence[Segment]) -> list[Segment]:
    """The segments, without the text of the prompt before them."""
    _rest(prompt, "".join(text for text, _ in parts), len(parts))
    left, result = len(prompt), []
    for text, generated in parts:
        kept, left = text[left:], max(left - len(text), 0)
        result += [(kept, generated)] if kept else []
    return result


# ---------------------------------------------------------------------------------------- rendering


def _render(chat: Chat, messages: Sequence[Message], *, add_generation_prompt: bool,
            marks: bool) -> str:
    given = json.dumps(messages, ensure_ascii=False)
    if marks and (_BEGIN in given or _END in given):
        raise config.ConfigError("a message holds U+FDD0 or U+FDD1, which are no characters")
    template = _compiled(chat, marks=marks)
    try:
        return template.render(dict(chat.specials), messages=json.loads(given),
                               add_generation_prompt=add_generation_prompt, tools=None,
                               documents=None)
    except Exception as error:  # whatever a template's expressions may raise
        hint = ("; set config.tokenizer.chat_date"
                if "strftime_now" in str(error) and not chat.date else "")
        raise config.ConfigError(f"the chat template fails on messages with the roles "
                                 f"{[message.get('role') for message in messages]}: "
                                 f"{type(error).__name__}: {error}{hint}") from error


@functools.lru_cache(maxsize=8)
def _compiled(chat: Chat, *, marks: bool) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _MarkedGeneration if marks else _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    if chat.date:
        environment.globals["strftime_now"] = datetime.datetime.fromisoformat(chat.date).strftime
    try:
        return environment.from_string(chat.template)
    except jinja2.TemplateSyntaxError as error:
        raise config.ConfigError(f"the chat template, line {error.lineno}: {error.message}"
                                 ) from error


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """Plain JSON; jinja's own filter would escape what HTML wants escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """The block {% generation %} ... {% endgeneration %} around what the assistant generates."""

    tags = {"generation"}
    marks = ("", "")

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body, between this class's marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = ([jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)])] if mark else []
                      for mark in self.marks)
        return jinja2.nodes.Scope([*begin, *body, *end]).set_lineno(line)


class _MarkedGeneration(_Generation):
    marks = (_BEGIN, _END)
