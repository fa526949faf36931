"""Countdown: exact, safe scoring of expressions, and problems whose splits share none."""

import ast
import fractions

import hypothesis
import pytest
from hypothesis import strategies

from dapo_jax import config
from dapo_jax.envs import countdown

RECORD = {"numbers": (2, 3, 7, 7), "target": 24}


def _config(size=40, held_out=12, seed=0, **task):
    return config.Config(seed=seed, task=config.Task(name="countdown", train_size=size, **task),
                         eval=config.Evaluation(prompts=held_out))


@pytest.mark.parametrize("text, wanted", [
    ("(7+7-2)*2", 0.0), ("(7 - 3) * (7 - 2) + 4", 0.0), ("7*(3+3/7)", 0.0), ("3*(7+7/7)", 0.0),
    ("3*7+3", 0.0), ("2*(7+7)-4", 0.0), ("7*3+7/2", 0.0), ("7+7+3+7", 0.0), ("24", 0.0),
    ("7 * 2 + 7 + 3", 1.0), ("7*2+7+3=24", 1.0), ("((7*2))+(7+3)\n", 1.0), ("7×2+7+3", 1.0),
    ("so \\boxed{7 \\times 2 + 7 + 3}", 1.0), ("Answer: $7\\cdot2+7+3$", 1.0),
    ("<think>7*7</think><answer>3+7+7*2</answer>", 1.0), ("7*2+7+3 = 25", 0.0),
    ("7*2+7+3+", 0.0), ("7*2+7+3)", 0.0), ("(7*2+7+3", 0.0), ("-7*2", 0.0), ("+24", 0.0),
    ("7*2+7+3+(7-7)/(3-3)", 0.0), ("2**3", 0.0), ("27-3", 0.0), ("7*2+10", 0.0), ("", 0.0),
    ("__import__('os')", 0.0), ("7.0*2+7+3", 0.0), ("7*2+7+3 # ok", 0.0), ("７*2+7+3", 0.0)])
def test_an_expression_counts_if_it_hits_the_target_with_given_numbers(text, wanted):
    assert countdown.score(text, RECORD) == wanted


EXPRESSIONS = strategies.recursive(
    strategies.integers(0, 99).map(str), lambda inner: strategies.tuples(
        inner, strategies.sampled_from("+-*/"), inner, strategies.booleans()).map(
            lambda made: f"({made[0]}{made[1]} {made[2]})" if made[3] else "".join(made[:3])),
    max_leaves=8)


def _by_python(text):
    """The value by Python's own grammar, over fractions."""
    apply = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__"}

    def value(node):
        if isinstance(node, ast.Constant):
            return fractions.Fraction(node.value)
        return getattr(value(node.left), apply[type(node.op)])(value(node.right))

    return value(ast.parse(text, mode="eval").body)


@hypothesis.settings(max_examples=150, deadline=None, database=None)
@hypothesis.given(EXPRESSIONS)
def test_values_and_precedence_are_those_of_python(text):
    try:
        wanted = _by_python(text)
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            countdown.evaluate(text)
        return
    assert countdown.evaluate(text)[0] == wanted


@hypothesis.settings(max_examples=150, deadline=None, database=None)
@hypothesis.given(strategies.text(alphabet="0123456789+-*/() =\n.e\u0660×", max_size=60))
def test_no_text_breaks_the_scorer(text):
    assert countdown.score(text, RECORD) in (0.0, 1.0)
    assert countdown.score(text * 5000 + "(" * 10**5, RECORD) == 0.0


@pytest.mark.parametrize("options", [
    (), (("short", True), ("numbers", (2, 5)), ("operators", "*/"), ("target", (0, 9999)))])
def test_problems_are_solvable_differ_and_are_in_one_split(options):
    train, left = countdown.build(_config(options=options), "train")
    held_out, _ = countdown.build(_config(options=options, seed=9), "eval")
    keys = [(tuple(sorted(one["numbers"])), one["target"]) for one in train + held_out]
    assert len(set(keys)) == len(keys) == 52 and left == {"missing": 0}
    for one in train + held_out:
        assert countdown.score(one["answer"], one) == 1.0
        assert sorted(countdown.evaluate(one["answer"])[1]) == sorted(one["numbers"])
    assert train == countdown.build(_config(options=options), "train")[0]
    assert train != countdown.build(_config(options=options, seed=1), "train")[0]


def test_shots_are_training_problems_that_are_not_asked():
    cfg = _config(options=(("short", True),), template="line", shots=2)
    train, held_out = (countdown.build(cfg, split)[0] for split in ("train", "eval"))
    shots = train[0]["prompt"].split("\n")[:2]
    for record in train + held_out:
        *shown, asked = record["prompt"].split("\n")
        assert shown == shots and asked.strip() not in {shot.split("=")[0] for shot in shots}
    numbers = " ".join(map(str, train[0]["numbers"]))
    assert train[0]["prompt"].endswith(f"\n{numbers}={train[0]['target']} ")


def test_a_split_that_runs_out_says_how_much_is_missing():
    few = (("largest", 2), ("numbers", (2, 2)), ("operators", "+"))
    found, left = countdown.build(_config(options=few), "train")
    assert len(found) + left["missing"] == 40 and 0 < len(found) <= 3


@pytest.mark.parametrize("options, message", [
    ((("larges", 9),), "no setting 'larges'; did you mean largest"), ((("largest", "9"),), "int"),
    ((("largest", 9), ("largest", 8)), "each name once"), (("largest", 9), "pairs"),
    ((("numbers", (1, 3)),), "numbers"), ((("operators", "+^"),), r"\+\^"),
    ((("target", (5, 1)),), "target"), ((("largest", 0),), "largest")])
def test_odd_settings_are_refused_by_name(options, message):
    with pytest.raises(config.ConfigError, match=message):
        countdown.build(_config(options=options), "train")
