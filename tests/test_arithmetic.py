"""Procedural problems: right, seeded, distinct, and split without overlap."""

import collections
import dataclasses
import os
import re
import subprocess
import sys

import pytest

from dapo_jax import config
from dapo_jax.envs import arithmetic, base

TASK = config.Task()


def task(**changes):
    return dataclasses.replace(TASK, **changes)


def operands(prompt):
    left, operator, right = re.fullmatch(r"(\d+) ?([-+*]) ?(\d+) ?= ?", prompt).groups()
    return int(left), operator, int(right)


def texts(records):
    return [record["prompt"] for record in records]


def test_answers_are_what_python_computes_and_levels_are_digit_counts():
    found = arithmetic.records(task(operators="+-*"), seed=0, split="train", count=300)
    assert len(found) == 300
    for record in found:
        left, operator, right = operands(record["prompt"])
        assert int(record["answer"]) == {"+": left + right, "-": left - right,
                                         "*": left * right}[operator]
        assert record["demonstration"] == record["answer"]
        assert str(len(str(left))) == str(len(str(right))) == record["level"]
    assert {operands(text)[1] for text in texts(found)} == set("+-*")


def test_a_seed_gives_the_same_problems_and_another_seed_others():
    first, again, other = (texts(arithmetic.records(TASK, seed=seed, split="train", count=50))
                           for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_train_and_eval_never_share_a_problem_nor_its_twin_whatever_the_seed():
    sides = {}
    for seed in (0, 1):
        for split in ("train", "eval"):
            for text in texts(arithmetic.records(task(levels=((1, 1.0), (2, 1.0)), operators="+*-"),
                                                 seed=seed, split=split, count=2000)):
                left, operator, right = operands(text)
                pair = (left, right) if operator == "-" else tuple(sorted((left, right)))
                assert sides.setdefault((operator, *pair), split) == split
    assert {"train", "eval"} == set(sides.values())


def test_all_problems_of_a_level_are_used_once_and_a_fifth_is_held_out():
    one = task(levels=((2, 1.0),))
    train, held_out = (texts(arithmetic.records(one, seed=0, split=split, count=10**6))
                       for split in ("train", "eval"))
    assert sorted(train + held_out) == sorted(f"{a}+{b}=" for a in range(10, 100)
                                              for b in range(10, 100))
    # 4095 pairs fall independently: three deviations of a fifth are 0.019.
    assert len(held_out) / 8100 == pytest.approx(0.2, abs=0.02)


def test_levels_are_mixed_by_share_and_a_small_level_leaves_its_rest_to_the_others():
    counts = collections.Counter(
        record["level"] for record in arithmetic.records(
            task(levels=((2, 1.0), (3, 3.0))), seed=0, split="train", count=400))
    assert counts == {"2": 100, "3": 300}
    found = arithmetic.records(task(levels=((1, 1.0), (3, 1.0))), seed=0, split="train", count=400)
    counts = collections.Counter(record["level"] for record in found)
    assert len(found) == len(set(texts(found))) == 400
    assert counts["1"] < 100 and counts["3"] == 400 - counts["1"]


def test_levels_too_large_to_list_give_distinct_problems():
    found = texts(arithmetic.records(task(levels=((18, 1.0),)), seed=0, split="eval", count=50))
    assert len(set(found)) == 50
    assert all(len(str(operands(text)[0])) == 18 for text in found)


def test_drawing_again_keeps_problems_distinct(monkeypatch):
    monkeypatch.setattr(arithmetic, "LISTED", 10)
    found = texts(arithmetic.records(task(levels=((1, 1.0),)), seed=0, split="train", count=60))
    assert len(found) == len(set(found)) == 60


def test_the_split_does_not_depend_on_the_hash_seed_of_the_process():
    code = ("from dapo_jax import config; from dapo_jax.envs import arithmetic; "
            "print([r['prompt'] for r in arithmetic.records(config.Task(shots=1), seed=0, "
            "split='eval', count=20)])")
    printed = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
               for seed in ("1", "2")}
    assert len(printed) == 1


