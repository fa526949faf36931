"""The tasks of reasoning-gym: all load, score their own answers, and share no question."""

import pickle
import sys

import pytest

from dapo_jax import config
from dapo_jax.envs import base, reasoning_gym, templates
from dapo_jax.envs import pool as pools

SMALL = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
QUICK = ("chain_sum", "gcd", "number_sorting", "prime_factorization", "spell_backward",
         "graph_color", "word_ladder", "acre", "codeio", "rotate_matrix")


def _build(dataset="chain_sum", split="train", size=6, held_out=3, seed=0, **task):
    pytest.importorskip("reasoning_gym", reason="requirements-optional.txt is not installed")
    cfg = config.Config(
        seed=seed, eval=config.Evaluation(prompts=held_out),
        task=config.Task(name="reasoning_gym", dataset=dataset, train_size=size, **task))
    return reasoning_gym.build(cfg, split)


def _check(name, size):
    records, left = _build(name, size=size, template="tags")
    assert len(records) == size and left == {"missing": 0}
    for record in records:
        assert record["entry"]["question"] in record["prompt"]
        if record["answer"] != base.NO_ANSWER:
            assert reasoning_gym.score(templates.answered("tags", record["answer"]), record) == 1.0
        for text in ("", "<answer>((</answer>", "<answer>{}</answer>", "<answer>[1, 2</answer>"):
            assert 0.0 <= reasoning_gym.partial(text, record) <= 1.0


@pytest.mark.parametrize("name", QUICK)
def test_a_data_set_gives_full_marks_to_its_own_answers_and_survives_odd_ones(name):
    _check(name, 4)


@pytest.mark.slow
def test_more_than_a_hundred_data_sets_give_full_marks_to_their_own_answers():
    pytest.importorskip("reasoning_gym")
    names = reasoning_gym.names()
    assert len(names) > 100
    for name in names:
        _check(name, 3)


def test_no_question_is_in_both_splits_whatever_seed_and_size():
    """Item i of seed s is item i - 1 of seed s + 1, so different seeds alone would overlap."""
    train = [one["entry"]["question"] for seed in range(3)
             for one in _build(size=40, seed=seed, options=SMALL)[0]]
    held_out = [one["entry"]["question"] for seed in range(3)
                for one in _build(split="eval", held_out=20, seed=seed, options=SMALL)[0]]
    assert len(train) == 120 and len(held_out) >= 50
    assert not set(train) & set(held_out)
    for part, size in ((train, 40), (held_out, 20)):
        assert len(set(part[:size])) == size
    assert train[:40] != train[40:80]


def test_records_repeat_and_cross_to_the_worker_processes():
    first, again = (_build("chain_sum,graph_color")[0] for _ in range(2))
    assert first == again == pickle.loads(pickle.dumps(first))
    assert [one["dataset"] for one in first] == ["chain_sum", "graph_color"] * 3
    assert not any(one.get("demonstration") for one in first)  # graph_color has no single answer
    sums = _build(options=SMALL)[0]
    with pools.open(reasoning_gym.TASK.reward, config.Scoring(workers=1, timeout=60.0)) as pool:
        scores = pools.score(pool, [one["answer"] for one in sums] + ["no"] * 6, sums * 2)
    assert scores.reward.tolist() == [1.0] * 6 + [0.0] * 6 and scores.valid.all()


def test_credit_is_all_or_nothing_unless_partial_credit_is_asked_for():
    record = _build(options=SMALL)[0][0]
    text = f"it is {record['answer']}"
    assert reasoning_gym.score(text, record) == 0.0 < reasoning_gym.partial(text, record) < 0.99
    assert reasoning_gym.score(f"Answer: {record['answer']}", record) == 1.0


def test_shots_come_first_and_are_not_asked():
    records = _build(template="line", shots=2, options=SMALL)[0]
    first, second, asked = records[0]["prompt"].split("\n")
    assert first.rsplit("= ", 1)[1] and asked.endswith("= ")
    assert all(one["prompt"].startswith(f"{first}\n{second}\n") for one in records)
    assert not {one["entry"]["question"] for one in records} & {
        first.rsplit(" ", 1)[0], second.rsplit(" ", 1)[0]}


@pytest.mark.parametrize("task, message", [
    ({"dataset": "chan_sum"}, "no 'chan_sum'; did you mean chain_sum"), ({"dataset": ""}, "empty"),
    ({"options": (("max_term", 2),)}, "'max_term'.*did you mean max_terms"),
    ({"options": (("size", 2),)}, "seed and size are config.seed"),
    ({"options": (("gcd.min_numbers", 2),)}, "gcd.min_numbers"),
    ({"options": (("min_terms", 9),)}, "do not suit reasoning-gym's 'chain_sum'")])
def test_unknown_names_and_settings_are_refused(task, message):
    with pytest.raises(config.ConfigError, match=message):
        _build(**{"dataset": "chain_sum"} | task)


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(config.ConfigError, match="requirements-optional.txt"):
        reasoning_gym.names()
