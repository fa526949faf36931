"""Environments in killable processes: one bad turn costs its episode alone."""

import dataclasses
import time
import types

import hostile_environments
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.envs import breaker, crew, episode_play, episode_pool, episodes

TIMEOUT = 3.0  # seconds: a busy machine must not be late


def limits(**given):
    return episode_pool.Limits(**{"timeout": TIMEOUT, "backoff": 0.01, "memory_mb": 600, **given})


@pytest.fixture(scope="module")
def hostile():
    """One worker, so that what ends it would end the others too."""
    with episode_pool.open("hostile_environments:HOSTILE", limits(bound=100)) as pool:
        yield pool


def said(pool, texts, *, seed=7, turns=9, record=None):
    """The episode in which the model writes these texts."""
    (episode,) = played(pool, [texts], seeds=[seed], turns=turns, record=record)
    return episode


def played(pool, scripts, *, seeds=None, turns=9, record=None):
    begun = [episode_play.Episode(pool.name, record or {}, seed)
             for seed in seeds or range(len(scripts))]
    return episode_play.play(
        pool, begun, lambda place, episode: next(iter(
            scripts[place][len(episode.turns):len(episode.turns) + 1]), None),
        turns=turns, seconds=120.0)


def test_an_episode_is_played_turn_by_turn(hostile):
    episode = said(hostile, ["a", "bc", "end", "more"])
    assert episode.messages == ({"role": "user", "content": "7"},)
    assert [turn.reply for turn in episode.turns] == ["7 a", "7 a bc", "7 a bc end"]
    assert (episode.reward, episode.done, episode.failure) == (6.0, True, "")
    assert all(turn.seconds > 0 for turn in episode.turns)
    short = said(hostile, ["a", "b", "c", "d"], turns=2)
    assert (len(short.turns), short.done, short.failure) == (2, False, "")


@pytest.mark.parametrize("text, kind, message", [
    ("raise", "error", "hostile_environments.py:32: ZeroDivisionError: on purpose"),
    ("die", "ended", "its worker ended with status 3"), ("hang", "timeout", "within 3 s"),
    ("hog", "memory", "more memory"), ("print", "", ""), ("fork", "", ""),
    ("nan", "turn", "no finite number"),
    ("text", "turn", "hostile: step returned a str, not a Turn"),
    ("lambda", "turn", "hostile: step returned a state that cannot be pickled: "),
    ("huge", "turn", "hostile: step returned a state of 1048")])
def test_only_the_episode_at_fault_fails_and_says_how(hostile, text, kind, message):
    before = hostile.failures[kind]
    scripts = [["a", "b", "end"], ["a", text, "end"], ["a", "b", "c", "end"]]
    good, bad, also = played(hostile, scripts)
    assert (good.done, also.done, good.failure, also.failure) == (True, True, "", "")
    assert (bad.failure, bad.done) == (kind, not kind)
    assert message in bad.message and bad.last_text == (text if kind else "")
    if kind:
        assert len(bad.turns) == 1  # what went before it is kept
        assert hostile.failures[kind] - before == 1
        assert hostile.failures["retries"] == 0  # it was never said to be idempotent
        assert episode_play.failures([good, bad, also]) == {
            name: int(name == kind) for name in episodes.FAILURES}


def test_a_start_may_fail_too(hostile):
    episode = said(hostile, ["a"], record={"begin": "raise"})
    assert (episode.failure, episode.messages, episode.turns) == ("error", (), ())


def test_only_idempotent_steps_are_tried_again(tmp_path, hostile):
    texts = [f"once:{how}:{tmp_path / how}" for how in ("raise", "die")]
    with episode_pool.open("hostile_environments:PATIENT", limits(retries=1)) as pool:
        episode = said(pool, [*texts, "end"])
        assert (episode.failure, len(episode.turns)) == ("", 3)
        assert [pool.failures[kind] for kind in ("retries", "error", "ended")] == [2, 1, 1]
        assert said(pool, ["raise"]).failure == "error"  # after the last try
        assert (pool.failures["retries"], pool.failures["error"]) == (3, 3)
        assert said(pool, ["nan"]).failure == "turn"  # no other try would mend it
        assert pool.failures["retries"] == 3
    assert said(hostile, [f"once:raise:{tmp_path / 'never'}"]).failure == "error"


