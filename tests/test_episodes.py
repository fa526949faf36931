"""Environments of several turns: protocol, calculator, game, and what is paid for."""

import dataclasses
import fractions
import math
import re
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_jax import config
from dapo_jax.envs import (
    base,
    breaker,
    calculator,
    environments,
    episodes,
    exact_sums,
    guess_number,
    imports,
    python_tool,
    tool_calls,
)
from dapo_jax.learner import advantages, credit

SUMS = st.recursive(
    st.integers(0, 999).map(str) | st.sampled_from(["0.5", "2.25"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/%"), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})") | inner.map(lambda one: f"-{one}"),
    max_leaves=8)




@settings(max_examples=60, deadline=None)
@given(SUMS)
def test_a_sum_has_the_value_that_python_gives_fractions(text):

    wrapped = re.sub(r"[\d.]+", lambda found: f"F('{found[0]}')", text)
    try:
        right = eval(wrapped, {"F": fractions.Fraction})
    except ZeroDivisionError:
        with pytest.raises(exact_sums.NoValue, match="division by zero"):
            exact_sums.value(text)
        return
    assert exact_sums.value(text) == right


@pytest.mark.parametrize("text, right", [
    ("2**10", "1024"), ("(-1)**1000001", "-1"), ("0**0", "1"), ("2**-2", "1/4"), ("7//-2", "-4"),
    ("1/3+1/6", "1/2"), ("0.1+0.2", "3/10"), ("(-1)**-3", "-1"), ("0**5", "0")])
def test_powers_and_quotients_by_hand(text, right):
    assert exact_sums.shown(exact_sums.value(text)) == right


@pytest.mark.parametrize("text", [
    "9**9**9", "2**(10**9)", "0**-1", "1/0", "2**0.5", "__import__('os')", "a", "1 if 1 else 2",
    "[1]", "'x'*9", "True", "1j", "1e9999999", "1;2", "", "\0", "(" * 250, "-" * 250 + "1",
    "1+" * 99, "1+" * 200 + "1", "x:=1", "lambda: 1", "9" * 257, "٣.٥",
    "*".join(["9" * 50] * 5 + ["99999999"])])
def test_what_is_no_bounded_sum_has_no_value(text):
    with pytest.raises(exact_sums.NoValue):
        exact_sums.value(text)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="0123456789+-*/%.() e**_,", max_size=256))
def test_any_text_has_a_value_or_none_within_the_bounds(text):
    try:
        found = exact_sums.value(text)
    except exact_sums.NoValue:
        return
    assert max(abs(found.numerator), found.denominator) < 10**exact_sums.MOST_DIGITS


def test_the_calculator_answers_calls_and_scores_the_final_text_alone():
    (record,) = calculator.records(seed=0, split="train", count=1)
    left, right = record["prompt"].rstrip("=").split("*")
    gold = str(int(left) * int(right))
    state, messages = calculator.start(record, 7)
    assert messages == [{"role": "user", "content": record["prompt"]}]
    turn = calculator.step(state, f"<calc>{left}*{right}</calc>")
    assert turn == episodes.Turn(f"<result>{gold}</result>\n", 0.0, False, turn.state,
                                 {"calls": 1, "tool_errors": 0})
    assert calculator.step(turn.state, gold).reward == 1.0
    # The tool's text holds the right answer; a model that says nothing gets nothing.  B48
    assert calculator.step(turn.state, "").reward == 0.0
    broken = calculator.step(state, "<calc>1/0</calc><calc>rm -rf</calc> 5 <calc>2+2</calc>")
    assert broken.parts == {"calls": 3, "tool_errors": 2}
    assert broken.reply.endswith("<result>4</result>\n") and broken.reply.count("error: ") == 2


def test_calls_without_end_end():
    state = calculator.start({"prompt": "1*1=", "answer": "1"}, 0)[0]
    for count in range(1, 100):  # noqa: B007 (looked at below)
        turn = calculator.step(state, "<calc>1</calc>" * 50)
        assert turn.reply.count("<result>") == tool_calls.MOST_CALLS + 1
        state = turn.state
        if turn.done:
            break
    assert (count, turn.reward) == (calculator.MOST_TURNS, 0.0)


def test_problems_of_the_splits_do_not_meet():
    for make in (calculator.records, guess_number.records, python_tool.records):
        train, held = ({one["prompt"] for one in make(seed=0, split=split, count=200)}
                       for split in ("train", "eval"))
        assert train and held and not train & held
        assert make(seed=3, split="eval", count=5) == make(seed=3, split="eval", count=5)
        with pytest.raises(ValueError, match="split"):
            make(seed=0, split="test", count=1)


def test_answers_of_code_problems_are_right():
    for one in python_tool.records(seed=1, split="train", count=20):
        low, high, modulus = (int(word.strip("?,")) for word in one["prompt"].split("?")[0].split()
                              if word.strip("?,").isdigit())
        total = 0
        for number in range(low, high + 1):
            total = (total + number * number) % modulus
        assert one["answer"] == str(total)


