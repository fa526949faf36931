"""A reward that depends on nothing but the completion's letters: for timing an untrained model."""

import zlib
from collections.abc import Mapping
from typing import Any


def score(text: str, record: Mapping[str, Any]) -> float:
    """0 or 1, about as often each, and equal for equal texts."""
    del record
    return float(zlib.crc32(text.encode("utf-8", "surrogatepass")) % 2)
