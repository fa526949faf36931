import pytest
import vocabularies

from dapo_jax import config
from dapo_jax.text import gguf_vocabulary, plain, tokenizer


def words(*spelled, **more):
    """A tokenizer of whole words; special tokens are written <x> and have no text."""
    ids = {word: i for i, word in enumerate(spelled)}

    def encode(text, start):
        found = []
        while text:
            word = max((w for w in spelled if text.startswith(w)), key=len)
            found.append(ids[word])
            text = text[len(word):]
        return found

    shown = [b"" if word.startswith("<") else word.encode() for word in spelled]
    return tokenizer.Tokenizer(encode, shown, **({"stop_ids": (0,)} | more))


# ----------------------------------------------------------------------------------------- one BOS


def test_a_sequence_begins_with_one_bos_however_many_the_text_brings():
    kind = words("</s>", "<s>", "a", adds_bos=True, bos_id=1)
    for text in ("a", "<s>a", "<s><s>a"):
        assert kind.encode(text) == [1, 2]
    assert kind.encode("") == kind.encode("<s>") == [1]
    assert kind.encode("a<s>a") == [1, 2, 1, 2]
    assert kind.encode("a", start=False) == [2]
    assert kind.encode("<s>a", start=False) == [1, 2]


def test_no_bos_where_the_vocabulary_wants_none():
    for kind in (words("</s>", "<s>", "a", bos_id=1), words("</s>", "<s>", "a")):
        assert kind.encode("a") == [2]
        assert kind.encode("<s>a") == [1, 2]


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", [
    plain.characters("ab"), plain.byte_level(),
    gguf_vocabulary.from_gguf(vocabularies.metadata())])
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_an_id_outside_the_vocabulary_is_not_decoded(kind, bad):
    with pytest.raises(ValueError, match=str(bad)):
        kind.decode([1, bad])


def test_rows_of_a_model_past_the_vocabulary_decode_to_one_mark_each():
    kind = tokenizer.padded(words("<s>", "ab"), 4)
    assert kind.vocab_size == 4
    assert kind.decode([1, 2, 3, 1]) == "ab\ufffd\ufffdab"
    assert kind.encode("ab") == [1]


def test_only_a_sequence_that_starts_loses_the_encoders_own_space():
    kind = words("<s>", " a", leading_space=True)
    assert kind.decode([0, 1, 1], start=True) == "a a"
    assert kind.decode([0, 1, 1]) == " a a"
    assert words("<s>", " a").decode([1], start=True) == " a"


def test_characters_split_over_tokens_are_whole_again():
    kind = plain.byte_level()
    assert kind.decode([0xE2, 0x82, 0xAC]) == "€"
    assert kind.decode([0x41, 0xE2, 0x82]) == "A\ufffd"
    assert kind.decode([0x41, 0xE2, 0x42]) == "A\ufffdB"


def test_a_lone_surrogate_is_a_value_error():
    for kind in (plain.byte_level(), gguf_vocabulary.from_gguf(vocabularies.metadata())):
        with pytest.raises(ValueError, match="surrogate"):
            kind.encode("a\ud800")


# -------------------------------------------------------------------------------------------- stops


def test_stop_texts_of_one_token_are_ids_and_all_plain_ones_are_looked_for():
    kind = gguf_vocabulary.from_gguf(vocabularies.metadata(add_bos_token=True))
    ids, texts = tokenizer.stops(kind, ("\n", "<|im_end|>", "END", "he"))
    assert ids == (3 + ord("\n"), 2, 3 + 256)
    assert texts == ("\n", "END", "he")


@pytest.mark.parametrize("text", ["", "<|im_end|>\n", "a\ufffd"])
def test_a_stop_text_that_no_completion_can_show_is_refused(text):
    kind = gguf_vocabulary.from_gguf(vocabularies.metadata())
    with pytest.raises(config.ConfigError, match="rollout.stop"):
        tokenizer.stops(kind, ("\n", text))


def test_a_stop_text_without_tokens_is_refused_by_its_character():
    with pytest.raises(config.ConfigError, match="rollout.stop.*'#'"):
        tokenizer.stops(plain.characters("01"), ("#",))