@pytest.mark.parametrize("seed", range(8))
def test_halving_wins_the_game_and_its_feedback_is_true(seed):
    state, messages = guess_number.start({"low": -3, "high": 120}, seed)
    low, high = -3, 120
    while True:
        guess = (low + high) // 2
        turn = guess_number.step(state, f"I tried {low - 1}, now {guess}")
        state = turn.state
        if turn.done:
            break
        low, high = (guess + 1, high) if turn.reply.startswith("higher") else (low, guess - 1)
    assert turn.reward == 1.0 and "from -3 to 120" in messages[0]["content"]


def test_a_game_without_guesses_is_lost_after_its_tries():
    state = guess_number.start({"tries": 3}, 0)[0]
    turns = []
    while not turns or not turns[-1].done:
        turns.append(guess_number.step(state, "no idea"))
        state = turns[-1].state
    assert [turn.reward for turn in turns] == [0, 0, 0]
    assert all(turn.parts["malformed"] for turn in turns)
    with pytest.raises(ValueError, match="no number from 5 to 4"):
        guess_number.start({"low": 5, "high": 4}, 0)


def test_a_task_of_one_turn_is_an_environment_and_back():
    one = episodes.single_turn("sums", "dapo_jax.envs.arithmetic:score")
    record = {"prompt": "2+3=", "answer": "5"}
    state, messages = one.start(record, 0)
    assert messages == [{"role": "user", "content": "2+3="}]
    assert one.step(state, "5\nmore") == episodes.Turn("", 1.0, True)
    score = episodes.reward_of(one)
    assert (score("5", record), score("6", record)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="'guess_number' goes on after its first turn"):
        episodes.reward_of(guess_number.ENVIRONMENT)("no number", {})
    with pytest.raises(config.ConfigError, match="scor"):
        episodes.single_turn("x", "dapo_jax.envs.arithmetic:scor")


def test_seeds_are_those_of_step_group_and_sample():
    seeds = {episodes.seed(root, step=step, group=group, sample=sample)
             for root in (0, 1) for step in range(4) for group in range(4) for sample in range(4)}
    assert len(seeds) == 128 and all(0 <= one < 2**63 for one in seeds)
    assert episodes.seed(0, step=1, group=23, sample=4) != episodes.seed(0, step=12, group=3,
                                                                         sample=4)
    assert episodes.seed(5, step=1, group=2, sample=3) == 4210909766394905841


