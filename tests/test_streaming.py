"""Sampling and scoring side by side, on the real engine and with scores of any speed."""

import dataclasses
import time
import types

import jax
import numpy as np
import pytest
import runs
import tiny

from dapo_jax import command_line, config
from dapo_jax.dynamic_sampling import controller, gather
from dapo_jax.envs import parts
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect, streaming
from dapo_jax.text import tokenizer as tokenizers

STOPS = tuple(range(2, 64, 8))
LETTERS = tokenizers.Tokenizer(
    None, [b"." if i in STOPS else bytes([97 + i % 26]) for i in range(64)], stop_ids=STOPS)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


NO_POOL = types.SimpleNamespace(weights=parts.weights(()))  # its `score` is replaced


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(how=tiny.sampling(stop_ids=STOPS), slots=(2, 4), chunk=2)


def vowels(pool, texts, records):
    """1 where a text holds a vowel."""
    reward = np.array([bool(set("aeiou") & set(text)) for text in texts], np.float32)
    return pools.Scores(reward, np.ones(len(texts), bool), errors=0, timeouts=0, first_failure="")


@pytest.fixture
def source(monkeypatch, engine):
    monkeypatch.setattr(pools, "score", vowels)
    cfg = config.Config(
        rollout=config.Rollout(slots=(2, 4), mode="streaming"),
        dynamic_sampling=config.DynamicSampling(
            predictor=config.Predictor(kind="fixed", multiplier=1.5), at_limit="partial"),
        rl=config.Phase(prompts_per_step=4, samples_per_prompt=4))
    size = collect.settings(cfg, cfg.rl, filter_enabled=True)
    return collect.Source(engine, jax.random.key(7), tiny.table((4, 3, 7, 1, 5, 2, 6, 3) * 4),
                          LETTERS, judge=NO_POOL, overlong=config.Overlong(cache=2, factor=0.5),
                          size=size)


def steps(source, params, count=3, mode=streaming):
    """Collected batches of steps one after another."""
    state = controller.init(len(source.table), seed=source.size.seed, cfg=source.size.dynamic)
    held, rounds = collect.types.no_samples(tiny.NEW), []
    for step in range(count):
        rounds = []
        made = mode.collect(source, params, state=state, carried=held, step=step, rounds=rounds)
        state, held = made.controller, made.buffer
        yield made


def changed(source, **changes):
    return dataclasses.replace(source, size=dataclasses.replace(source.size, **changes))


def same(one, other):
    for a, b in zip(jax.tree.leaves((one.batch, one.buffer, one.controller)),
                    jax.tree.leaves((other.batch, other.buffer, other.controller)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert str(one.report) == str(other.report)
    assert [r.texts for r in one.rounds] == [r.texts for r in other.rounds]
    assert one.use == other.use


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_decisions_do_not_depend_on_how_fast_a_reward_was(source, params, monkeypatch, lag):
    source = changed(source, stream=gather.Streaming(lag, "drop"))
    whole = list(steps(source, params))
    luck = np.random.default_rng(lag)

    def slow(*arguments):
        time.sleep(luck.choice([0.0, 0.002, 0.02]))
        return vowels(*arguments)

    monkeypatch.setattr(pools, "score", slow)
    for one, other in zip(whole, steps(source, params), strict=True):
        same(one, other)
    assert sum(one.report.asked for one in whole) > 12 and all(one.rounds for one in whole)


def test_completions_are_those_of_rounds_for_the_same_prompt_visit_and_sample(source, params):
    def drawn(made):
        return {(int(s.prompt[i]), int(s.visit[i]), int(s.sample[i])): s.tokens[i].tolist()
                for one in made for r in one.rounds for s in [r.samples] for i in range(len(s))}

    stream, rounds = drawn(steps(source, params)), drawn(
        steps(changed(source, stream=None), params, mode=collect))
    both = stream.keys() & rounds.keys()
    assert len(both) > 30
    assert all(stream[key] == rounds[key] for key in both)


def test_every_sample_is_scored_on_its_own_text_and_counted(source, params):
    for made in steps(source, params):
        assert sum(len(one.samples) for one in made.rounds) == made.report.samples
        for one in made.rounds:
            for row, text in enumerate(one.texts):
                tokens = one.samples.tokens[row, :one.samples.length[row]]
                assert text == LETTERS.decode(tokens.tolist())
                assert one.samples.reward[row] == bool(set("aeiou") & set(text))
        values = collect.metrics(made, step=0)
        assert values["sampling/chunks"] == made.use.chunks > 1
        assert values["sampling/row_use"] == made.use.live / made.use.computed
        assert values["time/rollout"] > 0 and values["time/reward"] >= 0


def test_completions_end_at_stop_texts(source, params):
    whole = next(steps(source, params))
    texts = [text for one in whole.rounds for text in one.texts]
    stop = max(texts, key=len)[1:3]
    cut = next(steps(dataclasses.replace(source, stop_texts=(stop,)), params))
    found = [text for one in cut.rounds for text in one.texts if stop in text]
    assert found and all(text.endswith(stop) and text.count(stop) == 1 for text in found)


def test_an_error_of_scoring_ends_the_step_and_leaves_nothing_running(source, params, monkeypatch):
    def wrong(*arguments):
        raise pools.RewardTypeError("no number")

    monkeypatch.setattr(pools, "score", wrong)
    with pytest.raises(pools.RewardTypeError, match="no number"):
        next(steps(source, params))


STREAMING = {"rollout.mode": "streaming", "rollout.chunk": 2, "sft.steps": 0, "rl.steps": 1,
             "eval.every": 0, "eval.greedy": False}


@pytest.mark.parametrize("reward, kind", [("hangs", "reward_timeout"), ("dies", "reward_error")])
def test_a_worker_that_hangs_or_dies_costs_its_samples_and_bounded_time(
        tmp_path, monkeypatch, reward, kind):
    runs.reuse_programs(monkeypatch)
    changes = STREAMING | {"task.reward": f"tests.run_rewards:{reward}", "scoring.timeout": 0.3,
                           "eval.prompts": 1, "eval.samples": 2}
    assert runs.run(tmp_path, changes) == command_line.DONE
    lines = runs.steps(tmp_path)
    failed = sum(line[f"invalid/{kind}"] for line in lines)
    rows = [row for line in lines for row in runs.rollouts(tmp_path, line["step"])]
    assert failed == sum(not row["valid"] for row in rows) > 0
    assert all(row["valid"] != (row["completion"][:1] == "7") for row in rows)
    for line in lines:
        assert line["time/reward"] < 0.3 * line[f"invalid/{kind}"] + 5
    assert all(row["reward"] == 0 for row in rows if not row["valid"])


@pytest.mark.slow
def test_a_streaming_run_that_ends_anywhere_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    runs.reuse_programs(monkeypatch)
    changes = STREAMING | {"sft.steps": 4, "rl.steps": 6, "eval.every": 3, "eval.greedy": True,
                           "rollout.in_flight": "drop"}
    assert runs.run(tmp_path / "whole", changes) == command_line.DONE
    for count in (1, 3):
        write, calls = runs.train.metrics.write, []

        def crash(writer, line, count=count, write=write, calls=calls):
            write(writer, line)
            calls.append(line["step"] > 4)
            if sum(calls) == count:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(runs.train.metrics, "write", crash)
            with pytest.raises(KeyboardInterrupt):
                runs.run(tmp_path / str(count), changes)
        assert runs.run(tmp_path / str(count), changes) == command_line.DONE
        runs.assert_same_run(tmp_path / str(count), tmp_path / "whole")
