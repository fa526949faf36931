"""Tokenizers without a file: one token per character of an alphabet, or per byte."""

from dapo_jax import config
from dapo_jax.text import tokenizer

END = 0  # the end token of `characters`


def characters(alphabet: str) -> tokenizer.Tokenizer:
    """One token per character of `alphabet`, after the end token: id i > 0 is the i-th."""
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice or not alphabet:
        fault = f"holds {twice} more than once" if twice else "is empty"
        raise config.ConfigError(f"config.tokenizer.alphabet {fault}: name each character once")
    ids = {character: i + 1 for i, character in enumerate(alphabet)}

    def encode(text: str, start: bool) -> list[int]:
        del start
        try:
            return [ids[character] for character in text]
        except KeyError:
            at = next(i for i, character in enumerate(text) if character not in ids)
            raise tokenizer.no_token(
                text, at, f"is not in the alphabet {alphabet!r}; add it to "
                "config.tokenizer.alphabet") from None

    return tokenizer.Tokenizer(encode, (b"", *(c.encode() for c in alphabet)), stop_ids=(END,))


def byte_level() -> tokenizer.Tokenizer:
    """The 256 bytes of UTF-8, then the end token."""
    def encode(text: str, start: bool) -> list[int]:
        del start
        return list(text.encode("utf-8"))

    return tokenizer.Tokenizer(encode, (*(bytes([b]) for b in range(256)), b""), stop_ids=(256,))
