"""Tokenizers of the `tokenizers` library, whether read from tokenizer.json or put together."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tokenizers

from dapo_jax import config
from dapo_jax.text import spelling, tokenizer

SPELLED_PIECES = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # decoders


def from_engine(engine: tokenizers.Tokenizer, *, where: str, **more: Any) -> tokenizer.Tokenizer:
    """The tokenizer that `engine` is; `more`: fields that it does not hold.

    `where` names its file in errors. What the engine itself would add at the ends, cut or pad is
    left out. ConfigError: token texts are written in a way that is not known.
    """
    engine.no_truncation()
    engine.no_padding()
    described = json.loads(engine.to_str())
    written = _spelled(engine, described, where=where)
    special = {i for i, token in engine.get_added_tokens_decoder().items() if token.special}
    shown = tuple(b"" if i in special else text for i, text in enumerate(written))
    encoder = _encoder(engine, _continuing(engine, described))
    if not spelling.complete(shown):
        encoder = _checked(encoder, written)
    return tokenizer.Tokenizer(encoder, shown, leading_space=_strips(described), **more)


def _encoder(engine: tokenizers.Tokenizer, continuing: tokenizers.Tokenizer
             ) -> Callable[[str, bool], list[int]]:
    def encode(text: str, start: bool) -> list[int]:
        return (engine if start else continuing).encode(text, add_special_tokens=False).ids
    return encode


def _checked(encoder: Callable[[str, bool], list[int]], written: list[bytes]
             ) -> Callable[[str, bool], list[int]]:
    """An encoder that refuses what the library would leave out, or call unknown, without a word."""
    def spelled(text: str, start: bool = False) -> bytes:
        return b"".join(written[i] for i in encoder(text, start))

    def encode(text: str, start: bool) -> list[int]:
        ids = encoder(text, start)
        if b"".join(written[i] for i in ids) != text.encode("utf-8"):
            for at, character in enumerate(text):
                if _lost(character, spelled(character)):
                    raise tokenizer.no_token(text, at, "has no token in the model's vocabulary; "
                                             "take it out of the text")
        return ids
    return encode


def _lost(character: str, spelled: bytes) -> bool:
    """Whether nothing or not all of a character is left; another form of it is no loss."""
    text = spelled.decode("utf-8", errors="replace")
    return not text or ("\ufffd" in text and character != "\ufffd")


# ------------------------------------------------------------------------------ how text is written


def _spelled(engine: tokenizers.Tokenizer, described: Mapping[str, Any], *,
             where: str) -> list[bytes]:
    """The bytes of every id, special tokens written out; U+FFFD for ids that are not used."""
    vocabulary = engine.get_vocab(with_added_tokens=True)
    spell = _spelling(described, where=where)
    result = [tokenizer.NO_TEXT] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        result[i] = spell(token)
    unknown = described["model"].get("unk_token")
    if unknown in vocabulary:
        result[vocabulary[unknown]] = tokenizer.NO_TEXT
    for i, added in engine.get_added_tokens_decoder().items():
        if added.content != unknown:
            result[i] = added.content.encode("utf-8")
    return result


def _spelling(described: Mapping[str, Any], *, where: str) -> Callable[[str], bytes]:
    kinds = {part["type"]: part for part in _parts(described["decoder"])}
    if "ByteLevel" in kinds:
        return spelling.letters
    if not kinds or not kinds.keys() <= SPELLED_PIECES:
        raise config.ConfigError(
            f"{where}: its decoder is made of {sorted(kinds) or 'nothing'}; supported are "
            f"ByteLevel, or {', '.join(sorted(SPELLED_PIECES))}")
    bytes_too = "ByteFallback" in kinds
    return lambda token: spelling.piece(token) if bytes_too else token.replace(
        spelling.SPACE, " ").encode("utf-8")


def _strips(described: Mapping[str, Any]) -> bool:
    """Whether the decoder takes a leading space away, since the encoder puts one there."""
    return any(part.get("start", 0) > 0 if part["type"] == "Strip"
               else part.get("prepend_scheme", "never") != "never"
               for part in _parts(described["decoder"]))


def _parts(described: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component, or the components of a sequence of them."""
    if described is None:
        return
    if described["type"] != "Sequence":
        yield described
        return
    for inner in described.get("decoders") or described.get("pretokenizers") or described.get(
            "normalizers") or ():
        yield from _parts(inner)


# --------------------------------------------------------------------------------- continuing text


def _continuing(engine: tokenizers.Tokenizer, described: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same tokenizer without the space that it puts before a text; itself if it puts none."""
    changed = False
    for part in _parts(described["normalizer"]):
        if part["type"] == "Prepend":
            part["prepend"], changed = "", True
    for part in _parts(described["pre_tokenizer"]):
        if part["type"] == "Metaspace" and part["prepend_scheme"] != "never":
            part["prepend_scheme"], changed = "never", True
        if part["type"] == "ByteLevel" and part["add_prefix_space"]:
            part["add_prefix_space"], changed = False, True
    return tokenizers.Tokenizer.from_str(json.dumps(described)) if changed else engine
