"""Answers found in worked solutions and compared with the right ones."""

import concurrent.futures
import json
import pathlib
import time
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from dapo_jax.envs import faults, math_answers, symbolic

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


def read(name):
    path = pathlib.Path(__file__).parent / "cases" / name
    return [json.loads(line) for line in path.read_text().splitlines()]


# A right answer that is a number wants a number: were 12+35 worked out, the question itself would
# be an answer to it.
RULES = [(row["text"], row["gold"], row["score"]) for row in read("answers.jsonl")]
TABLE = read("math_verify.jsonl")


@pytest.mark.parametrize("text, gold, expected", RULES)
def test_score_by_the_documented_rules(text, gold, expected):
    assert math_answers.score(text, gold) == expected


def verdict(row):
    return math_answers.score(row["text"], row["gold"]) == row.get("here", row["published"])


def test_math_verifys_own_tables_agree_but_where_a_rule_says_otherwise():
    """Pairs and verdicts of the tests of math-verify 0.8.0, short ones; "why" gives the rule."""
    assert [row for row in TABLE if not row.get("slow") and not verdict(row)] == []
    assert sum("why" in row for row in TABLE) < 0.1 * len(TABLE)


@pytest.mark.slow
def test_the_slow_rows_of_math_verifys_tables():
    assert [row for row in TABLE if row.get("slow") and not verdict(row)] == []


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
    cases = BOXED + NUMBERS + LINES + [case for case in RULES if "x" in case[1]]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda case: math_answers.score(*case[:2]), cases * 3))
    assert scores == [case[2] for case in cases] * 3


@pytest.mark.parametrize("gold, why", [
    ("", "empty"), ("  ", "empty"), ("$", "empty"), (".", "empty"), (r"\boxed{ }", "box"),
    (5, "int"), (None, "NoneType"), ("1/0", "zero"), ("nan", "nan"), ("-inf", "inf"),
    ("\0\1", "empty"), ("The proof goes on " * 100, "1799 characters"),
])
def test_an_unusable_right_answer_is_invalid_and_no_success(gold, why):
    with pytest.raises(faults.UnusableRecord, match=why):
        math_answers.check_gold(gold)
    for text in ("5", "", str(gold)):
        with pytest.raises(faults.UnusableRecord, match=why):
            math_answers.score(text, gold)


@pytest.mark.parametrize("gold", [
    "5", "E", r"\frac{1}{2}", "Evelyn", "x^2", "work\n#### 5", "7" * 5000])
def test_a_usable_right_answer_is_right_for_itself(gold):
    math_answers.check_gold(gold)
    assert math_answers.score(f"Answer: {gold}" if "####" not in gold else gold, gold) == 1


# What would take minutes, or all memory, if it were worked out.
@pytest.mark.parametrize("answer", [
    "9^{9^{9^9}}", "(9^9)^{9^9}", "9^{999999999}", "2^{2^{100}}", "99999999!", "((5!)!)!", "9^{9!}",
    r"\binom{10^9}{10^8}", "(" * 3000 + "x" + ")" * 3000, "{" * 200 + "x" + "}" * 200, "x" * 900,
    r"\frac{" * 40 + "x" + "}{2}" * 40, "7" * 900 + "x", r"\sum_{k=1}^{10^{99}} k^k",
    "(x+y+z)^{500}",
    r"\int_0^1 \sin^{99}(x^{99}) dx", r"\prod_{k=1}^{999} (x^k+1)", "x" + "+1" * 140, "x^" * 100,
    "\\" * 150, "\x00\x1b[0m\ud800", r"\sqrt{" * 11 + "2x" + "}" * 11,
])
def test_an_answer_that_could_grow_out_of_hand_is_wrong_in_bounded_time(answer, monkeypatch):
    monkeypatch.setattr(symbolic, "BUDGET", 50_000)
    begin = time.process_time()
    assert math_answers.score(rf"\boxed{{{answer}}}", "x^2+1") == 0
    assert time.process_time() - begin < 3  # most take 0.01 s; a tower of powers would take minutes


def test_what_could_blow_up_in_one_call_is_refused_unread_and_what_is_usual_is_not():
    refused = [
        "9^{9^9}", "(9^9)^{9^9}", "9^{1000}", r"9^{99 \cdot 99}", "2^{3^{4}}", "100!", "(5)!",
        "5!!", "9^9!", "9^{5!}", r"\binom{9999}{4}", r"\binom{9^9}{4}", r"{9 \choose 4}", "1" * 31,
        "x" * 301, "(" * 13 + "x" + ")" * 13, "2^9^9", "{2^9}^{9}^9", "((9^{99})^{99})^{99}",
        "9^(9^9)", "x^2 !", r"9^\frac{99}{1/99}", r"\sqrt[1/9999]{9}", r"\left(9^{99}\right)^{99}",
        r"\Gamma(999999)", "9 ^ { 9999 }", "9^12345"]
    assert [text for text in refused if symbolic.safe(text)] == []
    usual = [r"e^{x^2}", r"2^{10}", r"x^{\frac{1}{2}}", "10^{99}", "5!", "n! + 12!", "x != 3",
             r"\frac{2^{n+1}}{3^n}", r"\sqrt{1+\sqrt{2}}", "x^{2n}", "a_{n}^{2}", "(x^2)^3",
             r"\binom{9}{4}", r"\sqrt[3]{x}", r"\left(\frac{(a+b)^2}{c}\right)", "x^99 + y^99"]
    assert [text for text in usual if not symbolic.safe(text)] == []


def test_an_exception_that_a_generators_end_swallows_does_not_end_the_budget(
        monkeypatch):
    def endless():
        def generator():
            try:
                yield
            finally:
                len("")  # raises, within a finaliser
        while True:
            next(generator())
    monkeypatch.setattr(symbolic, "BUDGET", 10_000)
    assert symbolic.within_budget(endless) is False


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


def test_simple_answers_take_less_than_a_fifth_of_a_millisecond():
    solution = "She has 3 apples and buys 4 more, so 3+4=<<3+4=7>>7 apples, for $3.50 each.\n" * 3
    texts = [solution + end for end in ("#### 72", r"So \boxed{72}.", "Answer: 72", "It is 72.")]
    taken = []
    for _ in range(10):
        begin = time.process_time()
        assert sum(math_answers.score(text, "72") for text in texts * 50) == 200
        taken.append((time.process_time() - begin) / 200)
    assert min(taken) < 0.2e-3  # about 0.1 ms; the best of ten, as the machine may be busy
