"""What makes two rows the same: digests of their content, for any order and any file."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

KEY = "prompt_key"  # of a record: the key of its prompt as it stands in the data


def prompt_text(prompt: str | list[Mapping[str, Any]]) -> str:
    """The prompt as one text; messages as JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def digest(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.blake2b(text.encode()).digest()[:16]


def prompt_key(record: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that name the record's prompt, whatever template it is put in.

    A record that was loaded carries its key; else it is made from the prompt as it is.
    """
    return record.get(KEY) or digest(prompt_text(record["prompt"])).hex()


def keyed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its key, before a template or chat changes the prompt."""
    return {**record, KEY: digest(prompt_text(record["prompt"])).hex()}


def numbers(digests: list[bytes]) -> np.ndarray:
    """u64[n, 2] of digests of 16 bytes; rows sort as the bytes do."""
    whole = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    return whole.astype(np.uint64)


def first_of_each(numbers: np.ndarray) -> np.ndarray:
    """Ascending positions at which a row of u64[n, 2] stands for the first time."""
    order = np.lexsort((numbers[:, 1], numbers[:, 0]))  # stable: equal rows stay in their order
    ranked = numbers[order]
    new = np.ones(len(order), bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    return np.sort(order[new])
