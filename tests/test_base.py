"""Rewards found by name, templates, and the overlong penalty."""

import pytest

from dapo_jax import config
from dapo_jax.envs import base


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_overlong_penalty_matches_its_table(factor):
    table = {79: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 150: -1}
    for length, penalty in table.items():
        got = base.overlong_penalty(length, 100, 20, factor)
        assert got == pytest.approx(factor * penalty, abs=1e-9), length
    assert 1 + base.overlong_penalty(90, 100, 20, 1.0) == pytest.approx(0.5)


def test_overlong_penalty_is_off_without_a_cache():
    assert base.overlong_penalty(500, 100, 0, 1.0) == 0.0


def test_overlong_penalty_refuses_a_cache_outside_the_limit_and_names_both():
    for cache in (101, -1):
        with pytest.raises(ValueError, match=rf"{cache} .*100"):
            base.overlong_penalty(5, 100, cache, 1.0)
    with pytest.raises(ValueError, match="-2"):
        base.overlong_penalty(5, 100, 20, -2.0)


def test_reward_is_resolved_to_the_function_it_names():
    assert base.resolve_reward("math:fmod")(7, 4) == 3


@pytest.mark.parametrize("dotted, words", [
    ("nowhere_at_all:score", ["nowhere_at_all", "cannot import"]),
    ("math:fmodd", ["'math'", "'fmodd'", "did you mean fmod"]),
    ("math:pi", ["'pi'", "float"]),
    ("math", ["module:function"]),
    ("math:", ["module:function"]),
])
def test_reward_that_is_missing_is_named(dotted, words):
    with pytest.raises(config.ConfigError) as caught:
        base.resolve_reward(dotted)
    assert all(word in str(caught.value) for word in words), caught.value


def test_template_keeps_other_braces_of_template_and_prompt():
    assert base.apply_template("Q {x}: {prompt}\n", "{a} {0}") == "Q {x}: {a} {0}\n"
    with pytest.raises(config.ConfigError, match="template"):
        base.apply_template("no place", "1+1=")


def test_a_reward_in_no_folder_that_is_searched_is_told_where_to_go():
    with pytest.raises(config.ConfigError, match="folder where the command is started"):
        base.resolve_reward("in_no_folder.at_all:f")
    with pytest.raises(config.ConfigError) as inside:  # the package is there, its module is not
        base.resolve_reward("dapo_jax.no_such_file:f")
    assert "folder where" not in str(inside.value)