def test_a_worker_is_replaced_after_memory_ran_out_and_not_after_an_exception(hostile):
    def served():
        return {worker.process.pid for worker in hostile.crew.workers}

    said(hostile, ["end"])  # one is ready
    before = served()
    assert said(hostile, ["raise"]).failure == "error" and served() == before
    assert said(hostile, ["hog"]).failure == "memory"
    assert said(hostile, ["end"]).done and len(before - served()) == 1


def test_each_further_try_waits_twice_as_long_up_to_a_bound():
    pool = episode_pool.Pool("patient", True, limits(retries=20, backoff=0.5), crew=None)
    pauses = []
    for tries in range(1, 12):
        worker = types.SimpleNamespace(work=episode_pool._Call(0, b"", 0.0, tries), deadline=0.0)
        episode_pool._settle(pool, worker, "error", "on purpose")
        pauses.append(pool.paused.pop()[0] - time.monotonic())
    wanted = [min(0.5 * 2 ** tries, episode_pool.LONGEST_PAUSE) for tries in range(11)]
    assert wanted[-1] == episode_pool.LONGEST_PAUSE > wanted[3]
    np.testing.assert_allclose(pauses, wanted, atol=0.05)  # the clock goes on between


def test_an_environment_that_keeps_failing_is_left_alone_then_tried_again():
    with episode_pool.open("hostile_environments:HOSTILE", limits(bound=3, pause=600.0)) as pool:
        bad = [said(pool, ["raise"]) for _ in range(2)]
        assert [one.failure for one in bad] == ["error"] * 2 and pool.breaker.opened == 0
        said(pool, ["a"])  # a success in between, and its start
        assert pool.breaker.failed == 0
        pool.breaker = breaker.Breaker(failed=2)
        assert said(pool, ["a"], record={"begin": "raise"}).failure == "error"
        refused = said(pool, ["a"])
        assert refused.failure == "refused" and "3 times in a row" in refused.message
        assert "the last failure: " in refused.message and "ZeroDivisionError" in refused.message
        assert (pool.breaker.opened, pool.failures["refused"]) == (1, 1)
        pool.breaker = dataclasses.replace(pool.breaker, until=time.monotonic())
        assert said(pool, ["end"]).done and pool.breaker.failed == 0


def test_answers_come_as_they_are_ready_and_all_workers_are_used():
    with episode_pool.open("hostile_environments:HOSTILE", limits(workers=2)) as pool:
        played(pool, [["end"], ["end"]])  # both are ready
        done = played(pool, [["slow", "end"]] + [["end"]] * 4)
        slow, quick = done[0].turns[0].seconds, [one.turns[0].seconds for one in done[1:]]
        assert slow >= 0.3 > 0 and min(quick) < slow
        assert episode_pool.unanswered(pool) == 0 and episode_pool.poll(pool) == []
    with pytest.raises(RuntimeError, match="closed"):
        episode_pool.poll(pool)
    with pytest.raises(RuntimeError, match="closed"):
        episode_pool.start(pool, 0, record={}, seed=0)


