"""Figures of an evaluation against plain loops."""

import itertools
import json

import numpy as np
import pytest

from dapo_jax.runtime import eval_figures


@pytest.mark.parametrize("samples, correct", [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples, correct):
    right = [i < correct for i in range(samples)]
    for k in range(1, samples + 1):
        draws = list(itertools.combinations(right, k))
        share = sum(any(draw) for draw in draws) / len(draws)
        assert eval_figures.pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("answers, correct, wanted", [
    ("a", "1", True), ("aab", "110", True), ("aab", "001", False), ("abb", "100", False),
    ("ab", "10", True), ("ab", "01", False), ("abcb", "0101", True), ("--a", "001", True),
    ("--", "00", False), ("--ab", "0001", False)])
def test_the_majority_is_the_most_frequent_answer_and_the_first_of_equals(answers, correct, wanted):
    given = [None if answer == "-" else answer for answer in answers]
    assert eval_figures.majority([c == "1" for c in correct], given) is wanted


def _prompt(correct, *, dataset="", level="", stopped=None, answers=None, valid=None):
    right = np.array([c == "1" for c in correct])
    count = len(right)
    return eval_figures.Judged(
        correct=right, valid=np.ones(count, bool) if valid is None else np.array(valid),
        stopped=np.ones(count, bool) if stopped is None else np.array(stopped),
        length=np.arange(1, count + 1), dataset=dataset, level=level,
        answers=answers or tuple("r" if one else f"w{at}" for at, one in enumerate(right)))


PROMPTS = [_prompt("1100", dataset="x", level="1", stopped=[1, 1, 0, 0]),
           _prompt("0000", dataset="x", level="2", answers=(None, None, "a", "b")),
           _prompt("1111", dataset="y", level="2"),
           _prompt("0100", dataset="y", level="2", valid=[0, 1, 1, 1])]
GREEDY = [_prompt(one) for one in "1010"]


def test_a_report_counts_all_prompts_each_data_set_and_each_level():
    report = eval_figures.report(PROMPTS, GREEDY)
    means = {name: one["value"] for name, one in report["overall"].items()}
    assert means == pytest.approx({
        "avg@4": 7 / 16, "maj@4": 2 / 4, "pass@2": (5 / 6 + 0 + 1 + 1 / 2) / 4, "pass@4": 3 / 4,
        "greedy": 1 / 2, "truncated": 2 / 16, "length": 2.5, "no_answer": 2 / 16,
        "invalid": 1 / 16})
    assert (report["sets"]["x"]["prompts"], report["sets"]["x"]["avg@4"]["value"]) == (2, 0.25)
    assert report["sets"]["y"]["greedy"]["value"] == 0.5
    assert report["levels"]["2"]["avg@4"]["value"] == pytest.approx(5 / 12)
    flat = eval_figures.metrics(report)
    assert flat["eval/avg@4"] == 7 / 16 and flat["eval/x/pass@4"] == 0.5
    assert flat["eval/level_1"] == 0.5 and "eval/interval/length_low" not in flat
    assert flat["eval/interval/avg@4_low"] < 7 / 16 < flat["eval/interval/avg@4_high"]
    assert eval_figures.report(PROMPTS[:2])["sets"] == {}  # of one data set


def test_intervals_cover_the_truth_as_often_as_they_say_and_repeat():
    rng = np.random.default_rng(3)
    covered = []
    for _ in range(60):
        values = rng.binomial(8, 0.4, size=(40, 1)) / 8
        low, high = eval_figures.intervals(values)
        again = eval_figures.intervals(values)
        assert (low[0], high[0]) == (again[0][0], again[1][0])
        covered.append(low[0] <= 0.4 <= high[0])
    assert 0.85 <= np.mean(covered) <= 1.0  # 95 %, and 60 trials have a deviation of 3 %


def test_an_interval_is_about_the_normal_one():
    values = np.random.default_rng(0).normal(size=(400, 2))
    low, high = eval_figures.intervals(values)
    error = 1.96 * values.std(axis=0) / np.sqrt(400)
    assert low == pytest.approx(values.mean(axis=0) - error, abs=0.02)  # 1000 resamples: noise
    assert high == pytest.approx(values.mean(axis=0) + error, abs=0.02)
    assert eval_figures.intervals(np.ones((1, 1)))[0].tolist() == [1.0]


def test_the_markdown_table_has_a_row_for_each_part_and_no_stray_border():
    odd = [_prompt("10", dataset="a|b"), _prompt("01", dataset="c\nd")]
    report = eval_figures.report(odd) | {"sampling": "temperature 1"}
    lines = eval_figures.markdown(report, title="T").splitlines()
    rows = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 1 + 2
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert "| all | 2 | 0.500 (0.500–0.500) |" in lines[4]
    json.dumps(report, allow_nan=False)
