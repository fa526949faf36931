"""Stop texts: each completion ends with the first token whose text completes one."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dapo_jax import types
from dapo_jax.rollout import stops
from dapo_jax.text import plain, tokenizer

# Words, halves of "é" and "€", and a special token at 0.
SPELLED = (b"", b"a", b"b", b"ab", b"ba", b"END", b"EN", b"D\n", "é".encode()[:1],
           "é".encode()[1:], "€".encode()[:2], "€".encode()[2:], "é€".encode(), b" ")
KIND = tokenizer.Tokenizer(lambda text, start: [], SPELLED, stop_ids=(0,))


def samples(rows, width=10):
    count = len(rows)
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((count, width), np.int32)
    for target, row in zip(tokens, rows):
        target[:len(row)] = row
    some = np.arange(width) < length[:, None]
    return dataclasses.replace(
        types.no_samples(width).take(np.zeros(0, int)), tokens=tokens, length=length,
        loss_mask=some, logprobs=np.where(some, -0.5 - tokens, 0).astype(np.float32),
        stopped=np.zeros(count, bool), reward=np.zeros(count, np.float32))


def end_by_decoding(row, wanted):
    """The oracle: decode every prefix."""
    for count in range(1, len(row) + 1):
        if any(text in KIND.decode(row[:count]) for text in wanted):
            return count
    return 0


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.lists(st.lists(st.integers(0, len(SPELLED) - 1), max_size=10), min_size=1, max_size=4),
    st.lists(st.sampled_from(["END", "ab", "aba", "é", "€", "é€", "D\n", "bb", " a"]),
             min_size=1, max_size=3))
def test_a_completion_ends_where_the_text_of_a_prefix_first_holds_a_stop(rows, wanted):
    before = samples(rows)
    after = stops.cut(before, SPELLED, wanted)
    for i, row in enumerate(rows):
        end = end_by_decoding(row, wanted)
        kept = end or len(row)
        assert after.length[i] == kept
        assert after.stopped[i] == bool(end)
        assert after.tokens[i].tolist() == row[:kept] + [0] * (10 - kept)
        assert after.loss_mask[i].tolist() == [True] * kept + [False] * (10 - kept)
        np.testing.assert_array_equal(after.logprobs[i, :kept], before.logprobs[i, :kept])
        assert not after.logprobs[i, kept:].any()


def test_the_token_that_completes_the_stop_is_kept_whole():
    after = stops.cut(samples([[1, 6, 7, 2, 2]]), SPELLED, ("END",))
    assert KIND.decode(after.tokens[0, :after.length[0]]) == "aEND\n"


def test_what_stopped_by_itself_stays_stopped_and_environment_tokens_stay_masked():
    before = samples([[1, 2, 0], [1, 5, 2]])
    before = dataclasses.replace(before, stopped=np.array([True, False]))
    before.loss_mask[1, 0] = False
    after = stops.cut(before, SPELLED, ("END",))
    assert after.stopped.tolist() == [True, True]
    assert after.loss_mask[1].tolist() == [False, True] + [False] * 8


def test_without_stop_texts_the_samples_are_the_same():
    before = samples([[1, 5, 2]])
    assert stops.cut(before, SPELLED, ()) is before


@pytest.mark.parametrize("text", ["x", "€"])
def test_bytes_of_a_character_are_one_by_one_no_character(text):
    kind = plain.byte_level()
    row = kind.encode("a€x€")
    after = stops.cut(samples([row]), kind.spelled, (text,))
    assert kind.decode(row[:after.length[0]]) == "a€x€".partition(text)[0] + text
