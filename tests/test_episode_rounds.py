"""A round of episodes as the controller and the log see it; a chaotic environment in small."""

import collections
import time
import types as types_lib

import numpy as np
import pytest
import talk_environments
import test_episodes_talk as talks

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import filter as filters
from dapo_jax.envs import episode_pool, episodes, parts
from dapo_jax.rollout import collect, engine, talking


@pytest.fixture(scope="module")
def pool():
    with episode_pool.open("talk_environments:FAULTY", episode_pool.Limits(
            timeout=3.0, memory_mb=1000, bound=1000)) as opened:
        yield opened


def sampled(monkeypatch, scene, scripts, *, context=0, **changes):
    """A round whose model writes these texts: a group for each entry."""
    def sample(engine_, params, plan, *, table, root, step, talk):
        return types_lib.SimpleNamespace(samples=talks.serve(talk, plan, scripts),
                                         use=engine.Use(idle=0.5))

    monkeypatch.setattr(talking, "sample", sample)
    device = types_lib.SimpleNamespace(
        sampling=types_lib.SimpleNamespace(max_new_tokens=talks.WIDTH), max_context=context,
        slots=(2,), rows=1)
    ids = np.arange(len(scripts), dtype=np.int32)
    table = types.PromptTable((np.array([1]),), ({"prompt": "x", "answer": "1"},), ())
    source = collect.Source(device, None, table, talks.TOKENIZER, scene, config.Overlong(),
                            **changes)
    plan = types.Plan(np.zeros_like(ids), np.zeros_like(ids), ids,
                      np.array([len(group) for group in scripts], np.int32))
    return collect.sample_round(source, None, plan, step=5), table


def test_a_round_of_episodes_has_rewards_texts_and_a_log(monkeypatch, pool):
    scene = talks.scene(pool, weights=parts.Weights(named=(("good", 0.5),)), by_turn=4)
    one, table = sampled(monkeypatch, scene, [[["a\n", "end\n"], ["a\n", "raise\n"]], [["end\n"]]])
    assert isinstance(one.samples, types.Episodes)
    assert one.samples.reward.tolist() == [2, 0, 1] and one.samples.shaped.tolist() == [2.5, 0, 1]
    assert one.samples.valid.tolist() == [True, False, True]
    assert one.samples.turn_rewards[0].tolist() == [1.5, 1, 0, 0]
    assert one.texts[:2] == ["a\nend\n", "a\nraise\n"] and one.finals[0] == "end\n"
    rows = collect.rows([one], table, step=5, kept=None, limit=0)
    assert rows[0]["episode"]["turns"][0]["reply"] == "so\n"
    assert rows[1]["episode"]["failure"] == "error" and rows[1]["valid"] is False
    seeds = [row["episode"]["seed"] for row in rows]
    assert seeds[0] == episodes.seed(0, step=collect.EVALUATED, group=0, sample=0)
    assert len(set(seeds)) == 3


def test_a_group_with_fewer_than_two_valid_episodes_is_invalid_and_counted(monkeypatch, pool):
    one, _ = sampled(monkeypatch, talks.scene(pool), [
        [["a\n", "end\n"], ["end\n"], ["raise\n"]], [["end\n"], ["die\n"], ["nan\n"]]])
    classes = filters.informative(one.samples, config.Filter())
    assert classes.kind.tolist() == [filters.INFORMATIVE, filters.INVALID]
    assert len(filters.keep(one.samples, np.array([0]))) == 2
    assert sum(one.scores.failures.values()) == 3


def test_the_context_limits_an_episode_by_its_prompts_length(monkeypatch, pool):  # B47
    """A prompt of one token; a turn, what it is told and a turn are 2 + 3 + 2 tokens."""
    scripts = [[["a\n"] * 4, ["a\n", "end\n"], ["a\n", "endless"]]]
    ends = {context: sampled(monkeypatch, talks.scene(pool), scripts, context=context)[0]
            for context in (6, 7, 10, 13)}
    assert ends[6].played.ends == ("tokens",) * 3  # 5 tokens leave none for a second turn
    assert ends[7].samples.length.tolist() == [6] * 3  # and 6 leave one
    assert ends[10].played.ends == ("tokens", "done", "tokens")
    assert ends[10].samples.stopped.tolist() == [False, True, False]
    assert ends[13].samples.length.tolist()[1:] == [9, 12]


def test_chaos_stalls_nothing_and_every_failure_is_counted(monkeypatch):
    limits = episode_pool.Limits(workers=2, timeout=0.6, memory_mb=1000, bound=1000)
    scripts, begun = [[["1\n", "2\n"]] * 4] * 12, time.monotonic()
    with episode_pool.open("talk_environments:CHAOTIC", limits) as pool:
        one, _ = sampled(monkeypatch, talks.scene(pool, seconds=20.0), scripts)
        made = collections.Counter(pool.failures)
    fates = [[talk_environments.fate_of(episode.seed, turn)[0] for turn in range(2)]
             for episode in one.played.episodes]
    first = ["fine" if set(pair) == {"fine"} else pair[pair[0] == "fine"] for pair in fates]
    wanted = {"fine": "", "raise": "error", "hang": "timeout", "exit": "ended"}
    assert [episode.failure for episode in one.played.episodes] == [wanted[one] for one in first]
    assert one.samples.valid.tolist() == [fate == "fine" for fate in first]
    assert one.samples.reward.tolist() == [float(fate == "fine") for fate in first]
    counts = collections.Counter(wanted[fate] for fate in first if fate != "fine")
    assert counts == {kind: made[kind] for kind in counts} and len(counts) == 3
    assert counts == {kind: count for kind, count in one.scores.failures.items() if count}
    # Each hang costs one worker its limit, each dead worker a new one; nothing costs more.
    assert time.monotonic() - begun < 2 * (counts["timeout"] + counts["ended"]) + 20
