"""Episodes beside the sampler: what becomes of turns, replies, limits and failures.

`serve` below is a plain loop in place of the sampler: it "samples" texts that the test gives.
"""

import collections
import time
import types as types_lib

import numpy as np
import pytest
import talk_environments

from dapo_jax import config, types
from dapo_jax.envs import episode_play, episode_pool, episode_rewards, episodes, parts
from dapo_jax.rollout import episodes_talk, turns
from dapo_jax.text import plain, replies

WIDTH = 60
ALPHABET = "0123456789*+-/=<>(). \nabcdefghijklmnopqrstuvwxyz:',!_"
TOKENIZER = plain.characters(ALPHABET)
RECORD = {"prompt": "12*34=", "answer": "408"}
CALL, ANSWER = "<calc>12*34</calc>\n", "408\n"


def scene(pool, **changes):
    return episodes_talk.Scene(
        pool, replies.encoder(TOKENIZER, None, role=""), TOKENIZER.decode,
        **{"weights": parts.Weights(), "seed": 0, "turns": 4, "turn_tokens": 0, "seconds": 30.0,
           **changes})


def serve(talk, plan, scripts, *, limit=WIDTH):
    """Samples whose turns are texts of scripts[group][sample], cut at their budgets."""
    rows, live, ended = {}, {}, {}
    for group, size in zip(plan.group.tolist(), plan.size.tolist()):
        for sample in range(size):
            live[group, sample] = [], [], talk.first_budget
    waiting = {}
    while live or waiting:
        ends = []
        for key in list(live):
            tokens, mask, budget = live.pop(key)
            turn = sum(1 for at, on in enumerate(mask) if on and not (at and mask[at - 1]))
            drawn = TOKENIZER.encode(scripts[key[0]][key[1]][turn])[:budget - len(tokens)]
            stopped = TOKENIZER.decode(drawn).endswith("\n")
            tokens, mask = tokens + drawn, mask + [True] * len(drawn)
            waiting[key], ended[key] = (tokens, mask), stopped
            ends.append(turns.Ended(*key, 0, 0, turn, np.array(drawn, np.int32),
                                    np.full(len(drawn), -1, np.float32), len(tokens), stopped))
        talk.ended(ends)
        for reply in talk.replies(10.0):
            key = reply.group, reply.sample
            tokens, mask = waiting.pop(key)
            assert reply.over == (not len(reply.tokens))
            told = tokens + reply.tokens.tolist(), mask + [False] * len(reply.tokens)
            if reply.over:
                rows[key] = (*told, reply.valid)
            else:
                assert len(told[0]) < reply.budget <= limit
                live[key] = (*told, reply.budget)
    assert talk.waiting() == 0
    return _samples(rows, ended)


def _samples(rows, ended):
    keys, size = sorted(rows), (len(rows), WIDTH)
    tokens, mask = np.zeros(size, np.int32), np.zeros(size, bool)
    for row, key in enumerate(keys):
        tokens[row, :len(rows[key][0])], mask[row, :len(rows[key][1])] = rows[key][:2]
    zeros = np.zeros(len(keys), np.int32)
    return types.Samples(
        tokens, mask, np.where(mask, -1, 0).astype(np.float32),
        np.array([len(rows[key][0]) for key in keys], np.int32), np.array([ended[k] for k in keys]),
        zeros.astype(np.float32), zeros.astype(np.float32),
        np.array([rows[key][2] for key in keys]), np.array([key[0] for key in keys], np.int32),
        zeros, zeros, np.array([key[1] for key in keys], np.int32), zeros)


def played(pool, scripts, *, record=RECORD, limit=WIDTH, **changes):
    """Samples and their episodes: a group for each entry of scripts."""
    count, own = len(scripts), scene(pool, **changes)
    ids, before = np.arange(count, dtype=np.int32), collections.Counter(pool.failures)
    plan = types.Plan(np.zeros_like(ids), np.zeros_like(ids), ids,
                      np.array([len(group) for group in scripts], np.int32))
    table = types.PromptTable((np.array([1]),), (record,), ())
    desk = episodes_talk.begin(own, plan, table=table, step=3, limits=np.full(count, limit),
                               ahead=2)
    samples = serve(episodes_talk.talk(desk), plan, scripts, limit=limit)
    return episodes_talk.finish(desk, samples, before=before)


@pytest.fixture(scope="module")
def calculated():
    with episode_pool.open("calculator", episode_pool.Limits(memory_mb=1000)) as pool:
        yield pool


@pytest.fixture(scope="module")
def faulty():
    with episode_pool.open("talk_environments:FAULTY", episode_pool.Limits(
            timeout=3.0, memory_mb=1000, bound=1000)) as pool:
        yield pool


