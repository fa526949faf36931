"""What the processes of a run tell each other after a step, with stand-ins for the others."""

import time

import jax
import numpy as np
import pytest

from dapo_jax import agreement, types
from dapo_jax.runtime import processes


def state(cursor=3):
    order = types.EpochOrder(np.arange(4), np.int32(0), np.int32(cursor))
    return types.RunState(train=None, controller=None, demonstrations=order,
                          buffer=types.no_samples(2), step=np.int32(7))


END = agreement.Ending(15, "signal 15")


def reached(own=()):
    return agreement.reached(state(), own, seconds=1.0, late_seconds=1.0)


def with_others(monkeypatch, *others):
    """Let the exchange give this process's words and those of the others, (state, endings, s)."""
    monkeypatch.setattr(jax, "process_count", lambda: 1 + len(others))
    monkeypatch.setattr(processes, "gather", lambda own, *, what, seconds: [
        own, *((processes.digests(told), endings, busy) for told, endings, busy in others)])


def test_the_slowest_process_is_named(monkeypatch):
    with_others(monkeypatch, (state(), [], 2.0), (state(), [], 6.0))
    assert reached() == ([], {
        "processes/slowest": 2, "processes/slowest_seconds": 6.0, "processes/mean_seconds": 3.0})


def test_what_ends_any_process_is_heard_by_all(monkeypatch):
    with_others(monkeypatch, (state(), [END], 2.0))
    assert reached()[0] == [END]
    late = agreement.endings([], late=True)
    assert reached(late)[0] == [(15, "checkpoint.deadline"), END]
    monkeypatch.undo()
    assert reached(late) == (late, {})  # one process asks nobody


def test_a_process_ends_by_its_first_signal_or_by_the_deadline():
    assert agreement.endings([], late=False) == []
    assert agreement.endings([2, 15], late=True) == [(2, "signal 2"), (15, "checkpoint.deadline")]


def test_a_state_that_differs_ends_the_run_and_names_step_field_and_process(monkeypatch):
    with_others(monkeypatch, (state(), [], 2.0), (state(cursor=4), [], 2.0))
    with pytest.raises(processes.Parted, match=r"after step 7: .*cursor \(process 2\)"):
        reached()


def test_waiting_for_others_is_told_apart(monkeypatch):
    def slow_barrier(**given):
        time.sleep(0.2)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.ocp.multihost, "get_barrier_sync_fn", lambda: slow_barrier)
    before = processes.waited()
    processes.meet("here", seconds=1)
    assert 0.2 <= processes.waited() - before < 5


def test_a_process_that_leaves_alone_says_why_and_ends_as_bad_input(monkeypatch, capsys):
    error, statuses = processes.config.ConfigError("the disk is full"), []

    def alone(what, *, seconds):
        raise processes.Parted(what)

    monkeypatch.setattr(processes.os, "_exit", statuses.append)
    monkeypatch.setattr(processes, "meet", lambda what, *, seconds: None)
    processes.leave(error, seconds=1)  # all leave: in the usual way
    assert statuses == [] and capsys.readouterr().err == ""
    monkeypatch.setattr(processes, "meet", alone)
    processes.leave(error, seconds=1)
    assert statuses == [2] and capsys.readouterr().err == "error: the disk is full\n"
