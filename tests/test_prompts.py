"""The prompt table: each text encoded once, every record kept, counted or refused."""

import dataclasses

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.data import prompts
from dapo_jax.learner import packing
from dapo_jax.text import chat, plain

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


# -------------------------------------------------------------------------------------------- chats

# Each turn is its role's first letter, the content and a full stop, then a space.
CHAT = chat.Chat("{% for m in messages %}{{ m.role[0] + m.content + '. ' }}{% endfor %}"
                 "{% if add_generation_prompt %}a{% endif %}")
LETTERS = plain.characters(".uas 123456789")
USER, ANSWER = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


def in_chat(*records, wrap=False, chat=CHAT):
    return prompts.in_chat(records, chat, wrap=wrap)


def test_messages_go_through_the_template_once_and_texts_only_if_asked():
    system = {"role": "system", "content": "9"}
    records = [record([system, USER]), record("3")]
    assert [r["prompt"] for r in in_chat(*records)] == ["s9. u1. a", "3"]
    assert [r["prompt"] for r in in_chat(*records, wrap=True)] == ["s9. u1. a", "u3. a"]
    assert records[0]["prompt"] == [system, USER]


def test_a_demonstration_is_the_assistants_turn_after_the_prompt():
    found = in_chat(record([USER, ANSWER, USER], demonstration="3"))[0]
    assert (found["prompt"], found["demonstration"]) == ("u1. a2. u1. a", "3. ")
    assert found[prompts.SEGMENTS] == (("3. ", True),)


def test_messages_that_end_with_the_assistant_are_a_conversation_to_learn_from():
    found = in_chat(record([USER, ANSWER, {**USER, "content": "5"}, {**ANSWER, "content": "6"}]))[0]
    assert found["prompt"] == "u1. a"
    assert found[prompts.SEGMENTS] == (("2. ", True), ("u5. a", False), ("6. ", True))


def test_only_the_assistants_tokens_up_to_its_stop_are_learned(stop="."):
    kind = dataclasses.replace(LETTERS, stop_ids=tuple(LETTERS.encode(stop)))
    records = in_chat(record([USER, ANSWER, USER, ANSWER]), record([USER], "7", demonstration="88"))
    found, _ = prompts.table(records, kind, config.PromptLimits(buckets=(8,)), stop_id=0)
    samples = packing.from_demonstrations(found, np.array([1, 0]), width=12, step=0)
    assert [kind.decode(row[:n]) for row, n in zip(samples.tokens, samples.length)] == [
        "88.", "2. u1. a2."]
    learned = [kind.decode(row[mask]) for row, mask in zip(samples.tokens, samples.loss_mask)]
    assert learned == ["88.", "2.2."]


def test_a_turn_that_the_template_does_not_end_gets_the_stop_id():
    found, _ = prompts.table(in_chat(record([USER, ANSWER])), LETTERS,
                             config.PromptLimits(buckets=(8,)), stop_id=0)
    assert LETTERS.decode(found.demonstrations[0]) == "2. " and found.demonstrations[0][-1] == 0
    assert found.demonstration_masks[0].all()


def test_a_chat_that_cannot_be_rendered_names_its_record():
    with pytest.raises(config.ConfigError, match="record 1 .*config.tokenizer.chat_template"):
        in_chat(record("1"), record([USER]), chat=None)
    with pytest.raises(config.ConfigError, match="record 0: the chat template fails"):
        in_chat(record([USER]), chat=chat.Chat("{{ raise_exception('no') }}"))
    with pytest.raises(config.ConfigError, match="record 0 has a demonstration after"):
        in_chat(record([USER, ANSWER], demonstration="3"))
    with pytest.raises(config.ConfigError, match="demonstration of record 0 .*'x'"):
        prompts.table(in_chat(record([USER, {**ANSWER, "content": "x"}])), LETTERS,
                      config.PromptLimits(buckets=(8,)), stop_id=0)
