"""What every tokenizer is: texts to ids, ids to bytes, and how sequences begin and end.

The bytes of each token are known beforehand, so decoding is joining them: it neither loses nor
invents text, and grows by appending when tokens are appended. Padding is never recognised by its
id: in some vocabularies the pad token and the end token are one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from dapo_jax import config

NO_TEXT = "\ufffd".encode()  # of ids that exist but stand for no known text


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, its encoder, and what its files say of special tokens and chats."""

    encoder: Callable[[str, bool], list[int]]  # text, whether it starts a sequence; adds no BOS
    spelled: Sequence[bytes]  # UTF-8 of each id; nothing for special tokens
    stop_ids: tuple[int, ...]  # each ends a completion; the first is written after demonstrations
    bos_id: int | None = None
    adds_bos: bool = False
    leading_space: bool = False  # the encoder begins a sequence with a space of its own
    chat_template: str | None = None
    specials: Mapping[str, str] = dataclasses.field(default_factory=dict)  # "bos_token" -> text

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self.spelled)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a text; ValueError names a character that has none.

        A text that starts a sequence begins with exactly one BOS token if the vocabulary wants
        one, whether or not the text brings it. `start=False`: the text continues a sequence, so
        no BOS and no leading space. Special tokens written out are encoded as themselves.
        """
        text.encode("utf-8")  # a lone surrogate is a ValueError here, anything in an encoder
        ids = self.encoder(text, start)
        if not (start and self.adds_bos):
            return ids
        own = next((at for at, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [cast(int, self.bos_id), *ids[own:]]

    def decode(self, ids: Sequence[int], *, start: bool = False) -> str:
        """The text of ids; special tokens give nothing, incomplete UTF-8 gives U+FFFD.

        `start`: the ids begin a sequence, so that the encoder's own leading space is left out.
        """
        check_range(ids, self.vocab_size)
        text = b"".join(self.spelled[i] for i in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if start and self.leading_space else text


def padded(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    """The tokenizer of a model with `vocab` rows: ids past the vocabulary decode to U+FFFD each."""
    more = (NO_TEXT,) * (vocab - tokenizer.vocab_size)
    return dataclasses.replace(tokenizer, spelled=(*tokenizer.spelled, *more))


def stops(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """`config.rollout.stop` as (ids of the texts that are one token, texts to look for).

    A text of one token is looked for as well: other tokens may hold or spell it. Only a special
    token is not, as it has no text. ConfigError: a text that cannot be encoded, or of several
    tokens that no completion decodes to.
    """
    ids, strings = [], []
    for text in texts:
        try:
            tokens = tokenizer.encode(text, start=False)
        except ValueError as error:
            raise config.ConfigError(f"config.rollout.stop: {error}") from error
        seen = bool(text) and "\ufffd" not in text and tokenizer.decode(tokens) == text
        if not seen and len(tokens) != 1:
            raise config.ConfigError(
                f"config.rollout.stop: {text!r} is {len(tokens)} tokens, whose text is "
                f"{tokenizer.decode(tokens)!r}: no completion can be seen to contain it. Name a "
                "special token alone, or plain text")
        ids += tokens if len(tokens) == 1 else []
        strings += [text] if seen else []
    return tuple(ids), tuple(strings)


def check_range(ids: Sequence[int], vocab_size: int) -> None:
    """ValueError for an id outside the vocabulary."""
    outside = [int(i) for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is not below the vocabulary's {vocab_size}")


def no_token(text: str, at: int, advice: str) -> ValueError:
    """The error for the character of `text` at index `at`, which has no token."""
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    return ValueError(f"character {text[at]!r} at position {at} of {shown} {advice}")
