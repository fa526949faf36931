"""Demonstrations that are episodes: the model's turns are learned, the replies are read."""

import dataclasses

import numpy as np
import pytest
import vocabularies
from test_chat import CHATML

from dapo_jax import config
from dapo_jax.data import prompts, shown
from dapo_jax.envs import calculator, episodes
from dapo_jax.learner import packing
from dapo_jax.text import chat, gguf_vocabulary, plain, replies

RECORDS = [{"prompt": f"{left}*34=", "answer": str(34 * left), "demonstration": str(34 * left)}
           for left in range(10, 60)]
TEXT = "0123456789*=<>/calcresut\n"
PLAIN = plain.characters("".join(dict.fromkeys(TEXT)))
OWN = config.Environment(name="calculator")


def test_an_episode_is_what_the_environment_would_tell():
    records = shown.with_episodes(RECORDS[2:3], calculator.ENVIRONMENT, OWN)
    table, _ = prompts.table(records, PLAIN, config.PromptLimits(), stop_id=PLAIN.encode("\n")[0])
    samples = packing.from_demonstrations(table, np.array([0]), width=60, step=0)
    parts = ["<calc>12*34</calc>\n", "<result>408</result>\n", "408\n"]
    assert PLAIN.decode(samples.tokens[0, :samples.length[0]].tolist()) == "".join(parts)
    mine, told, last = map(len, parts)
    assert samples.loss_mask[0].tolist() == [True] * mine + [False] * told + [True] * last + [
        False] * (60 - mine - told - last)


def test_a_share_of_prompts_has_an_episode_and_the_prompt_alone_decides_which():
    for share in (0.0, 0.5, 1.0):
        found = shown.with_episodes(RECORDS, calculator.ENVIRONMENT,
                                    dataclasses.replace(OWN, demonstrated=share))
        played = ["<calc>" in one["demonstration"] for one in found]
        assert sum(played) == {0.0: 0, 1.0: 50}.get(share, sum(played))
        assert abs(sum(played) - 50 * share) <= 10
        again = shown.with_episodes(RECORDS[::-1], calculator.ENVIRONMENT,
                                    dataclasses.replace(OWN, demonstrated=share))
        assert again == found[::-1]


def test_in_a_chat_the_episode_is_its_messages():
    tokenizer, template = gguf_vocabulary.from_gguf(vocabularies.metadata()), chat.Chat(CHATML)
    records = shown.with_episodes(RECORDS[2:3], calculator.ENVIRONMENT,
                                  dataclasses.replace(OWN, role="user"))
    (record,) = prompts.in_chat(records, template, wrap=True)
    table, _ = prompts.table([record], tokenizer, config.PromptLimits(buckets=(256,)),
                             stop_id=tokenizer.stop_ids[0])
    tokens, mask = table.demonstrations[0], table.demonstration_masks[0]
    turn = tokens[:np.argmin(mask)]
    told = tokens[len(turn):len(turn) + np.argmax(mask[len(turn):])]
    encode = replies.encoder(tokenizer, template, role="user")
    assert told.tolist() == encode("<result>408</result>\n", int(turn[-1])).tolist()
    assert tokenizer.decode(turn.tolist()) == "<calc>12*34</calc>\n"
    assert table.records[0]["prompt"] == chat.render(template, episodes.told("12*34="))


def test_an_episode_that_is_not_over_is_refused():
    endless = dataclasses.replace(calculator.ENVIRONMENT, shown=lambda record: ["<calc>1</calc>"])
    with pytest.raises(config.ConfigError, match="'12.34=' .*it is not over after 1 turns"):
        shown.with_episodes(RECORDS[2:3], endless, OWN)
    silent = dataclasses.replace(calculator.ENVIRONMENT, shown=None)
    assert shown.with_episodes(RECORDS[:2], silent, OWN) == RECORDS[:2]


def _fails(*given):
    raise LookupError("on purpose")


def _changes(record, seed):
    record["answer"] = "0"
    return calculator.start(record, seed)


@pytest.mark.parametrize("changes, message", [
    ({"shown": lambda record: record["level"]}, r"raised KeyError: 'level' \(.*test_shown.py"),
    ({"shown": lambda record: ["1\n", "2\n"]}, "it is over before the text '2"),
    ({"shown": lambda record: []}, "not over after 0 turns"), ({"start": _fails}, "on purpose"),
    ({"step": _fails}, "LookupError: on purpose"), ({"step": lambda *given: None}, "not a Turn"),
    ({"start": lambda *given: 3}, "start returned a int")])
def test_what_cannot_be_shown_is_a_fault_of_the_environment(changes, message):
    wrong = dataclasses.replace(calculator.ENVIRONMENT, **changes)
    with pytest.raises(config.ConfigError, match=f"'calculator'.*12.34=.*{message}"):
        shown.with_episodes(RECORDS[2:3], wrong, OWN)


def test_an_environment_that_changes_a_record_changes_its_own():
    forgetful = dataclasses.replace(calculator.ENVIRONMENT, start=_changes)
    records = [dict(record) for record in RECORDS[:3]]
    assert [one["answer"] for one in shown.with_episodes(records, forgetful, OWN)] == [
        one["answer"] for one in RECORDS[:3]]