def test_calls_that_hang_hold_up_nobody_in_a_bounded_number_of_processes():
    """One worker and a spare one, and one more once a call is late, which a second hang takes."""
    def order(*begins):
        for ticket, begin in enumerate(begins):
            episode_pool.start(pool, ticket, record=begin, seed=0)
        answers, most = [], 0
        while episode_pool.unanswered(pool):
            answers += episode_pool.poll(pool, seconds=0.05)
            most = max(most, len(pool.crew.workers))
        return [(one.ticket, one.kind) for one in answers], most

    hang, late, fine = {"begin": "hang"}, "timeout", "done"
    with episode_pool.open("hostile_environments:HOSTILE", limits(bound=100)) as pool:
        assert order({}) == ([(0, fine)], 2)
        assert order(hang, {}, {}) == ([(1, fine), (2, fine), (0, late)], 3)
        answers, most = order(hang, hang, hang, hang, {})
        assert set(answers) == {*((ticket, late) for ticket in range(4)), (4, fine)} and most == 3
        assert answers[0] == (0, late) and answers[-1] == (3, late)  # all processes hung by then
        assert pool.failures == {late: 5}


def test_calls_that_are_not_late_are_no_more_than_there_are_workers():
    with episode_pool.open("hostile_environments:HOSTILE", limits(workers=2, timeout=60.0)) as pool:
        crew.more(pool.crew, 4)
        for ticket in range(6):
            episode_pool.start(pool, ticket, record={"begin": "slow"}, seed=0)
        most = 0
        while episode_pool.unanswered(pool):
            episode_pool.poll(pool, seconds=0.01)
            most = max(most, sum(worker.work is not None for worker in pool.crew.workers))
        assert most == 2 and len(pool.crew.workers) == 5


def test_play_ends_at_its_limit_of_time():
    with episode_pool.open("hostile_environments:HOSTILE", limits(timeout=60.0)) as pool:
        begun = [episode_play.Episode(pool.name, {}, seed) for seed in range(2)]
        found = episode_play.play(pool, begun, lambda place, episode: "hang", turns=9, seconds=2.0)
    assert [one.failure for one in found] == ["timeout"] * 2
    assert "not over within 2 s" in found[0].message


def test_an_environment_that_cannot_be_run_is_refused_before_a_worker_starts():
    with pytest.raises(ZeroDivisionError):
        episode_pool.open("hostile_environments:BROKEN")
    with pytest.raises(config.ConfigError, match="no environment 'calculatr'.*calculator"):
        episode_pool.open("calculatr")


def test_a_log_plays_again_and_what_differs_is_counted(hostile):
    episodes_played = played(hostile, [["a", "end"], ["b", "raise"], ["c", "d"]])
    begun = said(hostile, ["a"], record={"begin": "raise"})
    log = [*episodes_played, begun]
    same = episode_play.replay(hostile, log)
    assert same == episode_play.Replay(3, (), (), "")
    turn = dataclasses.replace(log[2].turns[1], reply="7 c D")
    log[2] = dataclasses.replace(log[2], turns=(log[2].turns[0], turn))
    other = episode_play.replay(hostile, log)
    assert (other.compared, other.differing) == (3, (2,))
    assert other.first.startswith("episode 2: turn 1: reply is ") and "'7 c D'" in other.first
    with pytest.raises(ValueError, match="cannot be replayed by"):
        episode_play.replay(hostile, [dataclasses.replace(log[0], environment="other")])
    with episode_pool.open("hostile_environments:RANDOM", limits()) as pool:
        assert episode_play.replay(pool, played(pool, [["a", "end"]])).differing == (0,)


def test_chaos_costs_only_the_episodes_that_it_meets():
    count, name = 24, "hostile_environments:CHAOTIC"
    with episode_pool.open(name, limits(workers=2, timeout=2.0)) as pool:
        found = played(pool, [["x"] * 3] * count)
        counted = dict(pool.failures)
    right = []
    for seed in range(count):
        fates = [hostile_environments.fate(seed, turn) for turn in (1, 2, 3)]
        right.append(next((fate for fate in fates if fate != "fine"), ""))
    kinds = {"raise": "error", "hang": "timeout", "die": "ended", "": ""}
    assert [one.failure for one in found] == [kinds[fate] for fate in right]
    assert {"raise", "hang", "die", ""} == set(right)
    assert counted == {kinds[fate]: right.count(fate) for fate in kinds if fate}
    assert all(one.reward == 3.0 and one.done for one in found if not one.failure)
