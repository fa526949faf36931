"""Sums by columns: what is written down is right, and answers are read from their form alone."""

import dataclasses
import re

import pytest

from dapo_jax import config, config_checks
from dapo_jax.envs import columns


def records(split="train", **changes):
    task = config.Task(name="columns", train_size=200, levels=((1, 1.0), (3, 1.0), ((2, 4), 1.0)))
    cfg = config.Config(task=dataclasses.replace(task, **changes),
                        eval=config.Evaluation(prompts=50))
    return columns.build(cfg, split)[0]


def test_every_column_adds_up_and_the_columns_digits_are_the_sum():
    found = records()
    assert len(found) == 200
    for record in found:
        left, right = map(int, re.fullmatch(r"(\d+)\+(\d+)=", record["prompt"]).groups())
        *steps, answer = record["demonstration"].split(" ")
        assert answer == record["answer"] == f"({left + right})"
        sums = []
        for place, step in enumerate(steps):
            terms, made = step.split("=")
            digits = [int(digit) for digit in terms.split("+")]
            pair = [int(str(number)[::-1][place:place + 1] or 0) for number in (left, right)]
            assert digits == pair + [1] * (place > 0 and sums[-1] > 9)
            assert int(made) == sum(digits)
            sums.append(sum(digits))
        assert int("".join([str(sums[-1]), *(str(s % 10) for s in sums[-2::-1])])) == left + right


def test_answers_differ_in_length_with_their_numbers():
    lengths = {record["level"]: len(record["demonstration"]) for record in records()}
    assert lengths["1"] < lengths["3"] < lengths["2+4"]


def test_no_problem_is_in_both_splits():
    assert not ({one["prompt"] for one in records()} & {one["prompt"] for one in records("eval")})


@pytest.mark.parametrize("text, found, right", [
    ("7+5=12 4+8+1=13 (132)\n", "(132)", 1.0), ("(132)", "(132)", 1.0), ("132", None, 0.0),
    ("7+5=12 (132) 4", None, 0.0), ("(132)\n(131)\n", "(132)", 1.0), ("(131)", "(131)", 0.0),
    ("()", None, 0.0), ("((132)", "(132)", 1.0), ("", None, 0.0), ("x\n(132)", None, 0.0)])
def test_the_answer_is_what_stands_in_brackets_at_the_end_of_the_first_line(text, found, right):
    record = {"answer": "(132)"}
    assert columns.extract(text, record) == found
    assert columns.score(text, record) == right
    assert columns.answered(text, record) == float(found is not None)


@pytest.mark.parametrize("field, value", [("operators", "+-"), ("digits", 3), ("spaced", True)])
def test_what_the_task_has_no_meaning_for_is_refused(field, value):
    with pytest.raises(config.ConfigError, match=f"config.task.{field}"):
        records(**{field: value})


def test_shots_are_refused_where_fields_of_other_tasks_are():
    values = config.default()
    values.task.name, values.task.shots = "columns", 2
    with pytest.raises(config.ConfigError, match="config.task.shots"):
        config_checks.from_dict(values)
