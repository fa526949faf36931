"""Multiple choice: which option a text names."""

import pytest

from dapo_jax.envs import multiple_choice

RECORD = multiple_choice.convert({"prompt": "Which is prime?", "answer": "B",
                                  "choices": ["21", "23", "none of these", "A"]})


@pytest.mark.parametrize("text, wanted", [
    ("B", "B"), (" b.", "B"), ("(B)", "B"), ("**B**", "B"), ("B. 23", "B"), ("B) 23", "B"),
    ("B: 23", "B"), ("(B) 23", "B"), ("23", "B"), ("None of these.", "C"), ("$\\text{B}$", "B"),
    ("\\boxed{B}", "B"), ("\\boxed{\\text{(B)}}", "B"), ("I think.\nAnswer: B", "B"),
    ("Answer: option C", "C"), ("<answer>C</answer>", "C"), ("#### 23", "B"),
    ("The answer is B.", "B"), ("The answer is (C), no: the answer is (B).", "B"),
    ("B\nbecause 23 is prime", "B"), ("A", "A"), ("a. A", None), ("A. 21", "A"), ("B. 21", None),
    ("E", None), ("A or B", None), ("\\boxed{A, B}", None), ("", None), ("Because it is", None),
    ("I am sure", None), ("24", None), ("The answer is a number", None)])
def test_a_letter_or_a_text_names_an_option(text, wanted):
    assert multiple_choice.extract(text, RECORD) == wanted
    assert multiple_choice.score(text, RECORD) == float(wanted == "B")


@pytest.mark.parametrize("answer, wanted", [
    ("c", "C"), ("23", "B"), ("none of these", "C"), ("0", "A"), ("3", "D"), ("A", "A")])
def test_the_right_answer_is_a_letter_a_text_or_a_number_from_0(answer, wanted):
    row = {"prompt": "Q", "answer": answer, "choices": list(RECORD["choices"])}
    assert multiple_choice.convert(row)["answer"] == wanted


def test_options_stand_under_the_question_and_in_the_users_last_message():
    assert RECORD["prompt"] == "Which is prime?\nA. 21\nB. 23\nC. none of these\nD. A"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Q"}]
    made = multiple_choice.convert({"prompt": chat, "answer": "A", "choices": ["x", "y"]})
    assert [one["content"] for one in made["prompt"]] == ["Hi", "Yes?", "Q\nA. x\nB. y"]


@pytest.mark.parametrize("changes", [
    {"choices": None}, {"choices": ["x"]}, {"choices": "xy"}, {"choices": ["x", " X."]},
    {"answer": "E"}, {"answer": "7"}, {"choices": [str(n) for n in range(27)]}])
def test_rows_without_clear_options_are_refused(changes):
    with pytest.raises(ValueError):
        multiple_choice.convert({"prompt": "Q", "answer": "A", "choices": ["x", "y"]} | changes)
