"""Sentencepiece models: byte fallback, leading spaces, and special tokens written out in text."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sentencepiece
from google.protobuf import message
from sentencepiece import sentencepiece_model_pb2

from dapo_jax import config
from dapo_jax.text import spelling, tokenizer

proto: Any = sentencepiece_model_pb2  # its classes are made at import
ModelProto = Any
_PIECE = proto.ModelProto.SentencePiece


def read(path: str) -> ModelProto:
    """The model in a `.model` file; ConfigError if there is none in it."""
    try:
        with open(path, "rb") as file:
            found = proto.ModelProto.FromString(file.read())
    except OSError as error:
        raise config.ConfigError(f"cannot read the tokenizer {path!r}: {error.strerror}") from error
    except message.DecodeError as error:
        raise config.ConfigError(f"{path} is no sentencepiece model: {error}") from error
    if not found.pieces:
        raise config.ConfigError(f"{path} is no sentencepiece model: it holds no pieces")
    return found


def model(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *,
          leading_space: bool) -> ModelProto:
    """A model of merges by score from its vocabulary; `kinds` are sentencepiece's own numbers."""
    result = proto.ModelProto(pieces=[
        _PIECE(piece=token, score=float(score), type=int(kind))
        for token, score, kind in zip(tokens, scores, kinds)])
    result.trainer_spec.model_type = proto.TrainerSpec.BPE
    result.trainer_spec.byte_fallback = any(p.type == _PIECE.BYTE for p in result.pieces)
    for piece in result.pieces:
        if piece.type == _PIECE.UNKNOWN:
            result.trainer_spec.unk_piece = piece.piece
    result.normalizer_spec.name = "identity"
    result.normalizer_spec.add_dummy_prefix = leading_space
    result.normalizer_spec.remove_extra_whitespaces = False
    result.normalizer_spec.escape_whitespaces = True
    return result


def from_model(
    model: ModelProto, *, where: str, added: Mapping[str, tuple[int, bool]] | None = None,
    space_after_specials: bool = False, **more: Any,
) -> tokenizer.Tokenizer:
    """The tokenizer of a sentencepiece model.

    `added`: tokens beside the model, text -> (id, whether special). `space_after_specials`: the
    leading space comes before every stretch of text between special tokens, not only before a
    text that starts the sequence. `more`: fields of the tokenizer that the model does not hold;
    BOS and end are the model's own where they are left out. ConfigError names `where`.
    """
    added = dict(added or {})
    control = {piece.piece: i for i, piece in enumerate(model.pieces)
               if piece.type == _PIECE.CONTROL}
    special = control | {text: i for text, (i, _) in added.items()}
    encoder = _encoder(model, special, where=where, space_after_specials=space_after_specials)
    defaults = _ends(control, model, where=where) if "stop_ids" not in more else {}
    return tokenizer.Tokenizer(encoder, _spelled(model, added),
                               leading_space=model.normalizer_spec.add_dummy_prefix,
                               **(defaults | more))


def _ends(control: Mapping[str, int], model: ModelProto, *, where: str) -> dict[str, Any]:
    """BOS and end as the model's trainer was told."""
    bos, end = model.trainer_spec.bos_piece, model.trainer_spec.eos_piece
    if end not in control:
        raise config.ConfigError(f"{where} has no end token {end!r}: it cannot end a completion")
    specials = {"bos_token": bos} if bos in control else {}
    return {"stop_ids": (control[end],), "bos_id": control.get(bos), "adds_bos": bos in control,
            "specials": {**specials, "eos_token": end}}


def _spelled(model: ModelProto, added: Mapping[str, tuple[int, bool]]) -> tuple[bytes, ...]:
    size = max([len(model.pieces), *(i + 1 for i, _ in added.values())])
    result = [tokenizer.NO_TEXT] * size
    for i, piece in enumerate(model.pieces):
        if piece.type == _PIECE.CONTROL:
            result[i] = b""
        elif piece.type == _PIECE.BYTE:
            result[i] = spelling.piece(piece.piece)
        elif piece.type != _PIECE.UNKNOWN:
            result[i] = piece.piece.replace(spelling.SPACE, " ").encode("utf-8")
    for text, (i, special) in added.items():
        result[i] = b"" if special else text.encode("utf-8")
    return tuple(result)


def _encoder(
    model: ModelProto, special: Mapping[str, int], *, where: str, space_after_specials: bool
) -> Callable[[str, bool], list[int]]:
    first = _processor(model, where)
    later = first
    if model.normalizer_spec.add_dummy_prefix:
        bare = proto.ModelProto()
        bare.CopyFrom(model)
        bare.normalizer_spec.add_dummy_prefix = False
        later = _processor(bare, where)
    between = later if not space_after_specials else first
    longest_first = sorted(special, key=len, reverse=True)
    split = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if special else "(?!)")

    def encode(text: str, start: bool) -> list[int]:
        stretches = split.split(text)
        processors = itertools.chain([first if start else later], itertools.repeat(between))
        ids: list[int] = []
        # Splitting at a group gives stretches of text and special tokens in turn.
        for at, (part, processor) in enumerate(zip(stretches[::2], processors)):
            ids += processor.encode(part)
            ids += [special[token] for token in stretches[2 * at + 1:2 * at + 2]]
        if first.unk_id() in ids:
            _refuse_unknown(text, later)
        return ids

    return encode


def _processor(model: ModelProto, where: str) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    except (RuntimeError, ValueError) as error:
        raise config.ConfigError(f"{where} is no working sentencepiece model: {error}") from error


def _refuse_unknown(text: str, processor: sentencepiece.SentencePieceProcessor) -> None:
    for at, character in enumerate(text):
        if processor.unk_id() in processor.encode(character):
            raise tokenizer.no_token(text, at, "has no token in the sentencepiece model; take it "
                                     "out of the text")
