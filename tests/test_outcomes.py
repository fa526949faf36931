"""What an episode's turns are followed by, token by token at the limits; numbers alone."""

import numpy as np
import pytest

from dapo_jax.envs import episode_play
from dapo_jax.rollout import outcomes, turns


def after(reply, *, length, limit=20, done=False, before=0, most_turns=3, turn_tokens=0):
    """The outcome of a turn of two tokens; `reply` is as many tokens as it has characters."""
    played = [episode_play.Played("", reply, 0.0, done, {}, 0.0)] * (before + 1)
    ended = turns.Ended(0, 0, 0, 0, before, np.array([5, 6]), np.zeros(2), length, True)
    return outcomes.after(episode_play.Episode("e", {}, 0, turns=tuple(played)), ended,
                          encode=lambda text, last: np.arange(len(text)) + last, limit=limit,
                          most_turns=most_turns, turn_tokens=turn_tokens)


@pytest.mark.parametrize("length, told, budget", [
    (2, 17, 20), (2, 18, None), (2, 99, None), (18, 1, 20), (19, 1, None), (20, 1, None)])
def test_a_reply_is_told_if_the_model_can_then_write_a_token(length, told, budget):
    found = after("x" * told, length=length)
    if budget is None:
        assert (found.end, len(found.tokens)) == ("tokens", 0)
    else:
        assert (found.end, found.budget) == ("", budget)
        assert found.tokens.tolist() == list(range(6, 6 + told))  # after the turn's last token


@pytest.mark.parametrize("turn_tokens, budget", [(0, 20), (1, 8), (4, 11), (13, 20), (14, 20)])
def test_a_turns_own_limit_counts_from_the_reply_on(turn_tokens, budget):
    assert after("xxx", length=4, turn_tokens=turn_tokens).budget == budget  # 4 + 3 are there


def test_the_environments_end_comes_before_the_limit_of_turns_and_that_before_the_reply():
    assert after("x", length=2, before=2, done=True).end == "done"
    assert after("x" * 99, length=2, before=2).end == "turns"
    assert after("x", length=2, before=1).end == ""
    assert after("", length=2, done=True).end == "done"  # what it would say is not asked for
    found = after("", length=2)
    assert (found.end, found.fault) == (
        "failed", "the reply has no tokens, but the episode goes on")


def test_truncated_is_what_hit_its_limit_without_a_stop():  # B47
    """Of three episodes of at most 4 tokens, the environment said `done` to each."""
    rows = [(True, 4), (False, 4), (True, 2)]  # [5, 6, 7, stop], [5, 6, 7, 8], [5, stop]
    assert [outcomes.stopped("done", by_itself=own, length=length, limit=4)
            for own, length in rows] == [True, False, True]
    # Room for 6 tokens and a prompt of 4 leave 2; a turn's own limit truncates nothing.
    assert not outcomes.stopped("done", by_itself=False, length=2, limit=2)
    assert outcomes.stopped("done", by_itself=False, length=2, limit=3)
    for end in ("turns", "tokens", "failed"):
        assert not outcomes.stopped(end, by_itself=True, length=2, limit=4)
