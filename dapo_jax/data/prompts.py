"""Records to a table of tokenised prompts: each text is encoded once, here."""

from collections.abc import Sequence

import numpy as np

from dapo_jax import config, types
from dapo_jax.data import encoding
from dapo_jax.text import chat as chats
from dapo_jax.text import tokenizer as tokenizers

Record = encoding.Record
SEGMENTS = encoding.SEGMENTS


def in_chat(records: Sequence[Record], chat: chats.Chat | None, *, wrap: bool,
            names: Sequence[str] = ()) -> list[Record]:
    """The records with their prompts as the chat template writes them; see encoding.in_chat.

    ConfigError names the first record that cannot be rendered, by its place in `names` if given.
    """
    writing = encoding.Writing("", chat, wrap, config.PromptLimits(), None)
    return [encoding.in_chat(record, writing, _name(names, index))
            for index, record in enumerate(records)]


def table(records: Sequence[Record], tokenizer: tokenizers.Tokenizer, limits: config.PromptLimits,
          *, stop_id: int | None, names: Sequence[str] = ()
          ) -> tuple[types.PromptTable, dict[str, int]]:
    """The table of all usable records in their order, and counts of the others.

    Counts: "duplicates" (same prompt and answer as an earlier record) and "too_long" (over the
    last bucket, with `limits.too_long` "drop"), both left out. Demonstrations get `stop_id` at
    their end if it is not there. ConfigError names the first record that cannot be used.
    """
    counts = {"duplicates": 0, "too_long": 0}
    seen: set[tuple[str, str]] = set()
    kept: list[tuple[Record, np.ndarray, str]] = []
    for index, record in enumerate(records):
        identity = (record["prompt"], record["answer"])
        if identity in seen:
            counts["duplicates"] += 1
            continue
        seen.add(identity)
        what = _name(names, index)
        tokens = encoding.prompt_tokens(record, tokenizer, what)
        if encoding.fits(tokens, record, limits, what):
            kept.append((record, tokens, what))
        else:
            counts["too_long"] += 1
    if not kept:
        raise config.ConfigError(f"no prompt is left of {len(records)} records: {counts}")
    demonstrations, masks = _demonstrations(kept, tokenizer, stop_id)
    return types.PromptTable(tokens=tuple(tokens for _, tokens, _ in kept),
                             records=tuple(record for record, _, _ in kept),
                             demonstrations=demonstrations, demonstration_masks=masks), counts


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if names else f"record {index}"


def _demonstrations(kept: list[tuple[Record, np.ndarray, str]], tokenizer: tokenizers.Tokenizer,
                    stop_id: int | None
                    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Demonstrations of the kept records, all or none of which have one, and their masks."""
    lacking = [what for record, _, what in kept if record.get("demonstration") is None]
    if len(lacking) == len(kept):
        return (), ()
    if lacking:
        raise lacks_demonstration(lacking[0])
    made = [encoding.demonstration(record, tokenizer, stop_id, what) for record, _, what in kept]
    return tuple(tokens for tokens, _ in made), tuple(mask for _, mask in made)


def lacks_demonstration(what: str) -> config.ConfigError:
    """The error for a record without the demonstration that others have."""
    return config.ConfigError(f"{what} has no demonstration, but others have: give all of them "
                              "one, or none")
