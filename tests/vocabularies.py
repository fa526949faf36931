"""Small vocabularies and awkward texts that the tests of tokenizers share."""

import functools
import io
import json

import hypothesis
import pytest
from hypothesis import strategies as st

# Cases in which pieces, merges and special tokens meet.
TRICKY = (
    "", " ", "\n", "\n\n\n", "\t\tx", "Hello world", " leading", "trailing ", "two  spaces",
    "it's, they'll, I'D", "12+35=47", "3.14159", "x = 10 ;", "naïve café", "日本語テキスト",
    "🎉👩\u200d👩\u200d👧", "def f(a):\n    return a\n", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end", "a\r\nb", "…—“q”", "مرحبا", "\u200b\u00a0", "e\u0301", "\x00\x07", "\U0010ffff",
)
WORDS = ["Hello world, this is a small test of words and pieces.", "two  spaces   three",
         "it's they'll 12+35=47 x = 10 ;", "naïve café 日本語", "def f(a):\n    return a\n"]


def texts(count):
    """A test of `count` random texts, in which words of the vocabularies occur too."""
    words = st.sampled_from([word for line in WORDS for word in line.split(" ")] + [" ", "  "])
    whole = st.text(max_size=40) | st.lists(words | st.text(max_size=3), max_size=8).map("".join)

    def test(check):
        hypothesis.settings(max_examples=count, deadline=None, database=None, derandomize=True,
                            suppress_health_check=list(hypothesis.HealthCheck))(
            hypothesis.given(whole)(check))()
        for text in TRICKY:
            check(text)
    return test


COUNTS = [300, pytest.param(10_000, marks=pytest.mark.slow)]


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where printable, else 256, 257, ... in turn."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    fresh = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(fresh)) for b in range(256)]


def metadata(pre: str = "smollm", **changes) -> dict:
    """Of a GGUF file: three special tokens, all bytes, and words; of them only `he` and `12` have
    merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters(), "he", "xyz", "12"]
    result = {"model": "gpt2", "pre": pre, "tokens": tokens,
              "token_type": [3, 3, 3] + [1] * (len(tokens) - 3), "merges": ["h e", "1 2"],
              "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2}
    result.update(changes)
    return {f"tokenizer.ggml.{k}": v for k, v in result.items() if v is not None}


@functools.cache
def sentencepiece_model(**changes) -> bytes:
    """A trained model: <unk> <s> </s>, <|im_end|> (control), <|think|> (user-defined), bytes."""
    import sentencepiece

    settings = {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98,
                "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                "user_defined_symbols": ["<|think|>"], "control_symbols": ["<|im_end|>"]} | changes
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20), model_writer=model, vocab_size=380,
        hard_vocab_limit=False, minloglevel=2, **settings)
    return model.getvalue()


def json_tokenizer(kind: str):
    """A trained tokenizer of the `tokenizers` library with <s>, </s> and the chat's tokens.

    kind: "bytes" (byte-level, as Llama 3), "composed" (the same after NFC, as Qwen2), "prepend"
    (byte fallback with a space put before, as Llama 2), "metaspace" (that space before the start
    only), "replaced" (byte fallback without it, as Gemma).
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    if kind in ("bytes", "composed"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.normalizer = normalizers.NFC() if kind == "composed" else None
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True,
                                               fuse_unk=True))
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = ["▁"]
        strip = [] if kind == "replaced" else [decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        replace = normalizers.Replace(" ", "▁")
        if kind == "prepend":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        elif kind == "replaced":
            made.normalizer = replace
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    made.train_from_iterator(WORDS, trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    if kind in ("bytes", "composed"):
        return made
    # Bytes are no special tokens: they are in the vocabulary alone.
    described = json.loads(made.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"]
                                 if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def folder(path, kind: str = "bytes", *, adds_bos=None, **settings):
    """A Hugging Face folder with a tokenizer; `settings` go to tokenizer_config.json."""
    if kind == "sentencepiece":
        (path / "tokenizer.model").write_bytes(sentencepiece_model())
    else:
        made = json_tokenizer(kind)
        if adds_bos:
            from tokenizers import processors
            made.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
        made.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