def text_of(samples, row):
    return TOKENIZER.decode(samples.tokens[row, :samples.length[row]].tolist())


def test_the_sample_is_the_turns_and_the_replies_between_them(calculated):
    samples, found = played(calculated, [[[CALL, ANSWER], ["408\n"], ["409\n"]], [[CALL] * 4]])
    assert [text_of(samples, row) for row in range(3)] == [
        CALL + "<result>408</result>\n" + ANSWER, "408\n", "409\n"]
    reply = len("<result>408</result>\n")
    assert samples.loss_mask[0].tolist() == [True] * len(CALL) + [False] * reply + [
        True] * len(ANSWER) + [False] * (WIDTH - len(CALL) - reply - len(ANSWER))
    assert turns.turn_numbers(samples.loss_mask)[0, len(CALL) - 1:][[0, 1, reply + 1]].tolist() == [
        0, -1, 1]
    assert [one.reward for one in found.episodes[:3]] == [1, 1, 0]
    assert [turn.text for turn in found.episodes[0].turns] == [CALL, ANSWER]
    assert found.told.tolist()[:3] == [reply, 0, 0]
    assert len(found.latency) == 4 + sum(len(one.turns) for one in found.episodes)


def test_limits_of_tokens_and_turns_truncate_without_failing(calculated):
    long = "<calc>9**60</calc>\n"  # its result does not fit
    _, found = played(calculated, [[[long], [CALL, CALL, CALL]]])
    assert found.ends == ("tokens", "tokens")  # 19 + 21 + 19 + 21 > 60
    samples, found = played(calculated, [[["<calc>1</calc>\n"] * 2, ["408\n"]]], turns=2)
    assert found.ends == ("turns", "done")
    assert samples.stopped.tolist() == [False, True] and samples.valid.all()
    assert [len(one.turns) for one in found.episodes] == [2, 1]
    samples, found = played(calculated, [[["1" * 70]]])  # cut at the limit, and scored as it is
    assert (found.ends, samples.length.tolist()) == (("done",), [WIDTH])
    assert not samples.stopped.any()


def test_a_turn_has_its_own_limit_of_tokens(calculated):
    samples, found = played(calculated, [[["<calc>1+1</calc>xxxxxxxxx", "408\n"]]], turn_tokens=18)
    assert found.episodes[0].turns[0].text == "<calc>1+1</calc>xx"
    assert text_of(samples, 0) == "<calc>1+1</calc>xx<result>2</result>\n408\n"
    assert found.ends == ("done",) and found.episodes[0].reward == 1
    assert found.cut.tolist() == [1] and samples.stopped.tolist() == [True]
    samples, found = played(calculated, [[["408xxxxxxxxx"], ["4\n"]]], turn_tokens=3)
    assert (found.ends, found.cut.tolist()) == (("done", "done"), [1, 0])
    assert samples.stopped.tolist() == [True, True]  # the environment's end, no truncation
    assert [one.reward for one in found.episodes] == [1, 0]


def test_what_the_tool_wrote_is_not_scored(calculated):  # B48
    _, found = played(calculated, [[[CALL, "no\n"], ["<result>408</result>\n"]]])
    assert [one.reward for one in found.episodes] == [0, 0]


@pytest.mark.parametrize("text, kind", [
    ("raise\n", "error"), ("die\n", "ended"), ("nan\n", "turn"), ("bad reply\n", "turn"),
    ("empty\n", "turn")])
def test_a_failed_episode_is_invalid_and_its_group_goes_on(faulty, text, kind):
    samples, found = played(faulty, [[["end\n"], ["a\n", text], ["a\n", "end\n"]]])
    assert [one.failure for one in found.episodes] == ["", kind, ""]
    assert samples.valid.tolist() == [True, False, True]
    filled, scores = rewarded(samples, found)
    assert filled.valid.tolist() == [True, False, True]
    assert filled.reward.tolist() == filled.shaped.tolist() == [1.0, 0.0, 2.0]
    assert scores.failures[kind] == 1 and sum(scores.failures.values()) == 1
    assert text_of(samples, 1).startswith("a\nso\n")  # what was sampled stays in the log


def rewarded(samples, found, pairs=(), **changes):
    weighed = episode_rewards.weights(pairs, talk_environments.FAULTY)
    scores = episode_rewards.scores(found.episodes, weighed)
    return episode_rewards.filled(
        samples, found.episodes, [""] * len(samples), scores, weighed=weighed,
        overlong=config.Overlong(), max_length=WIDTH, **changes), scores