def test_what_the_protocol_does_not_allow_is_named():
    good = episodes.Turn("x", 1.0, True)
    assert episodes.fault_of_turn(good) == ""
    for kind in (np.float32, np.float64, np.int8):
        assert episodes.fault_of_turn(dataclasses.replace(good, reward=kind(-3), parts={
            "a": kind(2)})) == ""
    for field, value in [("reply", None), ("reply", "x" * (episodes.LONGEST_TEXT + 1)),
                         ("reply", "\U0001f600" * (episodes.LONGEST_TEXT // 11)),
                         ("reply", "\ud800"), ("reward", math.nan), ("reward", np.float32("nan")),
                         ("reward", "1"), ("reward", 1j), ("reward", None), ("reward", 1e26),
                         ("reward", -10**400), ("done", 1), ("done", np.True_),
                         ("parts", {"a": math.inf}), ("parts", {1: 1.0}), ("parts", []),
                         ("parts", None), ("parts", {"": 1.0}), ("parts", {"a\n": 1.0}),
                         ("parts", {"a" * 101: 1.0}), ("parts", {"\ud800": 1.0}),
                         ("parts", {f"p{at}": 1 for at in range(episodes.MOST_PARTS + 1)})]:
        changed = dataclasses.replace(good, **{field: value})
        assert f"Turn.{field}" in episodes.fault_of_turn(changed)
    assert "a tuple, not a Turn" in episodes.fault_of_turn(("x", 1.0, True))
    messages = [{"role": "user", "content": "x"}]
    assert episodes.fault_of_start((None, messages)) == ""
    for bad in (None, messages, (None, []), (None, "x"), (None, [{"role": "user"}]),
                (None, [{"role": "user", "content": 3}]), (None, [{"role": "user"} | {
                    "content": "x", "tool": object()}]), (None, [{1: "x"} | messages[0]]),
                (None, [{"role": "user", "content": "\udfff"}]),
                (None, [{"role": "user", "content": "x" * 2**18}] * 3)):
        assert episodes.fault_of_start(bad)


@pytest.mark.parametrize("text, message", [
    ("def x(:\n", r"SyntaxError: invalid syntax \(broken_game.py, line 1\)"),
    ("raise SystemExit(3)\n", "SystemExit: 3"), ("1 / 0\n", "ZeroDivisionError"),
    ("import no_such\n", "ModuleNotFoundError: No module named 'no_such'$")])
def test_a_module_that_cannot_be_imported_is_refused_in_words(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken_game.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(config.ConfigError, match=f"cannot import module 'broken_game': {message}"):
        environments.environment("broken_game:X")


@pytest.mark.parametrize("find", [environments.environment, base.resolve_reward])
def test_a_module_whose_import_hangs_is_refused_in_time(tmp_path, monkeypatch, find):
    """It even catches the first interruption, as a download that is tried again does."""
    (tmp_path / "hanging_game.py").write_text(
        "import time\ntry:\n    time.sleep(100)\nexcept OSError:\n    time.sleep(100)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "SECONDS", 0.05)
    begun, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(config.ConfigError, match="'hanging_game'.*: its import is not over after"):
        find("hanging_game:X")
    assert time.monotonic() - begun < 50
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_environment_is_found_by_name_or_refused_with_near_names():
    assert environments.environment("calculator") is calculator.ENVIRONMENT
    assert environments.environment("dapo_jax.envs.guess_number:ENVIRONMENT").name == "guess_number"
    for name, said in [("calculater", "did you mean calculator"), ("no_such.module:X", "import"),
                       ("dapo_jax.envs.calculator:step", "no episodes.Environment")]:
        with pytest.raises(config.ConfigError, match=said):
            environments.environment(name)


@given(st.text(alphabet="<>/|[]INSTcal python output\n", max_size=80))
def test_a_plain_text_opens_and_closes_no_tag(text):
    plain = tool_calls.plain(text)
    assert tool_calls.plain(plain) == plain
    assert not any(mark in plain for mark in ("<|", "</", "<c", "<o", "[INST]", "[/INST]"))
    assert plain.replace("< ", "<").replace("[ ", "[") == text.replace("< ", "<").replace("[ ", "[")


@given(st.text(alphabet="<>/calcx", max_size=60) | st.lists(st.sampled_from(
    ["<calc>", "</calc>", "<", "1", "\n"]), max_size=12).map("".join))
def test_calls_are_those_that_a_regular_expression_finds(text):
    assert tool_calls.calls(text, "calc") == re.findall(r"<calc>(.*?)</calc>", text, re.DOTALL)


def test_a_call_that_is_not_closed_is_none_and_many_take_no_time():
    assert tool_calls.calls("<calc>1<calc>2</calc> <calc>3", "calc") == ["1<calc>2"]
    begun = time.process_time()
    assert tool_calls.calls("</calc>" + "<calc>" * 100_000, "calc") == []
    assert time.process_time() - begun < 10  # each tag looked at once: minutes if all again


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60), st.integers(1, 4))
def test_a_breaker_agrees_with_a_loop(events, bound):  # one call at a time
    state, now = breaker.Breaker(), 0
    row, open_until, opened = 0, None, 0  # the loop's own
    for worked, later in events:
        now += later
        allowed = open_until is None or now >= open_until
        assert breaker.allows(state, now, bound=bound) == allowed
        if not allowed:
            continue
        state = breaker.asked(state, bound=bound)
        if open_until is not None:  # the one that is tried
            assert not breaker.allows(state, now, bound=bound)
        state = breaker.told(state, worked, now, bound=bound, pause=3)
        row = 0 if worked else row + 1
        if worked:
            open_until = None
        elif row >= bound:
            open_until, opened = now + 3, opened + 1
        assert state.opened == opened


def test_rewards_that_the_model_did_not_earn_are_credited_to_none():  # B48
    turn = np.array([[0, 0, -1, -1, 1, 1]])
    returns = credit.discounted(np.array([[0.25, 0.5]]), np.array([2]), 1.0)
    assert credit.by_token(returns, turn).tolist() == [[0.75, 0.75, 0, 0, 0.5, 0.5]]
    with pytest.raises(ValueError, match="turns -1..1, but values of 1"):
        credit.by_token(np.zeros((1, 1), np.float32), turn)
    for counted in (3, -1):
        with pytest.raises(ValueError, match="turns, but rewards of 2"):
            credit.discounted(np.zeros((1, 2), np.float32), np.array([counted]), 1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_discounted_credit_agrees_with_a_loop(seed, discount):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(4, 5)).astype(np.float32)
    turns = rng.integers(0, 6, 4).astype(np.int32)
    found = credit.discounted(rewards, turns, discount)
    for row in range(4):
        for at in range(5):
            right = sum(float(rewards[row, k]) * discount ** (k - at)
                        for k in range(at, turns[row]))
            assert found[row, at] == pytest.approx(right, abs=1e-6)


def test_a_turn_is_compared_with_the_same_turn_of_valid_episodes():
    returns = np.array([[1, 4], [3, 8], [100, 100], [5, 0]], np.float32)
    found = credit.advantages(
        advantages.dr_grpo, returns, np.array([2, 2, 2, 1]), group=np.zeros(4, np.int32),
        valid=np.array([True, True, False, True]), lengths=np.full(4, 3),
        settings=advantages.Settings())
    assert found.tolist() == [[-2, -2], [0, 2], [0, 0], [2, 0]]
