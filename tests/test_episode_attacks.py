"""Whatever an environment does costs its own episode at most, is counted, and earns nothing."""

import copy
import inspect

import attack_environments
import numpy as np
import pytest

from dapo_jax.envs import episode_play, episode_pool, episode_rewards, episodes, parts

RECORD = {"prompt": "x", "answer": "1"}
LINE = 1 + inspect.getsource(attack_environments).partition('json.loads("{")')[0].count("\n")
# What is done in the only turn: the kind of the failure and words of its message.
TURNS = {
    "numpy": ("", ""), "own": ("", ""), "read": ("", ""), "loud": ("", ""), "stay": ("", ""),
    "none": ("turn", "returned a NoneType, not a Turn"),
    "half": ("turn", "Turn.reply holds half of a surrogate pair"),
    "long": ("turn", "Turn.reply is of 600002 bytes as JSON, more than"),
    "object": ("turn", "Turn.reply is of type object, not a text"),
    "endless": ("turn", "Turn.reward = inf"), "large": ("turn", "Turn.reward = -1000"),
    "word": ("turn", "Turn.reward = '1'"), "named": ("turn", "Turn.parts"),
    "not done": ("turn", "Turn.done = None"),
    "local": ("turn", "attacks: step returned a state that cannot be pickled: "),
    "library": ("error", f"attack_environments.py:{LINE}: json.decoder.JSONDecodeError: Expecting"),
    "exit": ("error", "SystemExit: 3"), "closed": ("ended", "its worker ended with status"),
    "fault": ("ended", "its worker ended with status -11")}
STARTS = {"object": ("turn", "all of them texts"), "half": ("turn", "half of a surrogate pair"),
          "long": ("turn", "what start tells is of"), "exit": ("error", "SystemExit: on purpose")}


@pytest.fixture(scope="module")
def played():
    """A good episode after each bad one, on one worker."""
    begun = [episode_play.Episode("a", RECORD | {"tell": tell}, 0) for tell in STARTS]
    begun += [episode_play.Episode("a", RECORD, 0) for _ in TURNS]
    begun = [one for pair in zip(begun, [episode_play.Episode("a", RECORD, 0)] * len(begun))
             for one in pair]
    before, texts = copy.deepcopy(begun), [*STARTS, *TURNS]
    limits = episode_pool.Limits(timeout=20.0, memory_mb=400, bound=1000)
    with episode_pool.open("attack_environments:ATTACKS", limits) as pool:
        found = episode_play.play(
            pool, begun, lambda place, one: "good" if place % 2 else texts[place // 2], turns=1,
            seconds=300.0)
        counts = dict(pool.failures)
    assert begun == before  # an environment gets a record of its own
    return found, counts


@pytest.mark.parametrize("at, kind, words", [
    (at, *wanted) for at, wanted in enumerate([*STARTS.values(), *TURNS.values()])],
    ids=[f"start {name}" for name in STARTS] + list(TURNS))
def test_only_the_episode_at_fault_fails_in_words(played, at, kind, words):
    found, _ = played
    bad, good = found[2 * at:2 * at + 2]
    assert bad.failure == kind and words in bad.message
    assert (good.failure, good.done, good.reward, good.turns[0].text) == ("", True, 1.0, "good")


def test_every_failure_is_counted_and_none_is_paid_or_charged(played):
    found, counts = played
    kinds = [kind for kind, _ in [*STARTS.values(), *TURNS.values()] if kind]
    assert counts == {kind: kinds.count(kind) for kind in kinds}
    scores = episode_rewards.scores(found, parts.Weights())
    assert scores.failures == {kind: kinds.count(kind) for kind in episodes.FAILURES}
    assert (~scores.valid).sum() == len(kinds)
    failed = np.array([bool(one.failure) for one in found])
    assert (scores.valid == ~failed).all() and not scores.reward[failed].any()
