import contextlib
import json

import pytest
import vocabularies
from vocabularies import TRICKY, byte_letters, metadata

from dapo_jax import config
from dapo_jax.text import folder, gguf_vocabulary, pieces

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def without(text, special):
    """The text without its special tokens."""
    for token in special:
        text = text.replace(token, "")
    return text


# ------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("count", vocabularies.COUNTS)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_bpe_over_all_bytes_comes_back_as_it_was(pre, count):
    kind = gguf_vocabulary.from_gguf(metadata(pre))

    def check(text):
        assert kind.decode(kind.encode(text)) == without(text, SPECIAL)

    vocabularies.texts(count)(check)


@pytest.mark.parametrize("count", vocabularies.COUNTS)
def test_a_real_vocabulary_gives_the_text_back_or_says_that_it_cannot(smollm2, count):
    kind = gguf_vocabulary.from_gguf(smollm2.metadata)
    special = [smollm2.metadata["tokenizer.ggml.tokens"][i] for i in range(kind.vocab_size)
               if not kind.spelled[i]]

    def check(text):
        try:
            ids = kind.encode(text)
        except ValueError:
            # The vocabulary lacks some control characters and the bytes of unused planes.
            assert any(ord(c) < 0x20 or ord(c) >= 0x40000 for c in text)
        else:
            assert kind.decode(ids) == without(text, special)

    vocabularies.texts(count)(check)


def test_a_byte_without_a_token_is_an_error_and_not_lost():
    lacking = metadata()
    at = lacking["tokenizer.ggml.tokens"].index(byte_letters()[4])
    lacking["tokenizer.ggml.tokens"][at] = "unused"
    with pytest.raises(ValueError, match=r"'\\x04' at position 2"):
        gguf_vocabulary.from_gguf(lacking).encode("ab\x04c")


# -------------------------------------------------------------------------------- special tokens


def test_written_special_tokens_are_one_id_and_decode_to_nothing():
    kind = gguf_vocabulary.from_gguf(metadata())
    ids = kind.encode("<|im_start|>he<|im_end|>")
    assert ids == [1, 3 + 256, 2]
    assert kind.decode(ids) == "he"


def test_every_end_is_a_stop_the_files_own_first_even_where_it_is_also_the_padding():
    kind = gguf_vocabulary.from_gguf(metadata(padding_token_id=2))
    assert kind.stop_ids == (2, 0)
    assert len(kind.encode("<|im_end|>a<|im_end|>")) == 3
    assert gguf_vocabulary.from_gguf(metadata(eot_token_id=1)).stop_ids == (2, 1, 0)


def test_the_word_of_an_end_that_is_no_special_token_does_not_stop():
    plain = metadata(token_type=[1, 3, 3] + [1] * 259)
    assert gguf_vocabulary.from_gguf(plain).stop_ids == (2,)


@pytest.mark.parametrize(("pre", "asked", "added"), [
    ("smollm", None, False), ("smollm", True, True), ("smollm", False, False),
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False)])
def test_one_bos_where_the_file_asks_for_it_and_none_elsewhere(pre, asked, added):
    kind = gguf_vocabulary.from_gguf(metadata(pre, add_bos_token=asked))
    plain = [3 + ord("a")]
    assert kind.encode("a") == [1] * added + plain
    assert kind.encode("<|im_start|>a") == [1, *plain]  # a template that brings its own
    assert kind.encode("a", start=False) == plain
    assert kind.encode("") == [1] * added


def test_special_tokens_and_the_template_are_those_of_the_file():
    kind = gguf_vocabulary.from_gguf(metadata() | {"tokenizer.chat_template": "{{ 1 }}"})
    assert kind.chat_template == "{{ 1 }}"
    assert kind.specials == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
                             "pad_token": "<|im_end|>"}


# ------------------------------------------------------------------- pieces that merges don't cross


def test_digits_are_single_tokens_in_smollm_and_threes_in_llama3():
    joined, one, two = 3 + 258, 3 + ord("1"), 3 + ord("2")
    assert gguf_vocabulary.from_gguf(metadata("smollm")).encode("12") == [one, two]
    assert gguf_vocabulary.from_gguf(metadata("qwen2")).encode("12") == [one, two]
    llama3 = gguf_vocabulary.from_gguf(metadata("llama-bpe"))
    assert llama3.encode("12", start=False) == [joined]
    assert llama3.encode("1212", start=False) == [joined, one, two]


def test_a_whole_piece_of_the_vocabulary_needs_no_merges_in_llama3_only():
    spelled = [3 + ord(c) for c in "xyz"]
    assert gguf_vocabulary.from_gguf(metadata("smollm")).encode("xyz") == spelled
    assert gguf_vocabulary.from_gguf(metadata("llama-bpe")).encode("xyz", start=False) == [3 + 257]


