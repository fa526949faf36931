"""The bytes that tokens stand for, in the two ways in which vocabularies write them down."""

import functools
import re
from collections.abc import Sequence

SPACE = "\u2581"  # how sentencepiece writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def _letters() -> dict[int, str]:
    """Code point of GPT-2's letter for each byte -> the character whose code is that byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable},
            **{256 + i: chr(byte) for i, byte in enumerate(rest)}}


def letters(token: str) -> bytes:
    """Byte-level vocabularies: one letter a byte; a token with other characters is plain text."""
    if all(ord(letter) in _letters() for letter in token):
        return token.translate(_letters()).encode("latin-1")
    return token.encode("utf-8")


def piece(token: str) -> bytes:
    """Sentencepiece-like vocabularies: a mark for the space, `<0x0A>` for a byte."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode("utf-8")


def complete(spelled: Sequence[bytes]) -> bool:
    """Whether every byte is a token by itself, so that every text has ids."""
    return len({token for token in spelled if len(token) == 1}) == 256
