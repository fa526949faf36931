"""The parts of a reward: names, weights and functions."""

import pytest

from dapo_jax import config
from dapo_jax.envs import parts, pool


def test_parts_of_the_dict_and_of_other_functions_come_beside_the_task_reward():
    weights = (("style", 0.5), ("pool_rewards:shouts", 1.0), ("task", 2.0), ("format", 1.0))
    with pool.open("pool_rewards:parted", config.Scoring(), weights=weights) as workers:
        scores = pool.score(workers, ["1", "2", "bare", "NO"], [{}] * 4)
    assert scores.reward.tolist() == [1, 2, 0, 0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "style": [10, 20, 0, 0], "pool_rewards:shouts": [0, 0, 0, 0]}
    assert scores.failures["type"] == 1 and scores.failures["error"] == 1  # float("NO")
    assert "pool_rewards:parted returned no part 'style'" in scores.first_failure


@pytest.mark.parametrize("weights, words", [
    ((("style", "much"),), "no pair"), ((("", 1),), "no pair"), (("style",), "no pair"),
    ((("style", float("nan")),), "no pair"), ((("a", 1), ("a", 2)), "names 'a' twice"),
    ((("task", 1e39),), "no pair"),
])
def test_weights_that_are_none_are_refused_at_the_start(weights, words):
    with pytest.raises(config.ConfigError, match=f"reward_weights.*{words}"):
        pool.open("pool_rewards:parted", config.Scoring(), weights=weights)


@pytest.mark.parametrize("name, words", [
    ("one_argument", "takes \\(text\\).*called with \\(text, record\\)"),
    ("three_arguments", "missing a required argument: 'more'"), ("coroutine", "coroutine"),
    ("MODULE_DATA", "dict, not a function"),
])
def test_a_function_that_cannot_be_called_as_a_reward_is_refused_by_name(name, words):
    with pytest.raises(config.ConfigError, match=f"'pool_rewards:{name}'.*{words}"):
        parts.function(f"pool_rewards:{name}")
    with pool.open(f"pool_rewards:{name}", config.Scoring()) as workers, \
            pytest.raises(config.ConfigError, match=words):
        pool.ready(workers)


def test_defaults_and_further_arguments_with_defaults_are_no_fault():
    assert parts.function("pool_rewards:generous")("x", {}) == 1
    assert parts.function("builtins:max") is max  # tells no signature
