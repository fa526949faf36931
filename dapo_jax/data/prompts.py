"""Records to a table of tokenised prompts: each text is encoded once, here."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dapo_jax import config, types


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of a text; `start`: it begins a sequence, which may call for a first token."""


def table(records: Sequence[Mapping[str, Any]], tokenizer: Encoder, limits: config.PromptLimits, *,
          stop_id: int | None) -> tuple[types.PromptTable, dict[str, int]]:
    """The table of all usable records in their order, and counts of the others.

    Counts: "duplicates" (same prompt and answer as an earlier record) and "too_long" (over the
    last bucket, with `limits.too_long` "drop"), both left out. Demonstrations get `stop_id` at
    their end if it is not there. ConfigError names the first record that cannot be used.
    """
    counts = {"duplicates": 0, "too_long": 0}
    seen: set[tuple[str, str]] = set()
    kept: list[tuple[Mapping[str, Any], np.ndarray, int]] = []
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
    return types.PromptTable(tokens=tuple(tokens for _, tokens, _ in kept),
                             records=tuple(record for record, _, _ in kept),
                             demonstrations=_demonstrations(kept, tokenizer, stop_id)), counts


def _encode(tokenizer: Encoder, text: str, what: str, *, start: bool = True) -> np.ndarray:
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


def _demonstrations(kept: list, tokenizer: Encoder, stop_id: int | None) -> tuple[np.ndarray, ...]:
    """Encoded demonstrations of the kept records, all or none of which have one."""
    lacking = [index for record, _, index in kept if record.get("demonstration") is None]
    if len(lacking) == len(kept):
        return ()
    if lacking:
        raise config.ConfigError(f"record {lacking[0]} has no demonstration, but others have: give "
                                 "all of them one, or none")
    return tuple(_stopped(_encode(tokenizer, record["demonstration"],
                                  f"demonstration of record {index}", start=False), stop_id)
                 for record, _, index in kept)


def _stopped(tokens: np.ndarray, stop_id: int | None) -> np.ndarray:
    if stop_id is None or tokens[-1] == stop_id:
        return tokens
    return np.append(tokens, np.int32(stop_id))


def _start(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
