"""The tokenizer in a GGUF file's metadata: byte-level merges, or sentencepiece's scores."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from dapo_jax import config
from dapo_jax.text import fast, pieces, tokenizer

_SPECIAL = 3  # values of tokenizer.ggml.token_type
_USER_DEFINED = 4
# Instruction-tuned files name one end; the model may give another one too.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
         "<end_of_turn>")


@dataclasses.dataclass(frozen=True)
class _Family:
    """What `tokenizer.ggml.pre` names but the file does not hold."""

    split: Callable[[], pre_tokenizers.PreTokenizer]  # text -> pieces that no merge may cross
    whole_words: bool  # a piece that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool  # where the file does not say
    composed: bool = False  # text is brought to Unicode's form NFC first


def _split_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])


def split_words(*, digits: int) -> pre_tokenizers.PreTokenizer:
    """Words, numbers of up to `digits` digits, and runs of the rest, as Llama 3 and Qwen2 do."""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + number
               + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES = {
    "smollm": _Family(_split_smollm, whole_words=False, adds_bos=False),
    "llama-bpe": _Family(lambda: split_words(digits=3), whole_words=True, adds_bos=True),
    "qwen2": _Family(lambda: split_words(digits=1), whole_words=False, adds_bos=False,
                     composed=True),
}


def from_gguf(metadata: Mapping[str, Any]) -> tokenizer.Tokenizer:
    """The tokenizer that a GGUF file's metadata (`tokenizer.ggml.*`) describes.

    ConfigError: a kind of vocabulary that is not supported, or a missing key.
    """
    if _required(metadata, "model") == "llama":  # as in llama.cpp, text after a special token gets
        return pieces.from_model(                # the leading space, too
            _scored(metadata), where="the GGUF file", space_after_specials=True,
            **_sequence(metadata, adds_bos=True))
    family = _family(metadata)
    return fast.from_engine(_engine(metadata, family), where="the GGUF file",
                            **_sequence(metadata, adds_bos=family.adds_bos))


def files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The same tokenizer as files of a Hugging Face folder: name -> content."""
    if _required(metadata, "model") == "llama":
        sequence = _sequence(metadata, adds_bos=True)
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True,
                    "add_bos_token": sequence["adds_bos"]}
        vocabulary = {"tokenizer.model": _scored(metadata).SerializeToString()}
    else:
        family = _family(metadata)
        sequence = _sequence(metadata, adds_bos=family.adds_bos)
        engine = _engine(metadata, family)
        if sequence["adds_bos"]:
            bos = sequence["specials"]["bos_token"]
            engine.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, sequence["bos_id"])])
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        vocabulary = {"tokenizer.json": engine.to_str(pretty=True).encode("utf-8")}
    template = sequence["chat_template"]
    settings |= sequence["specials"] | ({"chat_template": template} if template else {})
    return vocabulary | {"tokenizer_config.json": json.dumps(
        settings, ensure_ascii=False, indent=2).encode("utf-8")}


def _family(metadata: Mapping[str, Any]) -> _Family:
    model, pre = _required(metadata, "model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _FAMILIES:
        raise config.ConfigError(
            f"the GGUF file's vocabulary is of the kind model={model!r}, pre={pre!r}; supported "
            f"are model='llama', and model='gpt2' with pre one of {sorted(_FAMILIES)}")
    return _FAMILIES[pre]


def _sequence(metadata: Mapping[str, Any], *, adds_bos: bool) -> dict[str, Any]:
    """How sequences begin and end, and the chat template; `adds_bos` where the file is silent."""
    tokens = _required(metadata, "tokens")
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    if adds_bos and bos_id is None:
        raise config.ConfigError("the GGUF file asks for a BOS token on every sequence "
                                 "(tokenizer.ggml.add_bos_token) but names none (bos_token_id)")
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id")
             for name in ("bos", "eos", "unknown", "padding")}
    names = {"unknown": "unk_token", "padding": "pad_token"}
    specials = {names.get(name, f"{name}_token"): tokens[i]
                for name, i in named.items() if i is not None}
    return {"stop_ids": _stop_ids(metadata, tokens), "bos_id": bos_id, "adds_bos": adds_bos,
            "chat_template": metadata.get("tokenizer.chat_template"), "specials": specials}


def _stop_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[int, ...]:
    kinds = _kinds(metadata, tokens)
    ends = {token: i for i, token in enumerate(tokens) if kinds[i] == _SPECIAL and token in _ENDS}
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    return tuple(dict.fromkeys((int(_required(metadata, "eos_token_id")),
                                *(int(i) for i in named if i is not None), *ends.values())))


def _engine(metadata: Mapping[str, Any], family: _Family) -> tokenizers.Tokenizer:
    vocabulary = _required(metadata, "tokens")
    engine = tokenizers.Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[tuple(merge.split(" ", 1)) for merge in _required(metadata, "merges")],
        ignore_merges=family.whole_words))
    if family.composed:
        engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = family.split()
    engine.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary, _kinds(metadata, vocabulary)):
        if kind in (_SPECIAL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, special=kind == _SPECIAL, normalized=False)
            add = engine.add_special_tokens if kind == _SPECIAL else engine.add_tokens
            add([added])
    return engine


def _scored(metadata: Mapping[str, Any]) -> pieces.ModelProto:
    """The model of a sentencepiece vocabulary, put together again from the file's parts."""
    tokens = _required(metadata, "tokens")
    scores = _required(metadata, "scores")
    if len(scores) != len(tokens):
        raise config.ConfigError(f"the GGUF file has {len(tokens)} tokenizer.ggml.tokens but "
                                 f"{len(scores)} tokenizer.ggml.scores")
    return pieces.model(tokens, scores, _kinds(metadata, tokens),
                        leading_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))


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
