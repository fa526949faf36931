import dataclasses
import types as types_lib

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import controller
from dapo_jax.envs import faults, parts
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect
from dapo_jax.text import plain
from dapo_jax.text import tokenizer as tokenizers

STOPS = tuple(range(2, 64, 8))


# Each token is a letter; a stop token is a full stop.
LETTERS = tokenizers.Tokenizer(
    None, [b"." if i in STOPS else bytes([97 + i % 26]) for i in range(64)], stop_ids=STOPS)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(how=tiny.sampling(stop_ids=STOPS), slots=(4,))


@pytest.fixture
def source(monkeypatch, engine):
    """Scores 1 where a text holds more than five letters; the third text cannot be scored."""
    def score(pool, texts, records):
        reward = np.array([len(text) > 5 for text in texts], np.float32)
        valid = np.arange(len(texts)) != 2
        return pools.Scores(np.where(valid, reward, 0), valid, errors=1, timeouts=0,
                            first_failure="item 2: odd")
    monkeypatch.setattr(pools, "score", score)
    return collect.Source(engine, jax.random.key(7), tiny.table(), LETTERS,
                          judge=types_lib.SimpleNamespace(weights=parts.weights(())),
                          overlong=config.Overlong(cache=2, factor=0.5))


def test_a_round_scores_every_sample_on_its_own_text(source, params):
    one = collect.sample_round(source, params, tiny.plan([0, 4], 4), step=3)
    for row, text in enumerate(one.texts):
        tokens = one.samples.tokens[row, :one.samples.length[row]]
        assert text == LETTERS.decode(tokens.tolist())
        assert len(text) == one.samples.length[row]
    assert len(set(map(len, one.texts))) > 1
    valid = np.arange(8) != 2
    np.testing.assert_array_equal(one.samples.valid, valid)
    np.testing.assert_array_equal(one.samples.reward, (one.samples.length > 5) & valid)
    penalty = 0.5 * np.clip(one.samples.length - 4, 0, 2) / 2
    np.testing.assert_allclose(one.samples.shaped, one.samples.reward - penalty)
    assert (one.samples.born == 3).all() and set(one.seconds) == {"rollout", "reward"}


def test_a_round_ends_completions_at_stop_texts_before_it_scores_them(source, params):
    plan = tiny.plan([0, 4], 4)
    whole = collect.sample_round(source, params, plan, step=3)
    row = int(np.argmax(whole.samples.length))
    stop = whole.texts[row][2:4]
    one = collect.sample_round(dataclasses.replace(source, stop_texts=(stop,)), params, plan,
                               step=3)
    for before, after in zip(whole.texts, one.texts):
        head, found, _ = before.partition(stop)
        assert after == head + found
    assert one.samples.stopped[row] and one.samples.length[row] == len(one.texts[row])
    np.testing.assert_array_equal(one.samples.loss_mask.sum(1), one.samples.length)


def test_each_sample_is_a_row_of_the_log_up_to_the_limit(source, params):
    one = collect.sample_round(source, params, tiny.plan([0, 4], 4, group=[10, 11]), step=3)
    two = dataclasses.replace(one, samples=one.samples.take(np.arange(2)), texts=one.texts[:2])
    rows = collect.rows([one, two], source.table, step=3, kept=frozenset([11]), limit=0)
    assert [row["round"] for row in rows] == [1] * 8 + [2] * 2
    assert [row["kept"] for row in rows[:8]] == [False] * 4 + [True] * 4
    assert [row["sample"] for row in rows[:8]] == [0, 1, 2, 3] * 2
    assert [row["completion"] for row in rows[:8]] == one.texts
    assert rows[2]["valid"] is False and all(row["step"] == 3 for row in rows)
    assert len(collect.rows([one, two], source.table, step=3, kept=None, limit=9)) == 9
    assert collect.rows([one], source.table, step=3, kept=None, limit=1)[0]["kept"] is None


def test_failures_are_counted_by_kind_and_parts_are_means_over_valid_samples(
        source, params, monkeypatch):
    def score(pool, texts, records):
        valid = np.arange(len(texts)) % 4 != 2
        return pools.Scores(
            valid.astype(np.float32), valid, errors=1, timeouts=1, first_failure="x",
            failures={"timeout": 1, "memory": 1}, parts={"style": np.arange(8, dtype=np.float32)})

    monkeypatch.setattr(pools, "score", score)
    one = collect.sample_round(source, params, tiny.plan([0, 4], 4), step=3)
    monkeypatch.setattr(controller, "metrics", lambda report: {})
    found = collect.metrics(collect.Collected(
        None, one.samples.take(np.zeros(8, bool)), one.samples, None, [one, one],
        {"rollout": 1.0, "reward": 1.0}, one.use), step=3)
    assert {name: found[f"invalid/kind_{name}"] for name in faults.KINDS} == {
        **dict.fromkeys(faults.KINDS, 0), "timeout": 2, "memory": 2}
    assert found["reward/part/style"] == pytest.approx(20 / 6)


def test_a_completion_is_decoded_without_what_pads_it():
    tokenizer = plain.characters("ab\n")
    samples = dataclasses.replace(
        types.no_samples(4), tokens=np.array([[1, 0, 2, 1]], np.int32),
        length=np.array([3], np.int32))
    assert collect.decode(tokenizer, samples, 0) == tokenizer.decode([1, 0, 2])