def test_shaping_stands_apart_from_the_reward_and_by_turn(faulty):
    samples, found = played(faulty, [[["a\n", "b\n", "a\n", "end\n"], ["end\n"]]])
    filled, scores = rewarded(samples, found, (("good", 0.25), ("length", -1.0)), by_turn=5)
    length = np.array([len("a\nb\na\nend\n"), len("end\n")]) / WIDTH  # without "so\n", thrice told
    assert filled.reward.tolist() == [4, 1] and scores.parts["good"].tolist() == [2, 0]
    np.testing.assert_allclose(filled.shaped, [4.5 - length[0], 1 - length[1]], rtol=1e-6)
    np.testing.assert_allclose(filled.turn_rewards, [
        [1.25, 1, 1.25, 1 - length[0], 0], [1 - length[1], 0, 0, 0, 0]], rtol=1e-6)
    with pytest.raises(config.ConfigError, match="give no part 'god'; did you mean good"):
        rewarded(samples, found, (("god", 1.0),))


def test_the_answers_form_is_looked_for_in_the_last_turn_alone():
    found = [episode_play.Episode("x", {}, 0, turns=tuple(
        episode_play.Played(text, "", 0.0, False, {}, 0.0) for text in texts))
        for texts in (["answer: 5\n", "5\n"], ["5\n", "answer: 5\n"])]
    zeros = np.zeros(2, np.int32)
    samples = types.Samples(
        np.ones((2, 4), np.int32), np.ones((2, 4), bool), np.zeros((2, 4), np.float32), zeros + 4,
        zeros == 0, zeros * 0.0, zeros * 0.0, zeros == 0, *[zeros] * 5)
    weighed = parts.Weights(ready=(("format", 0.5),))
    filled = episode_rewards.filled(
        samples, found, ["".join(turn.text for turn in one.turns) for one in found],
        episode_rewards.scores(found, weighed), weighed=weighed, overlong=config.Overlong(),
        max_length=WIDTH)
    assert filled.shaped.tolist() == [0.0, 0.5]


def test_a_new_part_in_every_turn_makes_no_metric_without_end(caplog):
    found = [episode_play.Episode("x", {}, row, turns=tuple(
        episode_play.Played("", "", episodes.MOST, False, {f"p{row}_{at}": 1.0}, 0.0)
        for at in range(9))) for row in range(20)]
    scores = episode_rewards.scores(found, parts.Weights(named=(("good", 1.0), ("p0_1", 1.0))))
    names = ["good", "p0_1", "p0_0", *(f"p{at // 9}_{at % 9}" for at in range(2, 63))]
    assert list(scores.parts) == names and "name 181 parts; the first 64" in caplog.text
    assert np.isfinite(scores.reward).all()


def test_an_episode_that_waits_too_long_fails_and_others_do_not(faulty):
    begun = time.monotonic()
    samples, found = played(faulty, [[["a\n", "hang\n"]], [["end\n"]]], seconds=0.5)
    assert [one.failure for one in found.episodes] == ["timeout", ""]
    assert "waited for more than 0.5 s" in found.episodes[0].message
    assert time.monotonic() - begun < 3  # before the call's own limit
    assert samples.valid.tolist() == [False, True]
    _, again = played(faulty, [[["a\n", "end\n"]]])  # the late answer is nobody's
    assert again.episodes[0].reward == 2


def test_a_start_that_tells_something_else_than_the_prompt_fails(faulty):
    _, found = played(faulty, [[["end\n"]]], record={"prompt": "x", "other": True})
    assert found.episodes[0].failure == "turn" and "the prompt is" in found.episodes[0].message


def test_tokens_that_are_not_the_episodes_make_it_invalid(calculated, monkeypatch):  # B50
    own = serve

    def wrong(*given, **options):
        samples = own(*given, **options)
        samples.tokens[0, 3] += 1
        return samples

    monkeypatch.setitem(globals(), "serve", wrong)
    samples, found = played(calculated, [[[CALL, ANSWER], ["408\n"]]])
    assert [one.failure for one in found.episodes] == ["turn", ""]
    assert found.ends == ("failed", "done") and samples.stopped.tolist() == [False, True]
    filled, scores = rewarded(samples, found)  # neither paid nor learned, and counted
    assert filled.valid.tolist() == [False, True] and filled.reward.tolist() == [0, 1]
    assert scores.failures["turn"] == 1 and "not those of its turns" in scores.first_failure


def test_seeds_are_of_step_group_and_sample(calculated):
    _, found = played(calculated, [[["1\n"], ["1\n"]]], seed=9)
    assert [one.seed for one in found.episodes] == [
        episodes.seed(9, step=3, group=0, sample=sample) for sample in range(2)]


