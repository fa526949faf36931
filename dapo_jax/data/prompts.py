"""Records to a table of tokenised prompts: each text is encoded once, here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax import config, types
from dapo_jax.text import chat as chats
from dapo_jax.text import tokenizer as tokenizers

Record = Mapping[str, Any]
SEGMENTS = "demonstration_segments"  # of a record: chat.Segment after Segment, where not all of the
# demonstration is the model's to write


def in_chat(records: Sequence[Record], chat: chats.Chat | None, *, wrap: bool) -> list[Record]:
    """The records with their prompts as the chat template writes them.

    A prompt that holds messages is rendered, a text only with `wrap`, as the user's message. A
    demonstration becomes the assistant's turn after it. Messages that end with the assistant are
    a conversation to learn from: its first turn of the assistant ends the prompt, the rest is the
    demonstration. ConfigError names the first record that cannot be rendered.
    """
    return [_in_chat(record, chat, f"record {index}")
            if wrap or not isinstance(record["prompt"], str) else record
            for index, record in enumerate(records)]


def _in_chat(record: Record, chat: chats.Chat | None, what: str) -> Record:
    if chat is None:
        raise config.ConfigError(
            f"the prompt of {what} is for a chat, but the tokenizer comes with no chat template: "
            "name one in config.tokenizer.chat_template, or set config.task.chat to False")
    messages = record["prompt"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
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


def table(records: Sequence[Record], tokenizer: tokenizers.Tokenizer, limits: config.PromptLimits,
          *, stop_id: int | None) -> tuple[types.PromptTable, dict[str, int]]:
    """The table of all usable records in their order, and counts of the others.

    Counts: "duplicates" (same prompt and answer as an earlier record) and "too_long" (over the
    last bucket, with `limits.too_long` "drop"), both left out. Demonstrations get `stop_id` at
    their end if it is not there. ConfigError names the first record that cannot be used.
    """
    counts = {"duplicates": 0, "too_long": 0}
    seen: set[tuple[str, str]] = set()
    kept: list[tuple[Record, np.ndarray, int]] = []
    for index, record in enumerate(records):
        identity = (record["prompt"], record["answer"])
        if identity in seen:
            counts["duplicates"] += 1
            continue
        seen.add(identity)
        tokens = _encode(tokenizer, record["prompt"], f"prompt of record {index}")
        if _fits(tokens, limits, f"prompt of record {index} ({_start(record['prompt'])})"):
            kept.append((record, tokens, index))
        else:
            counts["too_long"] += 1
    if not kept:
        raise config.ConfigError(f"no prompt is left of {len(records)} records: {counts}")
    demonstrations, masks = _demonstrations(kept, tokenizer, stop_id)
    return types.PromptTable(tokens=tuple(tokens for _, tokens, _ in kept),
                             records=tuple(record for record, _, _ in kept),
                             demonstrations=demonstrations, demonstration_masks=masks), counts


def _encode(tokenizer: tokenizers.Tokenizer, text: str, what: str, *,
            start: bool = True) -> np.ndarray:
    try:
        tokens = tokenizer.encode(text, start=start)
    except ValueError as error:
        raise config.ConfigError(f"{what} ({_start(text)}) cannot be encoded: {error}") from error
    if not len(tokens):
        raise config.ConfigError(f"{what} ({_start(text)}) has no tokens")
    return np.asarray(tokens, np.int32)


def _fits(tokens: np.ndarray, limits: config.PromptLimits, what: str) -> bool:
    longest = limits.buckets[-1]
    if len(tokens) > longest and limits.too_long == "error":
        raise config.ConfigError(
            f"{what} has {len(tokens)} tokens, more than {longest}, the last of "
            "config.prompts.buckets: add a larger one or set config.prompts.too_long = 'drop'")
    return len(tokens) <= longest


def _demonstrations(kept: list, tokenizer: tokenizers.Tokenizer, stop_id: int | None
                    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Demonstrations of the kept records, all or none of which have one, and their masks."""
    lacking = [index for record, _, index in kept if record.get("demonstration") is None]
    if len(lacking) == len(kept):
        return (), ()
    if lacking:
        raise config.ConfigError(f"record {lacking[0]} has no demonstration, but others have: give "
                                 "all of them one, or none")
    made = [_demonstration(record, tokenizer, stop_id, f"demonstration of record {index}")
            for record, _, index in kept]
    return tuple(tokens for tokens, _ in made), tuple(mask for _, mask in made)


def _demonstration(record: Record, tokenizer: tokenizers.Tokenizer, stop_id: int | None, what: str
                   ) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[n] and bool[n], what of it the model is to write; the last token is written."""
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
