"""Answers found in worked solutions and compared with the right ones."""

import concurrent.futures
import time
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from dapo_jax.envs import math_answers

BOXED = [
    (r"\boxed{\frac{1}{2}}", "1/2", 1), (r"\boxed{\frac{1}{2}}", "1/3", 0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1), (r"so \boxed{5}. Wait, \boxed{7}", "7", 1),
    (r"so \boxed{5}. Wait, \boxed{7}", "5", 0), (r"<answer>\boxed{42}</answer>", "42", 1),
    (r"\boxed{\text{E}}", "E", 1), (r"\boxed{5} and \boxed{7", "5", 1), (r"\fbox{5}", "5", 1),
    (r"\boxed{\{1, 2} or 3", r"\{1,2", 1), (r"7, in a \boxed{}", "7", 1),
    (r"\boxed{8 \boxed{9}}", "9", 1), (r"\boxed{-\dfrac12}", "-0.5", 1),
    (r"\boxed{3\frac{1}{2}}", "3.5", 1), (r"\boxed{3\frac{1}{2}}", "31/2", 0),
    (r"\boxed{50\%}", "50", 1), (r"\boxed{90^\circ}", "90", 1), (r"\boxed{(E)}", "E", 1),
    (r"\boxed{July 5}", "June 5", 0), (r"\boxed{1/0}", "1", 0), (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{42}", r"Because. \boxed{42}", 1),
]
NUMBERS = [
    ("#### -3", "-3", 1), ("#### -3", "3", 0), ("#### 3", "-3", 0),
    ("The total is 72 clips, altogether.", "72", 1), ("#### $1,234.50", "1234.5", 1),
    ("29.00", "29", 1), ("answer is 3 5", "5", 1), ("#### 80,000 dollars.", "80000", 1),
    ("so 10-3", "3", 1), ("f(x)-3", "3", 1), ("-(-3)", "-3", 1),
    ("1,2345", "2345", 1), ("-$5", "-5", 1), ("it is 2/4", "0.5", 1),
    ("\u22127", "-7", 1), ("-0", "0", 1), ("+3", "3", 1), ("2.5e3", "2500", 1), ("", "5", 0),
    ("#### 5\nThen 9 more words", "5", 1), ("12", "Some work.\n#### 12", 1), ("0.333", "1/3", 0),
]
LINES = [
    ("Answer: $13$", "13", 1), ("answer: 13.", "13", 1), ("Answer: 4\nAnswer: 13", "13", 1),
    ("Answer: 4\nAnswer: 13", "4", 0), ("**Answer:** 13\nof 20", "13", 1),
    (r"Answer: 4 so \boxed{6}", "6", 1), ("Answer: 4\n#### 6", "4", 1),
]


@pytest.mark.parametrize("text, gold, expected", BOXED + NUMBERS + LINES)
def test_score_of_public_fault_reports(text, gold, expected):  # B69, B73, B75, B77
    assert math_answers.score(text, gold) == expected


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{\frac{1}{2}}", "1/2"), ("#### $1,234.50", "1234.5"), ("29.00", "29"),
    ("no number here", None), ("Answer: $x+1$.", "x+1"), ("007", "7"), (".50", "0.5"),
])
def test_extract_gives_one_spelling(text, answer):
    assert math_answers.extract(text) == answer


def test_score_is_the_same_in_the_main_thread_and_in_eight_others():  # B69
    cases = BOXED + NUMBERS + LINES
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda case: math_answers.score(*case[:2]), cases * 8))
    assert scores == [case[2] for case in cases] * 8


@pytest.mark.parametrize("gold", ["", "  ", "$", "."])
def test_an_empty_right_answer_is_refused(gold):
    with pytest.raises(ValueError, match="empty"):
        math_answers.score("5", gold)


def test_a_right_answer_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="int"):
        math_answers.score("5", 5)


@pytest.mark.parametrize("piece", [
    "{", r"\boxed{", "1", "1 ", "1,", "1,111", "1/", "answer:", "####", "-", " ", "answer ",
    r"\frac", r"\frac{1", "1.", "x = ", r"\text{", "1e", "\\", "5 a",
])
def test_hostile_texts_take_bounded_time(piece):
    bad = piece * (200_000 // len(piece))
    start = time.perf_counter()
    for text in (bad, "Answer: " + bad[-19_000:], r"\boxed{" + bad[-19_000:] + "}", "5 " + bad):
        math_answers.score(text, "5")
    # Linear patterns take about 0.05 s; a quadratic one takes over 10 s.
    assert time.perf_counter() - start < 2.0


def test_numbers_too_long_to_compare_by_value_compare_as_text():
    long = "7" * 5000
    assert math_answers.score(f"#### {long}", long) == 1
    assert math_answers.score(f"#### {long}", long[:-1] + "8") == 0
    assert math_answers.score(f"#### {long}", "7") == 0


@hypothesis.given(st.integers(-10**9, 10**9), st.integers(1, 10**4), st.integers(-10**9, 10**9))
def test_fractions_are_equal_exactly_when_their_values_are(top, bottom, other):
    text = rf"\boxed{{\frac{{{top}}}{{{bottom}}}}}"
    assert math_answers.score(text, f"{3 * top}/{3 * bottom}") == 1
    assert math_answers.score(text, f"{other}") == (Fraction(top, bottom) == other)


@hypothesis.given(st.integers(-10**12, 10**12), st.integers(0, 4))
def test_thousands_commas_and_trailing_zeros_do_not_matter(number, zeros):
    point = "." + "0" * zeros if zeros else ""
    assert math_answers.extract(f"In all ${number:,}{point}.") == str(number)


def test_last_number_also_takes_the_very_text_of_the_answer():
    assert math_answers.last_number(" take 2 of them\n", {"answer": "take 2 of them"}) == 1
    assert math_answers.last_number("it is 12", {"answer": "12"}) == 1
    assert math_answers.last_number("it is 13", {"answer": "12"}) == 0