def test_a_group_that_is_sampled_further_has_episodes_of_its_own():
    """Samples 0 and 1 of group 7 were asked for before."""
    pool = types_lib.SimpleNamespace(name="any")
    shown = RECORD | {"demonstration": "408", "demonstration_segments": ()}
    plan = types.Plan(np.zeros(2, int), np.zeros(2, int), np.array([7, 9]), np.array([2, 1]),
                      first=np.array([2, 0]))
    desk = episodes_talk.begin(
        scene(pool, seed=5), plan, table=types.PromptTable((np.array([1]),), (shown,), ()), step=3,
        limits=np.array([20, 30]), ahead=0)
    found = {key: (live.episode.seed, live.limit) for key, live in desk.live.items()}
    assert found == {key: (episodes.seed(5, step=3, group=key[0], sample=key[1]), limit)
                     for key, limit in (((7, 2), 20), ((7, 3), 20), ((9, 0), 30))}
    assert all(live.episode.record == RECORD for live in desk.live.values())  # nothing shown


def test_the_limit_of_waiting_is_of_all_turns_together(monkeypatch):
    """Of 0.5 s two turns take 0.2 s each, while sampling takes hours; so the third has 0.1 s."""
    clock, asked, answers = [0.0], [], []

    def told(**value):
        answers.append(episode_pool.Answer(asked.pop(), "done", value | {"state": ""}, 0.2, 1))

    monkeypatch.setattr(episodes_talk, "time", types_lib.SimpleNamespace(
        monotonic=lambda: clock[0], sleep=None))
    for name in ("start", "step"):
        monkeypatch.setattr(episode_pool, name, lambda pool, ticket, **more: asked.append(ticket))
    monkeypatch.setattr(episode_pool, "poll", lambda pool, seconds: [
        answers.pop() for _ in range(len(answers))])
    monkeypatch.setattr(episode_pool, "unanswered", lambda pool: len(answers))
    zero = np.zeros(1, int)
    desk = episodes_talk.begin(
        scene(types_lib.SimpleNamespace(name="any"), seconds=0.5, turns=9),
        types.Plan(zero, zero, zero, zero + 1), step=0, ahead=1, limits=np.array([WIDTH]),
        table=types.PromptTable((np.array([1]),), (RECORD,), ()))
    told(messages=episodes.told(RECORD["prompt"]))
    talk, length = episodes_talk.talk(desk), 0
    for turn in range(3):
        clock[0] += 7200.0
        talk.ended([turns.Ended(0, 0, 0, 0, turn, np.array([5, 6]), np.zeros(2), length + 2, True)])
        length += 2 + len("so\n")
        if turn < 2:
            clock[0] += 0.2
            told(reply="so\n", reward=1.0, done=False, parts={})
            assert [one.over for one in talk.replies(0.0)] == [False]
    clock[0] += 0.09
    assert talk.replies(0.0) == []
    clock[0] += 0.02
    (reply,) = talk.replies(0.0)
    (live,) = desk.live.values()
    assert (reply.over, reply.valid, live.episode.failure) == (True, False, "timeout")
    assert len(live.episode.turns) == 2 and talk.waiting() == 0
    failed = live.episode
    told(reply="so\n", reward=1.0, done=False, parts={})  # too late: the answer is nobody's
    assert talk.replies(0.0) == [] and live.episode is failed


def test_a_look_takes_quick_answers_until_none_comes(monkeypatch):
    answers = [episode_pool.Answer(("of an earlier round", at), "done", {}, 0.0, 1)
               for at in range(9)]
    looks = []

    def poll(pool, *, seconds):
        looks.append(seconds)
        return [answers.pop()] if answers else []

    monkeypatch.setattr(episode_pool, "poll", poll)
    monkeypatch.setattr(episode_pool, "unanswered", lambda pool: len(answers))
    monkeypatch.setattr(episodes_talk, "QUICK", 60.0)
    desk = episodes_talk.Desk(scene(None), 0, {}, {})
    assert episodes_talk.talk(desk).replies(0.0) == [] and not answers
    assert len(looks) == 9 and max(looks) <= episodes_talk.NEXT


def test_while_the_device_draws_workers_get_one_call_after_the_other(faulty):
    """No reply is asked for meanwhile, as in a chunk that takes long."""
    zero = np.zeros(1, np.int32)
    desk = episodes_talk.begin(
        scene(faulty), types.Plan(zero, zero, zero, np.array([12], np.int32)), step=0,
        table=types.PromptTable((np.array([1]),), (RECORD,), ()), limits=np.array([WIDTH]), ahead=2)
    talk = episodes_talk.talk(desk)
    talk.ended([turns.Ended(0, sample, 0, 0, 0, np.array(TOKENIZER.encode("a\n"), np.int32),
                            np.zeros(2, np.float32), 2, True) for sample in range(12)])
    limit = time.monotonic() + 10.0
    while len(desk.out) < 12 and time.monotonic() < limit:
        talk.attend(turns.BEAT)
    assert len(desk.out) == 12 == talk.waiting()
    assert len(talk.replies(0.0)) == 12
