"""An environment in the configuration: what it cannot be together with, and what opens it."""

import dataclasses
import math
import re

import pytest
import runs
import tiny_config

from dapo_jax import config, config_checks, setup, setup_environment
from dapo_jax.envs import calculator, environments
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import episodes_talk
from dapo_jax.text import plain

ALPHABET = "0123456789+-*/=()<>.,:' \nabcdefghijklmnopqrstuvwxyz"
CALCULATOR = {"environment.name": "calculator", "task.reward": "", "task.operators": "*",
              "tokenizer.alphabet": ALPHABET, "rollout.max_new_tokens": 44, "rollout.chunk": 8}


def configured(**changes):
    return runs.configure(CALCULATOR | changes)


@pytest.mark.parametrize("changes, message", [
    ({"rollout.mode": "streaming"}, "rollout.mode = 'streaming' knows completions of one turn"),
    ({"task.reward": "tests.run_rewards:odd"}, "gives the rewards itself: leave it at ''"),
    ({"scoring.on_failure": "reward"}, "leave it at 'mask'"),
    ({"task.reward_weights": (("a:b", 1.0),)}, "names the function 'a:b'"),
    ({"dynamic_sampling.predictor.kind": "cost_optimal"}, "set round_cost and prompt_cost too"),
    ({"environment.turn_tokens": 45}, "more than all of an episode"),
    ({"environment.discount": 0.9}, "no effect on terminal credit"),
    ({"task.chat": True}, "whose message a reply is: set it to 'user'"),
    ({"environment.name": "", "environment.credit": "discounted"}, "without an environment"),
    ({"environment.name": "", "task.name": "environment"}, "set config.environment.name"),
    ({"environment.turns": 0}, "environment.turns is 0; it must be from 1 to"),
    ({"environment.turns": 10**12}, "environment.turns is 1000000000000; it must be from 1 to"),
    ({"environment.seconds": 0.0}, "environment.seconds is"),
    ({"environment.seconds": math.nan}, "environment.seconds is nan"),
    ({"environment.parked": -1}, "environment.parked is -1; it must be from 0"),
    ({"environment.parked_host": 10**9}, "environment.parked_host is"),
    ({"environment.reply_lag": 10**9}, "environment.reply_lag is"),
    ({"environment.discount": 2.0, "environment.credit": "discounted"}, "discount is 2.0; it must"),
    ({"environment.demonstrated": 1.5}, "environment.demonstrated is 1.5; it must be from 0 to 1"),
    ({"environment.role": "system"}, r"role is 'system'; allowed: '' \(nothing\), user, tool"),
    ({"environment.credit": "best"}, "allowed: terminal, discounted")])
def test_contradictions_are_refused_with_what_to_do(changes, message):
    with pytest.raises(config.ConfigError, match=message):
        configured(**changes)


@pytest.mark.parametrize("changes, message", [
    ({"environment.name": "calculater"}, "no environment 'calculater'; did you mean calculator"),
    ({"environment.name": "talk_environments:FAULT"}, "did you mean FAULTY"),
    ({"environment.name": "talk_environments:step"}, "no episodes.Environment; it has FAULTY, CH"),
    ({"environment.name": "talk_environments.py:FAULTY"}, "write it as for import, without .py"),
    ({"environment.name": "./talk_environments:FAULTY"}, "write it as for import"),
    ({"environment.name": "no_such:X"}, "named 'no_such': modules are looked for in this folder"),
    ({"environment.name": "wrong_environments:START"}, r"start takes \(record\); it is called"),
    ({"environment.name": "wrong_environments:STEP"}, "step is 3, which cannot be called"),
    ({"environment.name": "wrong_environments:LATER"}, "step is a coroutine; it must be a plain"),
    ({"environment.name": "wrong_environments:PARTS"}, "parts = 'calls' must be a tuple of names"),
    ({"task.reward_weights": (("cals", 1.0),)}, "no part 'cals'; did you mean calls"),
    ({"environment.role": "user"}, "comes with none"),
    ({"rollout.stop": ("\n", "no")}, "'no' is of several tokens")])
def test_what_cannot_be_played_is_refused_before_anything_is_compiled(changes, message):
    with pytest.raises(config.ConfigError, match=message):
        setup.prepare(configured(**changes))


@pytest.mark.parametrize("name", ["calculator", "python", "guess_number"])
def test_an_environment_brings_its_own_problems(name):
    parts = setup.prepare(runs.configure(CALCULATOR | {
        "environment.name": name, "task.name": "environment", "task.operators": "+",
        "tokenizer.kind": "bytes", "prompts.buckets": (256,), "sft.steps": 0}))
    assert len(parts.train_table) == 60 and len(parts.eval_table) == 6
    asked = {record["prompt"] for record in parts.train_table.records}
    assert not asked & {record["prompt"] for record in parts.eval_table.records}


def made(*records):
    return lambda **given: list(records)


def falls(**given):
    raise LookupError("on purpose")


PROBLEM = {"prompt": "x", "answer": "1"}


