"""Tokenizers of Hugging Face folders: the ids of `transformers` on the same folder."""

import json
import unicodedata

import pytest
import vocabularies

from dapo_jax import config
from dapo_jax.text import folder

JSON_KINDS = ("bytes", "composed", "prepend", "metaspace", "replaced")


def theirs(path):
    """The reference: the class that reads tokenizer.json as it is, and no class of a family."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(path))


def shown(text, kind):
    """The text without its special tokens, and as far as the vocabulary tells it apart."""
    for special in ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"):
        text = text.replace(special, "")
    if kind == "composed":
        return unicodedata.normalize("NFC", text)
    return text if kind == "bytes" else text.replace("▁", " ")


# ------------------------------------------------------------------------------- tokenizer.json


@pytest.mark.parametrize("count", vocabularies.COUNTS)
@pytest.mark.parametrize("kind", JSON_KINDS)
def test_ids_equal_those_of_transformers_and_the_text_comes_back(tmp_path, kind, count):
    path = vocabularies.folder(tmp_path, kind)
    reference, ours = theirs(path), folder.from_folder(str(path))

    def check(text):
        ids = ours.encode(text)
        assert ids == reference(text, add_special_tokens=False)["input_ids"]
        whole = ours.decode(ids, start=True)
        assert whole == reference.backend_tokenizer.decode(ids)
        # "prepend" puts its space after special tokens too; "metaspace" puts none before another.
        if not (kind == "prepend" and "<|" in text
                or kind == "metaspace" and text.startswith((" ", "▁"))):
            assert whole == shown(text, kind)

    vocabularies.texts(count)(check)


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_text_that_continues_has_no_space_of_the_encoder_and_loses_none_of_its_own(tmp_path, kind):
    ours = folder.from_folder(str(vocabularies.folder(tmp_path, kind)))

    def check(text):
        ids = ours.encode(text, start=False)
        assert ours.decode(ids) == shown(text, kind)
        if text[:1] not in (" ", "") and ids:
            assert not ours.spelled[ids[0]].startswith(b" ")

    vocabularies.texts(100)(check)
    assert ours.decode(ours.encode(" a", start=False)) == " a"


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_one_bos_where_the_file_puts_one_whatever_the_settings_say(tmp_path, post, asked):
    path = vocabularies.folder(tmp_path, "bytes", adds_bos=post, add_bos_token=asked)
    ours = folder.from_folder(str(path))
    bare = ours.encode("hi", start=False)
    assert ours.bos_id == 1
    assert ours.encode("hi") == [1] * post + bare == theirs(path)("hi")["input_ids"]
    assert ours.encode("<s>hi") == [1, *bare]


def test_a_bos_that_only_the_file_names_is_found(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes", adds_bos=True, bos_token=None)
    ours = folder.from_folder(str(path))
    assert (ours.bos_id, ours.specials["bos_token"]) == (1, "<s>")
    assert ours.encode("")[:2] == [1]


def test_texts_are_neither_cut_nor_padded_by_the_file(tmp_path):
    made = vocabularies.json_tokenizer("bytes")
    made.enable_truncation(3)
    made.enable_padding(length=64)
    path = vocabularies.folder(tmp_path, "bytes")
    made.save(str(path / "tokenizer.json"))
    ours = folder.from_folder(str(path))
    assert ours.decode(ours.encode("Hello world, this is")) == "Hello world, this is"


def test_an_unknown_character_is_named(tmp_path):
    made = json.loads(vocabularies.json_tokenizer("metaspace").to_str())
    made["model"]["byte_fallback"] = False
    made["model"]["vocab"] = {token: i for token, i in made["model"]["vocab"].items()
                              if not token.startswith("<0x")}
    path = vocabularies.folder(tmp_path, "metaspace")
    (path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"'Ж' at position 2"):
        folder.from_folder(str(path)).encode("a Жa")
    assert folder.from_folder(str(path)).encode("a a")


def test_bytes_of_a_run_that_is_no_utf_8_keep_the_text_beside_them(tmp_path):
    # The library's own decoder gives up on the whole run: "\n" would be lost.
    ours = folder.from_folder(str(vocabularies.folder(tmp_path, "prepend")))
    newline, euro = (ours.spelled.index(byte) for byte in (b"\n", b"\xe2"))
    assert ours.decode([newline, euro]) == "\n\ufffd"


def test_a_token_of_the_settings_alone_is_added_under_its_id(tmp_path):
    size = vocabularies.json_tokenizer("bytes").get_vocab_size()
    entry = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False,
             "normalized": False, "single_word": False}
    path = vocabularies.folder(tmp_path, "bytes", added_tokens_decoder={str(size): entry})
    ours = folder.from_folder(str(path))
    assert ours.encode("a<|tool|>")[-1] == size == theirs(path)("a<|tool|>")["input_ids"][-1]
    assert ours.decode([size]) == ""
    vocabularies.folder(tmp_path, "bytes", added_tokens_decoder={str(size + 3): entry})
    with pytest.raises(config.ConfigError, match=r"<\|tool\|>.*token"):
        folder.from_folder(str(tmp_path))


def test_another_kind_of_decoder_is_refused_by_name(tmp_path):
    made = json.loads(vocabularies.json_tokenizer("bytes").to_str())
    made["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path = vocabularies.folder(tmp_path, "bytes")
    (path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(config.ConfigError, match=r"tokenizer.json.*WordPiece.*ByteLevel"):
        folder.from_folder(str(path))


# ------------------------------------------------------------------------------- tokenizer.model


@pytest.mark.parametrize("count", vocabularies.COUNTS)
@pytest.mark.parametrize("legacy", [True, False])
def test_ids_of_a_sentencepiece_folder_equal_those_of_transformers(tmp_path, legacy, count):
    transformers = pytest.importorskip("transformers")
    path = vocabularies.folder(tmp_path, "sentencepiece", legacy=legacy, add_bos_token=True,
                               tokenizer_class="LlamaTokenizer")
    reference = transformers.AutoTokenizer.from_pretrained(str(path))
    ours = folder.from_folder(str(path))

    def check(text):
        # transformers puts no space before one that is there; sentencepiece itself does.
        if not text.startswith((" ", "▁")):
            assert ours.encode(text) == reference(text)["input_ids"]

    vocabularies.texts(count)(check)
    for text in ("a<|im_end|>b", "</s>a</s>b c", "a</s>"):
        check(text)


def test_tokens_beside_the_model_follow_it(tmp_path):
    model = folder.pieces.proto.ModelProto.FromString(vocabularies.sentencepiece_model())
    size = len(model.pieces)
    path = vocabularies.folder(tmp_path, "sentencepiece", added_tokens_decoder={
        str(size + 1): {"content": "<|im_start|>", "special": True}, "0": {
            "content": "<unk>", "special": True}})
    (path / "added_tokens.json").write_text(json.dumps({"[tool]": size}))
    ours = folder.from_folder(str(path))
    assert ours.encode("<|im_start|>a[tool]", start=False)[::2] == [size + 1, size]
    assert ours.decode([size, size + 1]) == "[tool]"
    assert ours.vocab_size == size + 2
    (path / "added_tokens.json").write_text(json.dumps({"[tool]": 5}))
    with pytest.raises(config.ConfigError, match=r"\[tool\].*token 5"):
        folder.from_folder(str(path))


# ------------------------------------------------------------------------------------ files beside


def test_ends_of_all_files_stop_a_completion_the_tokenizers_own_first(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes", eos_token={"content": "<|im_end|>"})
    assert folder.from_folder(str(path)).stop_ids == (4,)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 4, 3]}')
    (path / "config.json").write_text('{"eos_token_id": 2}')
    assert folder.from_folder(str(path)).stop_ids == (4, 2, 3)


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes")
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 900]}')
    with pytest.raises(config.ConfigError, match="end token 900 of generation_config.json"):
        folder.from_folder(str(path))


def test_a_folder_without_an_end_token_is_refused(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes", eos_token=None)
    with pytest.raises(config.ConfigError, match="eos_token_id in generation_config.json"):
        folder.from_folder(str(path))


def test_special_tokens_may_stand_in_their_own_file(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    ours = folder.from_folder(str(path))
    assert (ours.bos_id, ours.stop_ids) == (1, (2,))
    assert ours.specials == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_template_is_that_of_its_file_or_the_default_of_the_settings(tmp_path):
    path = vocabularies.folder(tmp_path, "bytes", chat_template="one")
    assert folder.from_folder(str(path)).chat_template == "one"
    vocabularies.folder(tmp_path, "bytes", chat_template=[
        {"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}])
    assert folder.from_folder(str(path)).chat_template == "three"
    (path / "chat_template.jinja").write_text("four")
    assert folder.from_folder(str(path)).chat_template == "four"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("tokenizer.json", "{", "tokenizer.json cannot be used"),
    ("tokenizer_config.json", "{", "cannot read .*tokenizer_config.json"),
    ("generation_config.json", "[1]", "generation_config.json holds a list")])
def test_a_broken_file_is_named(tmp_path, name, content, words):
    path = vocabularies.folder(tmp_path, "bytes")
    (path / name).write_text(content)
    with pytest.raises(config.ConfigError, match=words):
        folder.from_folder(str(path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="neither tokenizer.json nor tokenizer.model"):
        folder.from_folder(str(tmp_path))


def test_a_file_that_is_no_sentencepiece_model_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(config.ConfigError, match="tokenizer.model is no sentencepiece model"):
        folder.from_folder(str(tmp_path))
