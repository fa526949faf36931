import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.text import tokenizer

DEFAULT_ALPHABET = config.Tokenizer().alphabet
# Cases in which pieces, merges and special tokens meet.
TRICKY = (
    "", " ", "\n", "\n\n\n", "\t\tx", "Hello world", " leading", "trailing ", "two  spaces",
    "it's, they'll, I'D", "12+35=47", "3.14159", "x = 10 ;", "naïve café", "日本語テキスト",
    "🎉👩\u200d👩\u200d👧", "def f(a):\n    return a\n", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end", "a\r\nb", "…—“q”", "مرحبا", "\u200b\u00a0",
)


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where printable, else 256, 257, ... in turn."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    fresh = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(fresh)) for b in range(256)]


def metadata(pre: str = "smollm", **changes) -> dict:
    """A vocabulary of three special tokens, all bytes, and words; of them only `he` has a merge."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters(), "he", "xyz", "12"]
    result = {"model": "gpt2", "pre": pre, "tokens": tokens,
              "token_type": [3, 3, 3] + [1] * (len(tokens) - 3), "merges": ["h e", "1 2"],
              "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2}
    result.update(changes)
    return {f"tokenizer.ggml.{k}": v for k, v in result.items() if v is not None}


# ------------------------------------------------------------------------------------- properties


@hypothesis.given(st.text(st.sampled_from(DEFAULT_ALPHABET)))
def test_characters_come_back_as_they_were(text):
    kind = tokenizer.characters(DEFAULT_ALPHABET)
    ids = kind.encode(text)
    assert kind.decode(ids) == text
    assert len(ids) == len(text)


@hypothesis.given(st.text())
def test_bytes_come_back_as_they_were(text):
    kind = tokenizer.byte_level()
    ids = kind.encode(text)
    assert kind.decode(ids) == text
    assert len(ids) == len(text.encode())


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_bpe_over_all_bytes_comes_back_as_it_was(pre):
    kind = tokenizer.from_gguf(metadata(pre))

    @hypothesis.given(st.text())
    def check(text):
        assert kind.decode(kind.encode(text)) == text

    check()


def test_a_real_vocabulary_gives_the_text_back_or_says_that_it_cannot(smollm2):
    kind = tokenizer.from_gguf(smollm2.metadata)

    @hypothesis.given(st.text(max_size=20))
    def check(text):
        try:
            ids = kind.encode(text)
        except ValueError:
            # The vocabulary lacks some control characters and the bytes of unused planes.
            assert any(ord(c) < 0x20 or ord(c) >= 0x40000 for c in text)
        else:
            assert kind.decode(ids) == text

    check()
    for text in TRICKY:
        assert kind.decode(kind.encode(text)) == text.replace("<|im_start|>", "").replace(
            "<|im_end|>", "")


# ---------------------------------------------------------------------------------- known answers


def test_ids_of_characters_count_from_the_end_token():
    kind = tokenizer.characters("ba\n")
    assert kind.encode("ab\n") == [2, 1, 3]
    assert (kind.vocab_size, kind.stop_ids, kind.bos_id) == (4, (0,), None)
    assert kind.decode(np.array([2, 0, 1, 0, 0])) == "ab"


def test_byte_ids_are_the_bytes():
    kind = tokenizer.byte_level()
    assert kind.encode("é!") == [0xC3, 0xA9, 0x21]
    assert (kind.vocab_size, kind.stop_ids) == (257, (256,))
    assert kind.decode([0xC3, 0x21, 255, 256]) == "\ufffd!\ufffd"


def test_a_character_outside_the_alphabet_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"'x' at position 3"):
        tokenizer.characters("0123456789").encode("123x5y")


@pytest.mark.parametrize("kind", [tokenizer.characters("ab"), tokenizer.byte_level(),
                                  tokenizer.from_gguf(metadata())])
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_an_id_outside_the_vocabulary_is_not_decoded(kind, bad):
    with pytest.raises(ValueError, match=str(bad)):
        kind.decode([1, bad])


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_an_alphabet_that_is_empty_or_repeats_is_refused(alphabet):
    with pytest.raises(config.ConfigError, match="alphabet"):
        tokenizer.characters(alphabet)


def test_a_byte_without_a_token_is_an_error_and_not_lost():
    lacking = metadata()
    at = lacking["tokenizer.ggml.tokens"].index(byte_letters()[4])
    lacking["tokenizer.ggml.tokens"][at] = "unused"
    with pytest.raises(ValueError, match=r"'\\x04' at position 2"):
        tokenizer.from_gguf(lacking).encode("ab\x04c")


def test_a_lone_surrogate_is_a_value_error():
    for kind in (tokenizer.byte_level(), tokenizer.from_gguf(metadata())):
        with pytest.raises(ValueError, match="surrogate"):
            kind.encode("a\ud800")


# -------------------------------------------------------------------------------- special tokens


def test_written_special_tokens_are_one_id_and_decode_to_nothing():
    kind = tokenizer.from_gguf(metadata())
    ids = kind.encode("<|im_start|>he<|im_end|>")
    assert ids == [1, 3 + 256, 2]
    assert kind.decode(ids) == "he"


def test_every_end_is_a_stop_even_where_it_is_also_the_padding():
    kind = tokenizer.from_gguf(metadata(padding_token_id=2))
    assert kind.stop_ids == (0, 2)
    assert len(kind.encode("<|im_end|>a<|im_end|>")) == 3


def test_the_word_of_an_end_that_is_no_special_token_does_not_stop():
    plain = metadata(token_type=[1, 3, 3] + [1] * 259)
    assert tokenizer.from_gguf(plain).stop_ids == (2,)


@pytest.mark.parametrize(("pre", "asked", "added"), [
    ("smollm", None, False), ("smollm", True, True), ("smollm", False, False),
    ("llama-bpe", None, True), ("llama-bpe", False, False)])
def test_one_bos_where_the_file_asks_for_it_and_none_elsewhere(pre, asked, added):
    kind = tokenizer.from_gguf(metadata(pre, add_bos_token=asked))
    plain = [3 + ord("a")]
    assert kind.encode("a") == [1] * added + plain
    assert kind.encode("<|im_start|>a") == [1, *plain]  # a template that brings its own
    assert kind.encode("a", start=False) == plain
    assert kind.encode("") == [1] * added


# ------------------------------------------------------------------- pieces that merges don't cross


def test_digits_are_single_tokens_in_smollm_and_threes_in_llama3():
    joined, one, two = 3 + 258, 3 + ord("1"), 3 + ord("2")
    assert tokenizer.from_gguf(metadata("smollm")).encode("12") == [one, two]
    assert tokenizer.from_gguf(metadata("llama-bpe")).encode("12", start=False) == [joined]
    assert tokenizer.from_gguf(metadata("llama-bpe")).encode("1212", start=False) == [
        joined, one, two]


def test_a_whole_piece_of_the_vocabulary_needs_no_merges_in_llama3_only():
    spelled = [3 + ord(c) for c in "xyz"]
    assert tokenizer.from_gguf(metadata("smollm")).encode("xyz") == spelled
    assert tokenizer.from_gguf(metadata("llama-bpe")).encode("xyz", start=False) == [3 + 257]


def test_ids_equal_those_of_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")  # its GGUF reader wants it
    theirs = transformers.AutoTokenizer.from_pretrained(
        str(smollm2.path.parent), gguf_file=smollm2.path.name)
    ours = tokenizer.from_gguf(smollm2.metadata)
    assert {text: ours.encode(text) for text in TRICKY} == {
        text: theirs(text)["input_ids"] for text in TRICKY}


def test_llama3_pieces_equal_those_of_transformers():
    converters = pytest.importorskip("transformers.convert_slow_tokenizer")
    from tokenizers import Regex, pre_tokenizers

    theirs = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(converters.TikTokenConverter().pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = tokenizer.from_gguf(metadata("llama-bpe")).engine.pre_tokenizer
    for text in (*TRICKY, "1234567 8", "a.b\n\n c", "x\n \n  y"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_no_smollm_token_holds_a_digit_and_its_neighbour(smollm2):
    # Digits are split off before words are, so that "  " ends a piece. transformers leaves that
    # step out when it reads a GGUF file, so it is no oracle here.
    kind = tokenizer.from_gguf(smollm2.metadata)
    for pieces in (("a", "  ", "5"), (" ", "½", " ", "²"), ("x", "1", "2", "ab")):
        assert kind.encode("".join(pieces)) == [i for piece in pieces for i in kind.encode(piece)]
    assert len(kind.encode("  ")) == 1


# ----------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(("changes", "named"), [
    ({"pre": "gpt-4o"}, "'gpt-4o'.*llama-bpe.*smollm"), ({"model": "llama"}, "model='llama'"),
    ({"merges": None}, "tokenizer.ggml.merges"), ({"eos_token_id": None}, "eos_token_id"),
    ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id"),
    ({"token_type": [1]}, "token_type")])
def test_an_unusable_vocabulary_is_refused_by_name(changes, named):
    with pytest.raises(config.ConfigError, match=named):
        tokenizer.from_gguf(metadata(**changes))


def test_the_configuration_chooses_the_kind():
    assert tokenizer.build(config.Tokenizer(alphabet="xy")).vocab_size == 3
    assert tokenizer.build(config.Tokenizer(kind="bytes")).vocab_size == 257
    assert tokenizer.build(config.Tokenizer(kind="gguf"), metadata()).vocab_size == 262
    with pytest.raises(config.ConfigError, match="model.source"):
        tokenizer.build(config.Tokenizer(kind="gguf"))


def test_stop_texts_are_single_tokens_without_bos():
    kind = tokenizer.from_gguf(metadata(add_bos_token=True))
    assert tokenizer.single_ids(kind, ("\n", "<|im_end|>")) == (3 + ord("\n"), 2)
    with pytest.raises(config.ConfigError, match=r"'END' is 3 tokens \[72, 81, 71\]"):
        tokenizer.single_ids(kind, ("\n", "END"))
    with pytest.raises(config.ConfigError, match="rollout.stop.*'#'"):
        tokenizer.single_ids(tokenizer.characters("01"), ("#",))
