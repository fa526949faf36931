import collections
import dataclasses
import time

import fake_device
import numpy as np
import pytest
import scripts

from dapo_jax import types
from dapo_jax.rollout import lobby, programs, talking, turns
from dapo_jax.runtime import mesh as mesh_lib

NEW = 24


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """What is put stays as it is: the fake device is numpy. The host never holds more than it may.
    """
    monkeypatch.setattr(mesh_lib, "put", lambda tree, sharding: tree)
    hold, new = lobby.hold, lobby.new

    def bounded(state, one, context):
        hold(state, one, context)
        assert lobby.holds(state) <= state.host

    def kept(*of, **named):
        made.append(new(*of, **named))
        return made[-1]

    made = []
    monkeypatch.setattr(lobby, "hold", bounded)
    monkeypatch.setattr(lobby, "new", kept)
    return made


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return types.PromptTable(
        tokens=tuple(rng.integers(0, fake_device.VOCAB, rng.integers(1, 9)).astype(np.int32)
                     for _ in range(count)),
        records=({"prompt": "", "answer": ""},) * count, demonstrations=())


def expected(script, table, prompt, visit, sample, budget):
    """A sample of a script, in a plain loop that knows of no slots."""
    def reply(turn, tokens, length):
        found = scripts.reply(script, turns.Ended(0, sample, prompt, visit, turn, np.array(tokens),
                                                  np.zeros(len(tokens)), length, False))
        if found is None:
            return None
        limit = min(script.room, length + len(found) + script.turn_budget)
        return found, min(limit, budget)

    return fake_device.told(table.tokens[prompt], sample, min(script.turn_budget, budget), reply)


def check(served, script, table, plan):
    samples, budget = served.samples, dict(zip(plan.group.tolist(), plan.budget.tolist()))
    numbers = turns.turn_numbers(samples.loss_mask)
    for row in range(len(samples)):
        tokens, turn, stopped = expected(
            script, table, *(int(getattr(samples, name)[row]) for name in (
                "prompt", "visit", "sample")), budget[int(samples.group[row])])
        size = samples.length[row]
        assert samples.tokens[row, :size].tolist() == tokens
        assert numbers[row, :size].tolist() == turn and not samples.loss_mask[row, size:].any()
        assert samples.stopped[row] == stopped
    logprobs = np.where(samples.loss_mask, -1 / (1 + samples.tokens), 0).astype(np.float32)
    np.testing.assert_array_equal(samples.logprobs, logprobs)
    assert samples.valid.all()


