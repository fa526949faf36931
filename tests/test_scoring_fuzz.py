"""Scoring under attack: random and hostile answers, and batches with every kind of failure.

The slow tests take some 10 and some 30 minutes on two cores.
"""

import gc
import os
import pathlib
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.envs import pool, processes

GOLDS = ("7", "1/2", "B", r"\frac{1}{2}x", "x^2+1", "(1,2)", r"[0,\infty)", "Evelyn", r"2\sqrt{3}",
         r"\{1,2,3\}", "x > 5", r"\begin{pmatrix}1 & 2\end{pmatrix}", "12:30", "-3.50")
PIECES = (
    r"\frac{", r"\frac", r"\dfrac12", r"\boxed{", r"\fbox{", r"\sqrt{", r"\sqrt[3]{", r"\text{",
    r"\left(", r"\right)", r"\{", r"\}", "{", "}", "(", ")", "[", "]", "|", "^", "^{", "_", "_{",
    "!", "$", "$$", r"\(", r"\)", r"\[", r"\]", r"\cdot", r"\times ", r"\div ", r"\pm ", r"\cup ",
    r"\infty", r"\pi ", r"\le ", r"\neq ", r"\approx ", r"\sum_{k=1}^{n}", r"\int_0^1 ", r"\prod",
    r"\lim_{x \to 0}", r"\binom{9}{4}", r"\begin{pmatrix}", r"\end{pmatrix}", r"\begin{cases}",
    "&", r"\\", r"\circ", r"\overline{", r"\sin", r"\log_{2}", r"\ln ", r"\mathbb{R}", r"\in ",
    "=", "<", ">", "+", "-", "*", "/", ",", ".", ":", ";", "%", r"\%", " ", "\n", "x", "y", "n",
    "i", "e", "0", "1", "9", "12", "1,000", "0.5", "99999", "10^", "Answer:", "answer is ",
    "####", " or ", " and ", "\x00", "\x1b[2J", "\u2212", "\u0660", "\ud800", "\U0001d7d9", "\\",
    "\u00bd", "\u221e", "\r")
HUGE = (1 << 20) // 2  # characters; of two bytes each, a megabyte

fragments = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
nested = st.builds(lambda left, inner, right, depth: left * depth + inner + right * depth,
                   st.sampled_from(PIECES), fragments, st.sampled_from((*PIECES, "")),
                   st.sampled_from((1, 3, 12, 30, 300, 5000)))
towers = st.lists(st.sampled_from(("2", "9", "10", "99", "x", "n", "(9^9)", "9!")), min_size=2,
                  max_size=9).flatmap(lambda parts: st.sampled_from((
                      "^".join(parts), "^{".join(parts) + "}" * (len(parts) - 1),
                      "(" * len(parts) + ")^".join(parts) + ")", r"\cdot ".join(parts) + "!")))