def test_shots_are_right_from_training_and_never_the_question_or_its_twin():
    spaced = task(spaced=True, shots=3, levels=((1, 1.0),), operators="+*")
    train = {operands(text.split("\n")[-1]) for text in texts(
        arithmetic.records(spaced, seed=0, split="train", count=10**4))}
    for split in ("train", "eval"):
        for text in texts(arithmetic.records(spaced, seed=0, split=split, count=10**4)):
            *shots, question = text.split("\n")
            assert re.fullmatch(r"\d [+*] \d = ", question)
            assert len(set(shots)) == 3
            left, operator, right = operands(question)
            for shot in shots:
                asked, answer = shot.rsplit(" ", 1)
                problem = operands(asked + " ")
                assert arithmetic.APPLY[problem[1]](problem[0], problem[2]) == int(answer)
                assert problem in train
                assert problem not in ((left, operator, right), (right, operator, left))


def test_shots_of_a_question_do_not_depend_on_how_many_questions_there_are():
    few, many = ({text.split("\n")[-1]: text for text in texts(
        arithmetic.records(task(shots=2, levels=((1, 1.0),)), seed=0, split="train", count=count))}
        for count in (20, 60))
    assert few.items() <= many.items()
    assert len({text.split("\n")[0] for text in many.values()}) > 10


def test_template_surrounds_the_prompt():
    plain, dressed = (arithmetic.records(task(template=template), seed=0, split="eval", count=3)
                      for template in ("{prompt}", "Q: {prompt}\nA: "))
    assert texts(dressed) == [f"Q: {text}\nA: " for text in texts(plain)]


@pytest.mark.parametrize("changes, name", [
    ({"operators": "+/"}, "operators"), ({"operators": ""}, "operators"),
    ({"levels": ()}, "levels"),
    ({"levels": ((0, 1.0),)}, "levels"), ({"levels": ((1, 0.0),)}, "levels"),
    ({"levels": ((2.0, 1.0),)}, "levels"), ({"levels": ((1, 1.0), (1, 2.0))}, "levels"),
    ({"levels": ((1,),)}, "levels"), ({"shots": 33}, "shots"), ({"shots": -1}, "shots"),
    ({"shots": 32, "levels": ((1, 1.0),), "operators": "+"}, None),
])
def test_impossible_settings_are_refused_by_name(changes, name):
    if name is None:  # the most shots there may be fit the smallest level
        assert arithmetic.records(task(**changes), seed=0, split="train", count=3)
        return
    with pytest.raises(config.ConfigError, match=f"config.task.{name}"):
        arithmetic.records(task(**changes), seed=0, split="train", count=3)


def test_score_looks_at_the_stripped_first_line_only():
    record = {"answer": "47"}
    right = ["47", " 47 \n", "47\n12 + 9 = 21"]
    wrong = ["", "4", "470", "48", "\n47", "47.", "=47", "x\n47"]
    assert [arithmetic.score(text, record) for text in right] == [1.0] * 3
    assert [arithmetic.score(text, record) for text in wrong] == [0.0] * 8


def test_build_reports_how_many_problems_do_not_exist():
    cfg = config.Config(task=task(levels=((1, 1.0),), train_size=1000),
                        eval=config.Evaluation(prompts=5))
    train, counts = arithmetic.build(cfg, "train")
    assert counts == {"missing": 1000 - len(train)}
    assert 60 <= len(train) <= 95
    held_out, counts = arithmetic.build(cfg, "eval")
    assert (len(held_out), counts) == (5, {"missing": 0})


def test_the_tasks_own_reward_gives_its_demonstrations_full_marks():
    score = base.resolve_reward(arithmetic.TASK.reward)
    for record in arithmetic.records(task(operators="+-*"), seed=0, split="eval", count=20):
        assert score(record["demonstration"] + "\n", record) == 1.0
