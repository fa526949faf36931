"""A record to tokens: its template, its chat, its demonstration. Nothing here needs jax, so that
processes which only encode start fast and stay small."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.data import files, scan
from dapo_jax.envs import base
from dapo_jax.text import chat as chats
from dapo_jax.text import load
from dapo_jax.text import tokenizer as tokenizers

Record = Mapping[str, Any]
SEGMENTS = "demonstration_segments"  # of a record: chat.Segment after Segment, where not all of the
# demonstration is the model's to write


@dataclasses.dataclass(frozen=True)
class Writing:
    """How the prompts of records are written and which of them fit."""

    template: str  # of configuration; empty: the prompts are written already
    chat: chats.Chat | None
    wrap: bool  # texts are for the chat too
    limits: config.PromptLimits
    stop_id: int | None


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The records of a chunk that fit, and how many do not."""

    tokens: np.ndarray  # i32[*] one after the other
    lengths: np.ndarray  # i32[k]
    kept: np.ndarray  # bool[n] of the records that were asked for
    records: bytes  # JSON of each, one after the other
    sizes: np.ndarray  # i64[k] bytes of each
    shown: np.ndarray  # i32[*] demonstrations
    shown_lengths: np.ndarray  # i32[k] 0: it has none
    masks: np.ndarray  # bool[*] of `shown`
    lacking: str  # what errors call the first record without a demonstration; empty: there is none


def encode_chunk(
    ready: tuple[tokenizers.Tokenizer, Writing],
    job: tuple[files.Chunk, scan.Rules, np.ndarray],
) -> Encoded:
    """The rows at given places of a chunk, written and encoded."""
    tokenizer, writing = ready
    chunk, rules, places = job
    tokens, records, shown, masks, kept, lacking = [], [], [], [], [], ""
    for what, record in scan.chosen(chunk, rules, places):
        record = in_chat(base.templated(record, writing.template), writing, what)
        ids = prompt_tokens(record, tokenizer, what)
        kept.append(fits(ids, record, writing.limits, what))
        if kept[-1]:
            ends, mask = demonstration(record, tokenizer, writing.stop_id, what)
            lacking = lacking or ("" if len(ends) else what)
            tokens.append(ids)
            shown.append(ends)
            masks.append(mask)
            records.append(json.dumps({name: value for name, value in record.items()
                                       if name != SEGMENTS}, ensure_ascii=False).encode())
    return Encoded(_flat(tokens, np.int32), _lengths(tokens, np.int32), np.array(kept, bool),
                   b"".join(records), _lengths(records, np.int64), _flat(shown, np.int32),
                   _lengths(shown, np.int32), _flat(masks, bool), lacking)


def prepared(given: tuple[load.Recipe, Writing]) -> tuple[tokenizers.Tokenizer, Writing]:
    """What a process needs for `encode_chunk`."""
    recipe, writing = given
    return load.made(recipe), writing


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _lengths(items: list, dtype: type) -> np.ndarray:
    return np.array([len(item) for item in items], dtype)


# ------------------------------------------------------------------------------------- one record


def in_chat(record: Record, writing: Writing, what: str) -> Record:
    """The record with its prompt as the chat template writes it, where it is for a chat.

    A prompt that holds messages is rendered, a text only with `writing.wrap`, as the user's
    message. A demonstration becomes the assistant's turn after it. Messages that end with the
    assistant are a conversation to learn from: its first turn of the assistant ends the prompt,
    the rest is the demonstration. ConfigError, with `what`: it cannot be rendered.
    """
    messages, chat = record["prompt"], writing.chat
    if isinstance(messages, str):
        if not writing.wrap:
            return record
        messages = [{"role": "user", "content": messages}]
    if chat is None:
        raise config.ConfigError(
            f"the prompt of {what} is for a chat, but the tokenizer comes with no chat template: "
            "name one in config.tokenizer.chat_template, or set config.task.chat to False")
    first, shown = len(messages), record.get("demonstration")
    if messages[-1]["role"] == "assistant":
        if shown is not None:
            raise config.ConfigError(f"{what} has a demonstration after messages that end with the "
                                     "assistant's: leave one of them out")
        first = [message["role"] for message in messages].index("assistant")
    elif shown is not None:
        messages = [*messages, {"role": "assistant", "content": shown}]
    try:
        if first == len(messages):
            return {**record, "prompt": chats.render(chat, messages)}
        prompt, *rest = chats.segments(chat, messages, first=first)
    except config.ConfigError as error:
        raise config.ConfigError(f"{what}: {error}") from error
    return {**record, "prompt": prompt[0], "demonstration": "".join(text for text, _ in rest),
            SEGMENTS: tuple(rest)}


def prompt_tokens(record: Record, tokenizer: tokenizers.Tokenizer, what: str) -> np.ndarray:
    """Ids i32[n] of the prompt; ConfigError: it has none, or cannot be encoded."""
    return _encode(tokenizer, record["prompt"], f"prompt of {what}")


def _encode(tokenizer: tokenizers.Tokenizer, text: str, what: str, *,
            start: bool = True) -> np.ndarray:
    try:
        tokens = tokenizer.encode(text, start=start)
    except ValueError as error:
        raise config.ConfigError(f"{what} ({_start(text)}) cannot be encoded: {error}") from error
    if not len(tokens):
        raise config.ConfigError(f"{what} ({_start(text)}) has no tokens")
    return np.asarray(tokens, np.int32)


def fits(tokens: np.ndarray, record: Record, limits: config.PromptLimits, what: str) -> bool:
    """Whether the prompt is within the last bucket; ConfigError if not, unless it may be dropped"""
    longest = limits.buckets[-1]
    if len(tokens) > longest and limits.too_long == "error":
        raise config.ConfigError(
            f"prompt of {what} ({_start(record['prompt'])}) has {len(tokens)} tokens, more than "
            f"{longest}, the last of config.prompts.buckets: add a larger one or set "
            "config.prompts.too_long = 'drop'")
    return len(tokens) <= longest


def demonstration(record: Record, tokenizer: tokenizers.Tokenizer, stop_id: int | None, what: str
                  ) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[n] and bool[n], what of it the model is to write; nothing if there is none.

    The last token is written; it is `stop_id` unless the demonstration ends otherwise itself.
    """
    what = f"demonstration of {what}"
    if record.get("demonstration") is None:
        return np.zeros(0, np.int32), np.zeros(0, bool)
    if SEGMENTS not in record:
        tokens = _stopped(_encode(tokenizer, record["demonstration"], what, start=False), stop_id)
        return tokens, np.ones(len(tokens), bool)
    try:
        tokens, mask = chats.encode(tokenizer, record[SEGMENTS], start=False)
    except ValueError as error:
        raise config.ConfigError(f"{what} cannot be encoded: {error}") from error
    if not mask.any():
        raise config.ConfigError(f"{what} has no tokens that the assistant writes")
    # The template ends a turn as the model does; what it writes after that is not learned.
    tokens = tokens[:np.flatnonzero(mask)[-1] + 1]
    ended = tokens if tokens[-1] in tokenizer.stop_ids else _stopped(tokens, stop_id)
    added = np.ones(len(ended) - len(tokens), bool)
    return ended, np.concatenate([mask[:len(tokens)], added])


def _stopped(tokens: np.ndarray, stop_id: int | None) -> np.ndarray:
    if stop_id is None or tokens[-1] == stop_id:
        return tokens
    return np.append(tokens, np.int32(stop_id))


def _start(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