@pytest.mark.parametrize("records, message", [
    (falls, r"records raised LookupError: on purpose \(.*test_setup_environment.py:\d+\)"),
    (lambda: None, "records raised TypeError"), (lambda **given: None, "records raised TypeError"),
    (made("x"), "problem 0 that records made for 'train' is 'x'; it must be a dict whose"),
    *((made(PROBLEM | {"prompt": prompt}), "whose 'prompt' is a text or messages, one of")
      for prompt in (3, [], [3], [{"role": "user"}], [{"role": "system", "content": "x"}])),
    (made(PROBLEM | {"answer": 3}), "whose 'answer' is a text"),
    (made(PROBLEM, {"prompt": "x"}), "problem 1 .* whose 'answer'"),
    (made(PROBLEM | {"seen": {1, 2}}), "has 'seen': {1, 2}, which is not the same"),
    (made(PROBLEM | {"at": (1, 2)}), "has 'at'"), (made(PROBLEM | {"at": math.nan}), "has 'at'"),
    (made(PROBLEM | {"by": {1: 2}}), "has 'by'"), (made(PROBLEM | {"own": print}), "has 'own'")])
def test_problems_of_an_environment_that_cannot_be_used_are_named(monkeypatch, records, message):
    own = dataclasses.replace(calculator.ENVIRONMENT, records=records)
    monkeypatch.setattr(environments, "environment", lambda name: own)
    with pytest.raises(config.ConfigError, match=f"environment 'calculator': .*{message}"):
        environments.build(configured(), "train")


def test_a_problem_may_be_messages_with_the_template_around_the_users_last(monkeypatch):
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    own = dataclasses.replace(calculator.ENVIRONMENT, records=made(PROBLEM | {"prompt": asked}))
    monkeypatch.setattr(environments, "environment", lambda name: own)
    records, counts = environments.build(configured(**{"task.template": "Do {prompt}!"}), "eval")
    assert records == [PROBLEM | {"prompt": [asked[0], {"role": "user", "content": "Do x!"}]}]
    assert counts == {"missing": 5}


@pytest.mark.parametrize("raised", [LookupError("no licence"), SystemExit("no licence")])
def test_an_environment_that_is_not_ready_is_refused_in_words(monkeypatch, raised):
    def ready():
        raise raised

    own = dataclasses.replace(calculator.ENVIRONMENT, ready=ready)
    monkeypatch.setattr(environments, "environment", lambda name: own)
    judge = setup_environment.judge(configured(), plain.characters(ALPHABET), "")
    with pytest.raises(config.ConfigError, match="ready raised .*: no licence"), judge:
        raise AssertionError("it was opened")


def test_a_run_without_an_environment_is_scored_by_a_pool():
    cfg = config_checks.from_dict(tiny_config.get_config())
    with setup_environment.judge(cfg, plain.characters(ALPHABET), "tests.run_rewards:odd") as judge:
        assert isinstance(judge, pools.Pool)


def test_an_environment_starts_at_once_and_tells_the_prompt():
    cfg = configured(**{"environment.name": "talk_environments:FAULTY", "environment.turns": 3,
                        "environment.credit": "discounted", "environment.memory_mb": 1000})
    with setup_environment.judge(cfg, plain.characters(ALPHABET), "") as scene:
        assert isinstance(scene, episodes_talk.Scene)
        assert (scene.turns, scene.by_turn, scene.seconds) == (3, 3, 60.0)
        assert scene.encode("so\n", 1).tolist() == plain.characters(ALPHABET).encode("so\n")
        setup_environment.try_out(scene, [{"prompt": "x"}] * 3)
        with pytest.raises(config.ConfigError, match="make start tell episodes.told"):
            setup_environment.try_out(scene, [{"prompt": "x", "other": True}])
        with pytest.raises(config.ConfigError, match="cannot play an episode.* 'x': .*TypeError"):
            setup_environment.try_out(scene, [{"prompt": "x", "late": "a"}])


@pytest.fixture(scope="module")
def tried():
    cfg = configured(**{"environment.name": "talk_environments:FAULTY",
                        "environment.memory_mb": 1000, "environment.bound": 1000})
    with setup_environment.judge(cfg, plain.characters(ALPHABET), "") as scene:
        yield scene


@pytest.mark.parametrize("text, words", [
    ("raise", "faulty: .*talk_environments.py:26: ZeroDivisionError: on purpose"),
    ("nan", "faulty: Turn.reward = nan is no finite number"),
    ("bad reply", "its reply cannot be told: .*ä.* add it to config.tokenizer.alphabet"),
    ("empty", "Turn.reply is empty, but done is False"), ("die", "its worker ended with status 3"),
    ("forget", "TypeError: unsupported operand")])  # in the second turn: the first has no state
def test_an_environment_is_refused_if_all_episodes_fail_that_are_tried(tried, caplog, text, words):
    always = [{"prompt": "x", "answer": text, "always": text}]
    with pytest.raises(config.ConfigError, match=f"'talk_environments:FAULTY' cannot .*{words}"):
        setup_environment.try_out(tried, always)
    assert not caplog.records
    setup_environment.try_out(tried, [{"prompt": "x", "answer": text}] * 2)  # not to an empty text
    (line,) = caplog.records
    assert re.search("failed in 1 of the 2 episodes that were tried; first: .*" + words,
                     line.getMessage())
