"""Texts to token ids and back: one token per character, per byte, or the vocabulary of a GGUF file.

An end token decodes to nothing. Padding is never recognised by its id: in some vocabularies the
pad token and the end token are one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dapo_jax import config

END = 0  # the end token of `characters`


class Tokenizer(Protocol):
    """What the rest of the system knows of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Each of them ends a completion."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a sequence, if there is one."""

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a text; ValueError names a character that has none.

        A text that starts a sequence gets the BOS token if the vocabulary wants one and the text
        does not bring it. `start=False`: the text continues a sequence, so no BOS.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens give nothing, broken UTF-8 gives U+FFFD."""


# ------------------------------------------------------------------------------ characters, bytes


@dataclasses.dataclass(frozen=True)
class Characters:
    """Id 0 is the end, id i > 0 the i-th character of the alphabet."""

    alphabet: str
    stop_ids: tuple[int, ...] = (END,)
    bos_id: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 1

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i + 1 for i, character in enumerate(self.alphabet)}

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        del start
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            at = next(i for i, character in enumerate(text) if character not in self._ids)
            raise ValueError(
                f"character {text[at]!r} at position {at} of {_shorten(text)} is not in the "
                f"alphabet {self.alphabet!r}; add it to config.tokenizer.alphabet") from None

    def decode(self, ids: Sequence[int]) -> str:
        _check_range(ids, self.vocab_size)
        return "".join(self.alphabet[i - 1] for i in ids if i != END)


def characters(alphabet: str) -> Characters:
    """One token per character of `alphabet`, after the end token."""
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice or not alphabet:
        fault = f"holds {twice} more than once" if twice else "is empty"
        raise config.ConfigError(f"config.tokenizer.alphabet {fault}: name each character once")
    return Characters(alphabet)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The 256 bytes of UTF-8, then the end token."""

    vocab_size: int = 257
    stop_ids: tuple[int, ...] = (256,)
    bos_id: int | None = None

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        del start
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        _check_range(ids, self.vocab_size)
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


def byte_level() -> Bytes:
    """One token per byte."""
    return Bytes()


def _check_range(ids: Sequence[int], vocab_size: int) -> None:
    outside = [int(i) for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is not below the vocabulary's {vocab_size}")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


# -------------------------------------------------------------------------------------------- GGUF


@dataclasses.dataclass(frozen=True)
class _Family:
    """What `tokenizer.ggml.pre` names but the file does not hold."""

    split: Callable[[], pre_tokenizers.PreTokenizer]  # text -> pieces that no merge may cross
    whole_words: bool  # a piece that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool  # where the file does not say


def _split_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])


_LLAMA3_PIECE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _split_llama3() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_PIECE), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES = {
    "smollm": _Family(_split_smollm, whole_words=False, adds_bos=False),
    "llama-bpe": _Family(_split_llama3, whole_words=True, adds_bos=True),
}
_SPECIAL = 3  # values of tokenizer.ggml.token_type
_USER_DEFINED = 4
# Instruction-tuned files name one end; the model may give the other one too.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>")


@dataclasses.dataclass(frozen=True)
class Gguf:
    """Byte-level BPE with the vocabulary, merges and special tokens of a GGUF file."""

    engine: tokenizers.Tokenizer
    vocab_size: int
    stop_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        text.encode("utf-8")  # a lone surrogate is a ValueError here, a TypeError in the engine
        ids = self.engine.encode(text, add_special_tokens=False).ids
        # BPE leaves out a byte that has no token, without a word.
        if self.engine.decode(ids, skip_special_tokens=False) != text:
            lost = next((c for c in text if self._text(c) != c), text)
            raise ValueError(
                f"character {lost!r} at position {text.find(lost)} of {_shorten(text)} has no "
                "token in the model's vocabulary; take it out of the text")
        if start and self.adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        _check_range(ids, self.vocab_size)
        return self.engine.decode([int(i) for i in ids], skip_special_tokens=True)

    def _text(self, text: str) -> str:
        ids = self.engine.encode(text, add_special_tokens=False).ids
        return self.engine.decode(ids, skip_special_tokens=False)


def from_gguf(metadata: Mapping[str, Any]) -> Gguf:
    """The tokenizer that a GGUF file's metadata (`tokenizer.ggml.*`) describes.

    Special tokens written out in a text are encoded as themselves. ConfigError: a kind of
    vocabulary that is not supported, or a missing key.
    """
    family = _family(metadata)
    vocabulary = list(_required(metadata, "tokens"))
    special = {t for t, kind in zip(vocabulary, _kinds(metadata, vocabulary)) if kind == _SPECIAL}
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", family.adds_bos))
    if adds_bos and bos_id is None:
        raise config.ConfigError("the GGUF file asks for a BOS token on every sequence "
                                 "(tokenizer.ggml.add_bos_token) but names none (bos_token_id)")
    ends = {int(_required(metadata, "eos_token_id")),
            *(i for i, token in enumerate(vocabulary) if token in _ENDS and token in special)}
    return Gguf(engine=_engine(metadata, family, vocabulary), vocab_size=len(vocabulary),
                stop_ids=tuple(sorted(ends)), bos_id=bos_id, adds_bos=adds_bos)


def _family(metadata: Mapping[str, Any]) -> _Family:
    model, pre = _required(metadata, "model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _FAMILIES:
        raise config.ConfigError(
            f"the GGUF file's vocabulary is of the kind model={model!r}, pre={pre!r}; supported "
            f"are model='gpt2' with pre one of {sorted(_FAMILIES)}")
    return _FAMILIES[pre]


def _engine(metadata: Mapping[str, Any], family: _Family,
            vocabulary: Sequence[str]) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges")],
        ignore_merges=family.whole_words))
    engine.pre_tokenizer = family.split()
    engine.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary, _kinds(metadata, vocabulary)):
        if kind in (_SPECIAL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, special=kind == _SPECIAL, normalized=False)
            add = engine.add_special_tokens if kind == _SPECIAL else engine.add_tokens
            add([added])
    return engine


def _kinds(metadata: Mapping[str, Any], vocabulary: Sequence[str]) -> Sequence[int]:
    kinds = _required(metadata, "token_type")
    if len(kinds) != len(vocabulary):
        raise config.ConfigError(f"the GGUF file has {len(vocabulary)} tokenizer.ggml.tokens but "
                                 f"{len(kinds)} tokenizer.ggml.token_type")
    return kinds


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    name = f"tokenizer.ggml.{key}"
    if name not in metadata:
        raise config.ConfigError(f"the GGUF file has no {name}: it does not hold a tokenizer "
                                 "that can be used")
    return metadata[name]


# --------------------------------------------------------------------------------- configuration


def build(cfg: config.Tokenizer, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The configured tokenizer; `metadata` is that of the model's GGUF file, if there is one."""
    if cfg.kind == "characters":
        return characters(cfg.alphabet)
    if cfg.kind == "bytes":
        return byte_level()
    if metadata is None:
        raise config.ConfigError("config.tokenizer.kind = gguf takes the vocabulary of the model's "
                                 "file, but config.model.source is not gguf")
    return from_gguf(metadata)


def single_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """The one token of each text, for `config.rollout.stop`."""
    result = []
    for text in texts:
        try:
            ids = tokenizer.encode(text, start=False)
        except ValueError as error:
            raise config.ConfigError(f"config.rollout.stop: {error}") from error
        if len(ids) != 1:
            raise config.ConfigError(
                f"config.rollout.stop: {text!r} is {len(ids)} tokens {ids}; a completion can end "
                "only at a text of exactly one token")
        result.append(ids[0])
    return tuple(result)
