"""Prompt templates, where a final answer is found, and that template and scorer fit (B77)."""

import itertools

import pytest

from dapo_jax import config
from dapo_jax.envs import base, countdown, math, multiple_choice, self_check, templates
from dapo_jax.envs import pool as pools

SCORING = config.Scoring(workers=1, timeout=20.0)
MATH = ({"prompt": "6 + 7?", "answer": "13"}, {"prompt": "half?", "answer": "\\frac{1}{2}"},
        {"prompt": "clips?", "answer": "48/2 = 24\n48 + 24 = 72\n#### 72"},
        {"prompt": "?", "answer": "-1,234.5"})
COUNTDOWN = ({"prompt": "", "answer": "(3+5)*2", "numbers": (2, 3, 5), "target": 16},)
CHOICES = (multiple_choice.convert({"prompt": "Q", "choices": ["x", "y"], "answer": "B"}),)


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_each_template_holds_its_prompt_once_and_its_answer_once(name):
    text = templates.apply(name, "What is {x}?")
    assert text.count("What is {x}?") == 1 and "{prompt}" not in text
    assert templates.answered(name, "{7}").count("{7}") == 1


def test_a_template_may_be_a_text_and_is_refused_if_it_is_neither():
    assert templates.apply("Q {x}: {prompt}!", "{a}") == "Q {x}: {a}!"
    with pytest.raises(config.ConfigError, match="boxd.*plain.*boxed"):
        templates.named("boxd")


def test_solved_examples_have_the_templates_own_form():
    shots = [("1+1=", "2"), ("2+2=", "4")]
    assert templates.few_shot("line", shots, "3+3=") == "1+1= 2\n2+2= 4\n3+3= "
    assert templates.few_shot("qa", shots[:1], "3+3=") == (
        "Question: 1+1=\nAnswer: 2\n\nQuestion: 3+3=\nAnswer:")


@pytest.mark.parametrize("text, wanted", [
    (" 8\n", "8"), ("so <answer> 3 </answer> or <answer>\n[1, 2]\n</answer>", "[1, 2]"),
    ("<answer>5", "<answer>5"), ("\\boxed{\\frac{1}{2}} then \\boxed{7", "\\frac{1}{2}"),
    ("\\boxed{5}. Wait, \\boxed{7}", "7"), ("Answer: 4\nanswer: 13 ", "13"),
    ("**Answer:** x", "x"), ("steps\n#### -3", "-3"), ("", ""),
    ("Answer: 1\n\\boxed{2}\n<answer>3</answer>", "3")])
def test_the_final_answer_is_the_last_that_the_strongest_mark_holds(text, wanted):
    assert templates.final_answer(text) == wanted


def test_a_hostile_text_costs_no_more_than_its_length():
    for text in ("<answer>" * 200_000, "\\boxed{" * 200_000, "answer: " * 200_000, "{" * 10**6,
                 "#### " * 10**5, "answer" + " " * 10**6):
        assert len(templates.final_answer(text)) <= templates.TAIL


# B77: answered in its own form, each preset's prompt scores 1; what does not fit is refused.
@pytest.mark.parametrize("reward, extract, records, refused", [
    (math.__name__ + ":score", math.extract, MATH, ()),
    (countdown.__name__ + ":score", countdown.extract, COUNTDOWN, ()),
    (multiple_choice.__name__ + ":score", multiple_choice.extract, CHOICES, ()),
    ("dapo_jax.envs.arithmetic:score", lambda text, record: text, MATH[:1],
     ("dapo", "boxed", "hashes", "tags", "chat"))])
def test_templates_are_checked_against_scorers(reward, extract, records, refused):
    with pools.open(reward, SCORING) as pool:
        for name in templates.TEMPLATES:
            if name not in refused:
                self_check.check(pool, records, template=name, extract=extract)
                continue
            with pytest.raises(config.ConfigError, match=f"'{name}' and the reward '{reward}'"):
                self_check.check(pool, records, template=name, extract=extract)


def test_the_check_leaves_out_what_has_no_form_or_no_answer():
    with pools.open("dapo_jax.envs.arithmetic:score", SCORING) as pool:
        self_check.check(pool, MATH, template="Box it: {prompt}", extract=math.extract)
        self_check.check(pool, [{"answer": base.NO_ANSWER}], template="boxed",
                         extract=math.extract)


def test_a_reward_that_gives_no_number_is_refused_whatever_the_template():
    with pools.open("pool_rewards:words", SCORING) as pool, pytest.raises(
            config.ConfigError, match="pool_rewards:words returned a list, not a number"):
        self_check.check(pool, MATH, template="Box it: {prompt}", extract=math.extract)


def test_the_check_looks_at_a_bounded_number_of_records():
    looked = itertools.count()
    unanswered = ({"answer": base.NO_ANSWER} for _ in looked)
    with pools.open("dapo_jax.envs.arithmetic:score", SCORING) as pool:
        self_check.check(pool, unanswered, template="boxed", extract=math.extract)
    assert next(looked) <= 2000


def test_a_scorer_that_fails_on_every_right_answer_is_named():
    with pools.open("tests.run_rewards:by_record", SCORING) as pool, pytest.raises(
            config.ConfigError, match="by_record' fails on right answers.*KeyError"):
        self_check.check(pool, MATH, template="boxed", extract=math.extract)