@pytest.mark.parametrize("count", vocabularies.COUNTS)
def test_ids_of_qwen2_equal_those_of_transformers(count):
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    made = vocabularies.json_tokenizer("composed")
    described = json.loads(made.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    theirs = qwen2.Qwen2Tokenizer(
        vocab=described["vocab"], merges=[tuple(merge) for merge in described["merges"]],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    ours = gguf_vocabulary.from_gguf(metadata(
        "qwen2", tokens=tokens, token_type=[3] * 5 + [1] * (len(tokens) - 5),
        merges=[" ".join(merge) for merge in described["merges"]]))

    def check(text):
        text = without(text, ("<s>", "</s>", "<unk>", "<|endoftext|>"))
        assert ours.encode(text) == theirs(text)["input_ids"]

    vocabularies.texts(count)(check)


@pytest.mark.parametrize("count", vocabularies.COUNTS)
def test_ids_equal_those_of_transformers(smollm2, count):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")  # its GGUF reader wants it
    theirs = transformers.AutoTokenizer.from_pretrained(
        str(smollm2.path.parent), gguf_file=smollm2.path.name)
    ours = gguf_vocabulary.from_gguf(smollm2.metadata)

    def check(text):
        # transformers leaves out the step that splits off digits before words are (see the last
        # test here), and loses bytes that have no token.
        if any(c.isnumeric() for c in text) and "  " in text:
            return
        with contextlib.suppress(ValueError):
            assert ours.encode(text) == theirs(text)["input_ids"]

    vocabularies.texts(count)(check)
    for text in ("12+35=47", "3.14159", "x = 10 ;"):
        check(text)


def test_llama3_pieces_equal_those_of_transformers():
    converters = pytest.importorskip("transformers.convert_slow_tokenizer")
    from tokenizers import Regex, pre_tokenizers

    theirs = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(converters.TikTokenConverter().pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = gguf_vocabulary.split_words(digits=3)
    for text in (*TRICKY, "1234567 8", "a.b\n\n c", "x\n \n  y"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_no_smollm_token_holds_a_digit_and_its_neighbour(smollm2):
    # Digits are split off before words are, so that "  " ends a piece. transformers leaves that
    # step out when it reads a GGUF file, so it is no oracle here.
    kind = gguf_vocabulary.from_gguf(smollm2.metadata)
    for parts in (("a", "  ", "5"), (" ", "½", " ", "²"), ("x", "1", "2", "ab")):
        assert kind.encode("".join(parts)) == [i for part in parts for i in kind.encode(part)]
    assert len(kind.encode("  ")) == 1


# ------------------------------------------------------------------------- vocabularies with scores


def scored(**changes):
    """What a converter writes of a sentencepiece model into a GGUF file."""
    model = pieces.proto.ModelProto.FromString(vocabularies.sentencepiece_model())
    return metadata(model="llama", pre="default", merges=None, **{
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces], "unknown_token_id": 0} | changes)


@pytest.mark.parametrize("count", vocabularies.COUNTS)
def test_ids_of_a_scored_vocabulary_equal_those_of_sentencepiece(count):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=vocabularies.sentencepiece_model())
    ours = gguf_vocabulary.from_gguf(scored())

    def check(text):
        if "<|im_end|>" not in text:
            assert ours.encode(text) == [1, *theirs.encode(text)]
            assert ours.decode(ours.encode(text), start=True) == text.replace("▁", " ")

    vocabularies.texts(count)(check)


def test_text_after_a_special_token_gets_the_space_that_begins_a_sequence():
    kind = gguf_vocabulary.from_gguf(scored())
    hello = kind.encode("Hello")[1:]
    assert kind.encode("<|im_end|>Hello") == [1, 3, *hello]
    assert kind.encode("Hello", start=False) != hello
    spaceless = gguf_vocabulary.from_gguf(scored(add_space_prefix=False))
    assert spaceless.encode("Hello") == [1, *kind.encode("Hello", start=False)]


# ------------------------------------------------------------------------------- files for others


@pytest.mark.parametrize("make", [
    lambda: metadata("smollm"), lambda: metadata("llama-bpe"), lambda: metadata("qwen2"),
    lambda: scored()])
def test_files_of_a_folder_make_the_same_tokenizer_here_and_in_transformers(tmp_path, make):
    transformers = pytest.importorskip("transformers")
    given = make() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    for name, content in gguf_vocabulary.files(given).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    first, again = gguf_vocabulary.from_gguf(given), folder.from_folder(str(tmp_path))
    assert (again.bos_id, again.adds_bos) == (first.bos_id, first.adds_bos)
    assert again.stop_ids[0] == first.stop_ids[0] and again.spelled == first.spelled
    assert again.specials == first.specials and again.chat_template == first.chat_template
    for text in (*TRICKY, "a<|im_end|>b"):
        assert again.encode(text) == first.encode(text)
        # transformers puts no space before one that is there, and a BOS before one that is.
        if not text.startswith((" ", first.specials["bos_token"])):
            assert again.encode(text) == theirs(text)["input_ids"]


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("changes", "named"), [
    ({"pre": "gpt-4o"}, "'gpt-4o'.*llama-bpe.*smollm"), ({"model": "t5"}, "model='t5'"),
    ({"merges": None}, "tokenizer.ggml.merges"), ({"eos_token_id": None}, "eos_token_id"),
    ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id"),
    ({"token_type": [1]}, "token_type"), ({"model": "llama"}, "tokenizer.ggml.scores"),
    ({"model": "llama", "scores": [1.0]}, "tokenizer.ggml.scores")])
def test_an_unusable_vocabulary_is_refused_by_name(changes, named):
    with pytest.raises(config.ConfigError, match=named):
        gguf_vocabulary.from_gguf(metadata(**changes))
