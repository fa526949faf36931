import dataclasses

import numpy as np
import pytest

from dapo_jax import config, types
from dapo_jax.envs import parts, rewards, shaping
from dapo_jax.envs import pool as pools


def samples(lengths):
    """Unscored samples of the given lengths, in tokens."""
    empty = {field.name: getattr(types.no_samples(1), field.name)
             for field in dataclasses.fields(types.Samples)}
    columns = {name: np.zeros((len(lengths), *column.shape[1:]), column.dtype)
               for name, column in empty.items()}
    return types.Samples(**columns | {"length": np.array(lengths, np.int32)})


@pytest.fixture
def score():
    """rewards.filled with the scores it is given."""
    def run(task, lengths, *, limit, cache, factor=1.0, valid=None, weights=(), given=None,
            texts=None):
        answers = pools.Scores(
            reward=np.array(task, np.float32), errors=0, timeouts=0, first_failure="",
            parts=given or {}, valid=np.ones(len(task), bool) if valid is None else np.array(valid))
        given = samples(lengths)
        filled = rewards.filled(
            given, texts or ["text"] * len(task), answers, weights=parts.weights(weights),
            max_length=limit, overlong=config.Overlong(cache=cache, factor=factor))
        np.testing.assert_array_equal(filled.length, given.length)
        return filled
    return run


LENGTHS = [79, 80, 81, 90, 99, 100, 101, 150]
PENALTIES = np.array([0, 0, -0.05, -0.5, -0.95, -1, -1, -1])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_overlong_penalty_is_added_to_the_shaped_reward_alone(score, factor):  # B53
    filled = score([1.0] * 8, LENGTHS, limit=100, cache=20, factor=factor)
    np.testing.assert_array_equal(filled.reward, 1)
    np.testing.assert_allclose(filled.shaped, 1 + factor * PENALTIES, atol=1e-6)
    assert filled.shaped[3] == 1 - 0.5 * factor and filled.shaped.dtype == np.float32


def test_without_a_cache_there_is_no_penalty(score):  # B53
    filled = score([0.25] * 8, LENGTHS, limit=100, cache=0)
    np.testing.assert_array_equal(filled.shaped, filled.reward)


def test_a_cache_larger_than_the_limit_is_refused(score):  # B53
    with pytest.raises(ValueError, match="cache = 101 .* 0..max_length = 100"):
        score([1.0], [50], limit=100, cache=101)


def test_the_raw_reward_stays_beside_the_shaped_one(score):  # B01
    filled = score([0] * 4 + [1, 0, 1, 1], [100, 100, 900, 1000] + [100] * 4, limit=1000,
                   cache=200)
    np.testing.assert_allclose(filled.shaped[:4], [0, 0, -0.5, -1.0], atol=1e-6)
    np.testing.assert_array_equal(filled.reward, [0, 0, 0, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(filled.shaped[4:], filled.reward[4:])


def test_a_sample_that_could_not_be_scored_is_marked_and_has_no_reward(score):
    filled = score([1, 0.5, 1], [5, 5, 5], limit=10, cache=0, valid=[True, False, True])
    assert filled.valid.tolist() == [True, False, True]
    assert filled.reward.tolist() == [1, 0, 1]


def test_the_shaped_reward_is_the_weighted_sum_and_the_raw_one_stays(score):  # B01
    weights = (("task", 2.0), ("style", 0.5), ("m:f", -1.0), ("length", -0.25))
    filled = score([1, 0, 1], [50, 100, 100], limit=200, cache=0, weights=weights,
                   given={"style": np.array([1, 2, 0]), "m:f": np.array([0, 0.5, 3])})
    np.testing.assert_array_equal(filled.reward, [1, 0, 1])
    np.testing.assert_allclose(filled.shaped, [2 + 0.5 - 0.0625, 1 - 0.5 - 0.125, 2 - 3 - 0.125],
                               atol=1e-6)
    assert filled.shaped.dtype == np.float32


def test_the_ready_parts_look_at_form_length_and_repetition(score):
    texts = ["#### 5", r"\boxed{5}", "Answer: 5", "it is 5", r"\boxed{5", ""]
    filled = score([0] * 6, [5] * 6, limit=10, cache=0, weights=(("format", 1.0),), texts=texts)
    assert filled.shaped.tolist() == [1, 1, 1, 0, 0, 0]
    filled = score([0] * 3, [0, 5, 10], limit=10, cache=0, weights=(("length", 1.0),))
    assert filled.shaped.tolist() == [0, 0.5, 1]
    # Of "aaaa" the substrings are a, aa, aaa, aaaa: 4 of 10 are distinct.
    filled = score([0] * 2, [4, 4], limit=10, cache=0, weights=(("repetition", 1.0),),
                   texts=["aaaa", "abcd"])
    np.testing.assert_allclose(filled.shaped, [0.6, 0], atol=1e-6)


def test_every_ready_part_has_its_function():
    assert set(parts.READY) == set(shaping.PARTS)


def test_the_scores_of_shares_join_to_those_of_the_whole():
    whole = pools.Scores(
        reward=np.arange(5, dtype=np.float32), valid=np.array([True, False, True, True, False]),
        errors=3, timeouts=1, first_failure="item 0: x", failures={"timeout": 1, "error": 3},
        parts={"style": np.arange(5, dtype=np.float32) + 10})
    places = [slice(index, 5, 3) for index in range(3)]
    shares = [dataclasses.replace(
        whole, reward=whole.reward[place], valid=whole.valid[place], errors=errors,
        timeouts=timeouts, first_failure=first, failures=failures,
        parts={"style": whole.parts["style"][place]})
        for place, errors, timeouts, first, failures in zip(
            places, (0, 2, 1), (0, 0, 1), ("", "item 0: x", "item 0: y"),
            ({"error": 0}, {"error": 2}, {"timeout": 1, "error": 1}))]
    found = rewards.joined(shares, places, 5)
    np.testing.assert_array_equal(found.reward, whole.reward)
    np.testing.assert_array_equal(found.valid, whole.valid)
    np.testing.assert_array_equal(found.parts["style"], whole.parts["style"])
    assert (found.errors, found.timeouts, found.first_failure) == (3, 1, "item 0: x")
    assert found.failures == whole.failures