def play(seed, *, groups, **changes):
    """Random groups, budgets, delays, room and slots."""
    rng = np.random.default_rng(seed)
    parts = int(rng.choice([1, 1, 4]))
    sizes = sorted({int(rng.integers(1, 5)) * parts, int(rng.integers(16, 33)) // parts * parts})
    room = programs.Room(int(rng.integers(0, 24)), int(rng.integers(0, 12)), (2, 8))
    engine = fake_device.made(**{"slots": sizes, "new": NEW, "room": room, "parts": parts,
                                 "chunk": int(rng.integers(1, 9)), "share": 4} | changes)
    table = prompts(groups, seed)
    plan = types.Plan(
        prompt=rng.integers(0, groups, groups).astype(np.int32),
        visit=rng.integers(0, 3, groups).astype(np.int32),
        group=rng.permutation(10 * groups)[:groups].astype(np.int32),
        size=rng.integers(1, 9, groups).astype(np.int32),
        budget=np.full(groups, rng.integers(4, NEW + 1), np.int32),
        first=rng.integers(0, 3, groups).astype(np.int32))
    script = scripts.Script(most=5, longest=6, turn_budget=int(rng.integers(1, 9)),
                            room=int(plan.budget[0]), vocab=fake_device.VOCAB, seed=seed)
    most = int(rng.integers(1, 12))
    talk = scripts.talk(script, delay=lambda: int(rng.integers(0, most)))
    served = talking.sample(engine, None, plan, table=table, root=None, step=0, talk=talk)
    assert served.samples.group.tolist() == np.repeat(plan.group, plan.size).tolist()
    check(served, script, table, plan)
    return served


def test_tokens_in_are_tokens_out_whatever_waits_where(no_device):
    uses = [play(seed, groups=16).use for seed in range(8)]
    for name in ("parked", "parked_host", "unkept", "rerun_tokens", "reply_tokens"):
        assert sum(getattr(use, name) for use in uses), name
    for one in no_device:  # nothing is kept of samples that are over
        assert not one.contexts and not one.ready
        assert all(sorted(free) == list(range(len(free))) for free in one.free)
    assert sum(len(free) for one in no_device for free in one.free) > 20


def test_of_a_steady_talk_nothing_depends_on_how_fast_replies_come():
    def course(delays, lag):
        """What is done on the device and when, but for seconds."""
        rng, log = np.random.default_rng(delays), []
        engine = fake_device.made(slots=(2, 8), new=NEW, room=programs.Room(6, 3, (4,)), chunk=3)
        script = scripts.Script(most=4, longest=6, turn_budget=5, room=NEW, vocab=1000)
        talk = scripts.talk(script, delay=lambda: int(rng.integers(0, delays)), log=log)
        got = talking.sample(engine, None, tiny_plan(), table=prompts(12), root=None, step=0,
                             talk=turns.steady(talk, lag) if lag else talk)
        check(got, script, prompts(12), tiny_plan())
        return dataclasses.replace(got.use, idle=0.0), [(one.group, one.sample) for one in log]

    for lag in (1, 3):
        assert course(1, lag) == course(9, lag) == course(30, lag)
    assert course(1, 0) != course(9, 0) and course(1, 1) != course(1, 3)


def tiny_plan():
    group = np.arange(12, dtype=np.int32)
    return types.Plan(group, group * 0, group, group * 0 + 3, group * 0 + NEW, group * 0)


@pytest.mark.slow
def test_tokens_in_are_tokens_out_for_ten_thousand_episodes():
    assert sum(len(play(seed, groups=100).samples) for seed in range(100, 124)) > 10_000


def crowded(clock, *, room, together, episodes, latency=1.0):
    """So many episodes, of which so many are in flight at once, in 256 slots. Each reply comes
    `latency` seconds of the clock after its turn. Returns what was served, the most samples that
    waited for a reply, and (busy, all) seconds while so many were in flight."""
    new, size, table = 128, 8, prompts(64)
    engine = fake_device.made(slots=(32, 128, 256), new=new, room=room, chunk=16, clock=clock)
    script = scripts.Script(most=6, longest=12, turn_budget=32, room=new, vocab=fake_device.VOCAB)
    held, most, admitted, full = collections.deque(), 0, 0, (0.0, 0.0)  # held: (due, turn)

    def ended(found):
        nonlocal most
        held.extend((clock.now + latency, one) for one in found)
        most = max(most, len(held))

    def replies(seconds):
        if seconds and held and held[0][0] > clock.now:
            clock.now = min(held[0][0], clock.now + seconds)
        begun, due = time.process_time(), []
        while held and held[0][0] <= clock.now:
            due.append(scripts.answer(script, held.popleft()[1]))
        clock.left += time.process_time() - begun  # an environment's time, not the host's
        return due

    def feed(boundary):
        nonlocal admitted, full
        left = episodes // size - admitted
        count = min(together // size - len(boundary.in_flight), left)
        count = count if count >= min(16, left) else 0
        group = np.arange(admitted, admitted + count, dtype=np.int32)
        admitted += len(group)
        full = (clock.busy, clock.now) if left else full
        return types.Plan(prompt=group % 64, visit=group // 64, group=group,
                          size=np.full(len(group), size, np.int32))

    served = talking.serve(
        engine, None, table=table, root=None, step=0, feed=feed,
        talk=turns.Talk(ended, replies, lambda: len(held), script.turn_budget))
    return served, most, full


@pytest.mark.slow
def test_two_thousand_episodes_at_once_keep_the_device_busy_in_bounded_memory(
        no_device, monkeypatch):
    """One chip: 20 ms a step of 256 slots, 1 s for 20,000 tokens of replies."""
    hold, held = lobby.hold, []

    def counted(state, one, context):
        hold(state, one, context)
        held.append((lobby.holds(state), len(state.contexts)))

    monkeypatch.setattr(lobby, "hold", counted)
    clock, room = fake_device.Clock(step=0.02 / 256, token=1 / 20_000), programs.Room(512, 1024)
    served, most, (busy, passed) = crowded(clock, room=room, together=2000, episodes=6000)
    assert len(served.samples) == 6000 and most > 1000 and passed > 20
    assert busy > 0.9 * passed and served.use.row_use > 0.8
    assert served.use.rerun_tokens < 0.1 * served.use.reply_tokens
    kept, under_way = (max(column) for column in zip(*held, strict=True))
    assert 512 < kept <= 1024 < under_way <= 2000  # the host keeps no more than it may
    (own,) = no_device
    assert [len(free) for free in own.free] == [512] and not own.contexts