huge = st.builds(lambda piece, tail: piece * (HUGE // len(piece)) + tail,
                 st.sampled_from((*"79.,-{ \n", "1,", "1 ", r"\frac", r"\boxed{", "Answer: ")),
                 fragments)
usual = st.one_of(fragments, st.text(max_size=60), nested, towers,
                  st.integers().map(str), st.floats().map(str))
answers = st.builds(lambda form, answer: form.replace("?", answer), st.sampled_from((
    r"\boxed{?}", "Answer: ?", "#### ?", "?", "So the answer is ?.", "$?$", r"\(?\) \boxed{?")),
    usual)
items = st.tuples(answers, st.sampled_from(GOLDS))


def attack(workers, batch, *, limit):
    """Score a batch; no item may take longer than it may, and the pool must serve afterwards."""
    texts = [text for text, _ in batch]
    begin = time.monotonic()
    scores = pool.score(workers, texts, [{"answer": gold} for _, gold in batch])
    taken = time.monotonic() - begin
    assert scores.errors == 0, scores.first_failure
    seconds = scores.parts["seconds"]
    assert seconds.max(initial=0) <= limit + 1
    # Late ones are killed, and their workers replaced.
    assert taken <= seconds.sum() + scores.timeouts * (limit + 1) + 5
    after = pool.score(workers, [r"\boxed{7}", r"\boxed{8}"], [{"answer": "7"}] * 2)
    assert after.reward.tolist() == [1, 0]
    return scores


def opened(limit, count=1):
    return pool.open("fuzz_rewards:timed", config.Scoring(timeout=limit, workers=count),
                     weights=(("seconds", 1.0),))


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None,
                     suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(batch=st.lists(items, max_size=30), one=st.tuples(huge, st.sampled_from(GOLDS)))
def few_answers(batch, one, *, workers):
    attack(workers, [*batch, one], limit=10.0)


def test_random_and_hostile_answers_neither_crash_nor_outlast_the_limit():
    with opened(10.0) as workers:
        few_answers(workers=workers)


@pytest.mark.slow
def test_a_hundred_thousand_random_and_hostile_answers():
    counted = {"answers": 0, "late": 0, "slowest": 0.0, "right": 0}

    @hypothesis.settings(max_examples=1000, deadline=None, database=None, derandomize=True,
                         phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(batch=st.lists(items, min_size=99, max_size=99),
                      one=st.tuples(huge, st.sampled_from(GOLDS)))
    def many_answers(batch, one):
        scores = attack(workers, [*batch, one], limit=5.0)
        counted["answers"] += len(scores.reward)
        counted["late"] += scores.timeouts
        late = [item for item, valid in zip(batch, scores.valid, strict=False) if not valid]
        print(*(f"late: {text[:200]!r} {gold!r}" for text, gold in late), sep="\n", end="")
        counted["slowest"] = max(counted["slowest"], float(scores.parts["seconds"].max()))
        counted["right"] += int(scores.reward.sum())

    with opened(5.0, count=2) as workers:
        many_answers()
    print(counted)
    assert counted["answers"] >= 100_000
    assert counted["late"] < 0.001 * counted["answers"]  # the budget ends nearly all before


POISON = {"hang": "timeout", "raise": "error", "die": "ended", "nan": "value", "str": "type",
          "hog": "memory", "fork": "ended", "exit": "error"}
GOOD = [str(number) for number in range(9)]


def poison(workers, number):
    """A poisoned batch, the bad ones at other places each time."""
    texts = list(GOOD)
    for place, bad in enumerate(POISON):
        texts.insert((number * 5 + place * 7) % (len(texts) + 1), bad)
    scores = pool.score(workers, texts, [{}] * len(texts))
    good = [text in GOOD for text in texts]
    assert scores.valid.tolist() == good
    assert scores.reward.tolist() == [float(text) if fine else 0
                                      for text, fine in zip(texts, good, strict=True)]
    assert {kind: count for kind, count in scores.failures.items() if count} == {
        kind: list(POISON.values()).count(kind) for kind in POISON.values()}


def memory():
    """Megabytes of this process that are resident."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_poison(batches, *, warm):
    with pool.open("fuzz_rewards:poisoned",
                   config.Scoring(timeout=0.5, workers=2, memory_mb=300)) as workers:
        pool.score(workers, ["1"], [{}])
        for number in range(warm):
            poison(workers, number)
        before, files = memory(), len(os.listdir("/proc/self/fd"))
        for number in range(warm, warm + batches):
            poison(workers, number)
        grown = memory() - before
        assert abs(len(os.listdir("/proc/self/fd")) - files) <= 2
        mark = workers.crew.mark
    assert processes._marked(f"{processes.TOKEN}={mark}".encode()) == []
    return grown


def test_poisoned_batches_cost_the_poison_alone():
    run_poison(2, warm=0)


@pytest.mark.slow
def test_a_thousand_poisoned_batches_leave_no_process_and_no_growth():
    grown = run_poison(1000, warm=20)
    print(f"{grown:.1f} MB grown")
    assert grown < 8
