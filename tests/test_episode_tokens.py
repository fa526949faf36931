"""Tokens in are tokens out: what was sampled stays as it is, replies are encoded once."""

import collections

import numpy as np
import pytest

from dapo_jax import types
from dapo_jax.envs import episode_pool, parts
from dapo_jax.rollout import episodes_talk, turns
from dapo_jax.text import replies, tokenizer

PIECES = ("", "he", "llo", "hello", "x", ".")


def greedy(text, start):
    """Ids of the longest pieces: of what was sampled as `he` `llo` it makes `hello`."""
    ids = []
    while text:
        best = max((one for one in PIECES[1:] if text.startswith(one)), key=len)
        ids, text = [*ids, PIECES.index(best)], text[len(best):]
    return ids


TOY = tokenizer.Tokenizer(greedy, tuple(one.encode() for one in PIECES), stop_ids=(0,))


def follow(pool, episodes_given, *, group=0):
    """The tokens, mask and log-probs that the sampler and the driver make of turns of token ids."""
    own = episodes_talk.Scene(pool, replies.encoder(TOY, None, role=""), TOY.decode,
                              parts.Weights(), seed=0, turns=99, turn_tokens=0, seconds=30.0)
    table = types.PromptTable((np.array([1]),), ({"prompt": "x"},), ())
    size = np.array([len(episodes_given)], np.int32)
    plan = types.Plan(*(np.zeros(1, np.int32) for _ in range(2)), np.array([group], np.int32), size)
    desk = episodes_talk.begin(own, plan, table=table, step=0, limits=np.array([400]), ahead=4)
    talk, rows = episodes_talk.talk(desk), [[] for _ in episodes_given]

    def end(sample, turn):
        ids = np.array(episodes_given[sample][turn], np.int32)
        rows[sample] += [(token, True, -float(token)) for token in ids.tolist()]
        return turns.Ended(group, sample, 0, 0, turn, ids, -ids.astype(np.float32),
                           len(rows[sample]), True)

    at = [0] * len(rows)
    talk.ended([end(sample, 0) for sample in range(len(rows))])
    while talk.waiting():
        going = [reply for reply in talk.replies(10.0) if not reply.over]
        for reply in going:
            rows[reply.sample] += [(token, False, 0.0) for token in reply.tokens.tolist()]
            at[reply.sample] += 1
        talk.ended([end(reply.sample, at[reply.sample]) for reply in going])
    width = max(map(len, rows))
    columns = [np.array([[row[place][of] if place < len(row) else 0 for place in range(width)]
                         for row in rows]) for of in range(3)]
    return desk, columns, np.array(list(map(len, rows)), np.int32)


@pytest.fixture(scope="module")
def echo():
    with episode_pool.open("talk_environments:ECHO", episode_pool.Limits(memory_mb=1000)) as pool:
        yield pool


def checked(desk, columns, length):
    tokens, mask, logprobs = columns
    count = len(length)
    zeros = np.zeros(count, np.int32)
    samples = types.Samples(
        tokens.astype(np.int32), mask.astype(bool), logprobs.astype(np.float32), length,
        np.ones(count, bool), zeros, zeros, np.ones(count, bool), zeros, zeros, zeros,
        np.arange(count, dtype=np.int32), zeros)
    return episodes_talk.finish(desk, samples, before=collections.Counter())[1]


def test_sampled_tokens_are_never_encoded_again(echo):  # B50
    desk, columns, length = follow(echo, [[[1, 2], [3, 5]]])
    tokens, mask, logprobs = (column[0].tolist() for column in columns)
    assert tokens == [1, 2, 4, 3, 5] and mask == [True, True, False, True, True]
    assert logprobs == [-1, -2, 0, -3, -5]
    found = checked(desk, columns, length)
    assert [turn.text for turn in found.episodes[0].turns] == ["hello", "hello."]
    wrong = [columns[0].copy(), *columns[1:]]
    wrong[0][0, :4] = [3, 4, 3, 5]  # decoded and encoded again
    assert checked(desk, wrong, length - 1).episodes[0].failure == "turn"


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_tokens_in_are_tokens_out_for_random_episodes(echo, count):
    rng, batch = np.random.default_rng(0), 100
    for start in range(0, count, batch):
        given = [[[*rng.integers(1, 5, rng.integers(1, 7)).tolist(), *[5] * last]
                  for last in [0] * rng.integers(0, 5) + [1]] for _ in range(batch)]
        desk, (tokens, mask, logprobs), length = follow(echo, given, group=start)
        for row, turned in enumerate(given):
            spelled, plain = [], []
            for at, ids in enumerate(turned):
                told = [4] * (1 + sum(len(PIECES[one]) for one in ids) % 5) * (at < len(turned) - 1)
                spelled, plain = spelled + ids + told, plain + [True] * len(ids) + [
                    False] * len(told)
            assert tokens[row, :length[row]].tolist() == spelled
            assert mask[row, :length[row]].tolist() == plain
            assert logprobs[row, :length[row]].tolist() == [
                -one if own else 0 for one, own in zip(spelled, plain)]
        assert {one.failure for one in desk_episodes(desk)} == {""}


def desk_episodes(desk):
    return [live.episode for live in desk.live.values()]
