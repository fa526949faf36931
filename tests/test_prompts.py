"""The prompt table: each text encoded once, every record kept, counted or refused."""

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.data import prompts

STOP = 9


class Digits:
    """One token a digit, spaces vanish, anything else is refused."""

    def __init__(self):
        self.encoded = []

    def encode(self, text, *, start=True):
        self.encoded.append(text)
        if set(text) - set("0123456789 "):
            raise ValueError("no token for it")
        return [int(character) for character in text if character != " "]


def record(prompt, answer="1", **fields):
    return {"prompt": prompt, "answer": answer, **fields}


def table(records, *, stop_id=STOP, **limits):
    limits = config.PromptLimits(**{"buckets": (2, 4), **limits})
    return prompts.table(records, Digits(), limits, stop_id=stop_id)


def as_lists(arrays):
    return [array.tolist() for array in arrays]


def test_tokens_and_records_stay_aligned_in_order():
    found, counts = table([record("12"), record("3456", "2"), record("0")])
    assert as_lists(found.tokens) == [[1, 2], [3, 4, 5, 6], [0]]
    assert [r["prompt"] for r in found.records] == ["12", "3456", "0"]
    assert all(tokens.dtype == np.int32 for tokens in found.tokens)
    assert found.demonstrations == ()
    assert counts == {"duplicates": 0, "too_long": 0}


def test_each_prompt_is_encoded_once():
    tokenizer = Digits()
    prompts.table([record("12"), record("3"), record("12")], tokenizer, config.PromptLimits(),
                  stop_id=STOP)
    assert tokenizer.encoded == ["12", "3"]


def test_a_prompt_over_the_last_bucket_is_refused_by_record_and_length():
    with pytest.raises(config.ConfigError, match="record 1 .*5 tokens.* 4,"):
        table([record("12"), record("12345"), record("123456")])


def test_prompts_over_the_last_bucket_are_dropped_and_counted_if_asked():
    found, counts = table([record("12345"), record("1234"), record("123456")], too_long="drop")
    assert as_lists(found.tokens) == [[1, 2, 3, 4]]
    assert counts == {"duplicates": 0, "too_long": 2}


def test_duplicates_are_removed_only_if_prompt_and_answer_are_equal():
    found, counts = table([record("1"), record("1", "2"), record("1"), record("2")])
    assert as_lists(found.tokens) == [[1], [1], [2]]
    assert [r["answer"] for r in found.records] == ["1", "2", "1"]
    assert counts["duplicates"] == 1


def test_prompts_without_tokens_or_with_unknown_characters_name_their_record():
    with pytest.raises(config.ConfigError, match="record 1 .*no tokens"):
        table([record("1"), record(" ")])
    with pytest.raises(config.ConfigError, match="record 2 .*'x'.*no token for it"):
        table([record("1"), record("2"), record("x")])


def test_demonstrations_end_in_one_stop_id():
    found, _ = table([record("1", demonstration="23"), record("2", demonstration="79")])
    assert as_lists(found.demonstrations) == [[2, 3, STOP], [7, STOP]]
    assert all(tokens.dtype == np.int32 for tokens in found.demonstrations)
    found, _ = table([record("1", demonstration="23")], stop_id=None)
    assert as_lists(found.demonstrations) == [[2, 3]]


def test_demonstrations_follow_the_records_that_are_kept():
    found, _ = table([record("1", demonstration="2"), record("12345", demonstration="3"),
                      record("1", demonstration="2"), record("4", demonstration="5")],
                     too_long="drop")
    assert as_lists(found.demonstrations) == [[2, STOP], [5, STOP]]


def test_a_record_without_the_demonstration_that_others_have_is_named():
    with pytest.raises(config.ConfigError, match="record 1 has no demonstration"):
        table([record("1", demonstration="2"), record("3")])


def test_no_prompt_left_is_refused_with_the_counts():
    with pytest.raises(config.ConfigError, match="1 records.*too_long': 1"):
        table([record("12345")], too_long="drop")
    with pytest.raises(config.ConfigError, match="0 records"):
        table([])
