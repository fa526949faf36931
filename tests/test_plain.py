import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.text import plain

DEFAULT_ALPHABET = config.Tokenizer().alphabet


@hypothesis.given(st.text(st.sampled_from(DEFAULT_ALPHABET)))
def test_characters_come_back_as_they_were(text):
    kind = plain.characters(DEFAULT_ALPHABET)
    ids = kind.encode(text)
    assert kind.decode(ids) == text
    assert len(ids) == len(text)


@hypothesis.given(st.text())
def test_bytes_come_back_as_they_were(text):
    kind = plain.byte_level()
    ids = kind.encode(text)
    assert kind.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_ids_of_characters_count_from_the_end_token():
    kind = plain.characters("ba\n")
    assert kind.encode("ab\n") == [2, 1, 3]
    assert (kind.vocab_size, kind.stop_ids, kind.bos_id) == (4, (0,), None)
    assert kind.decode(np.array([2, 0, 1, 0, 0])) == "ab"


def test_byte_ids_are_the_bytes():
    kind = plain.byte_level()
    assert kind.encode("é!") == [0xC3, 0xA9, 0x21]
    assert (kind.vocab_size, kind.stop_ids) == (257, (256,))
    assert kind.decode([0xC3, 0x21, 255, 256]) == "\ufffd!\ufffd"


def test_a_character_outside_the_alphabet_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"'x' at position 3"):
        plain.characters("0123456789").encode("123x5y")


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_an_alphabet_that_is_empty_or_repeats_is_refused(alphabet):
    with pytest.raises(config.ConfigError, match="alphabet"):
        plain.characters(alphabet)
