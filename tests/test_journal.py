"""The work directory on a disk that is full: /dev/full takes nothing."""

import contextlib
import io

import numpy as np
import pytest
import runs
from test_filling import PROCESSES, SLOTS, prepared

from dapo_jax import config, journal, reductions
from dapo_jax.runtime import metrics, samples_log


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A journal whose metrics lie on a full disk."""
    monkeypatch.setattr(metrics, "open_writer", lambda *given, **more: metrics.Writer(
        io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "a"))), None, None))
    stack = contextlib.ExitStack()
    yield stack, journal.opened(str(tmp_path), runs.configure(), stack, done=-1, steps=3)


def test_a_full_disk_is_bad_input_that_names_the_folder(full, tmp_path):
    stack, opened = full
    with pytest.raises(config.ConfigError, match="No space left on device; make room") as caught:
        journal.write_line(opened, {"step": 1})
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(config.ConfigError, match="No space left"):  # what is left is tried again
        stack.close()


def test_samples_that_cannot_be_written_are_bad_input_too(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        opened = journal.opened(str(tmp_path), runs.configure(), stack, done=-1, steps=3)
        (tmp_path / samples_log.FOLDER).symlink_to("/dev/full/none")
        with pytest.raises(config.ConfigError, match="could not be written"):
            journal.write_rollouts(opened, [], None, step=1, kept=None)


def test_a_folder_that_cannot_be_held_is_named(tmp_path, monkeypatch):
    def refuse(workdir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.checkpoint, "sole_use", refuse)
    with pytest.raises(config.ConfigError, match="No space left on device.*a disk with room"):
        journal.claim(str(tmp_path), runs.configure(), contextlib.ExitStack())


def claimed(workdir, changes, caplog):
    """What is said where a run goes on with these changes."""
    caplog.clear()
    with contextlib.ExitStack() as stack:
        journal.claim(str(workdir), runs.configure(changes), stack)
    return caplog.text


def test_a_run_may_go_on_split_over_other_devices(tmp_path, caplog):
    assert not claimed(tmp_path, {}, caplog) and not claimed(tmp_path, {}, caplog)
    more = {"mesh.data": 2, "mesh.tensor": 2, "rollout.mesh": (1, 2, 2), "rollout.slots": (8, 16),
            "rl.microbatch_slots": 8}
    said = claimed(tmp_path, more, caplog)
    assert all(name in said for name in more) and "up to rounding" in said
    # What an update or a decision depends on is of the run itself.
    for changes, field in (
            ({"rl.algorithm.weights": "microbatch_token"}, "rl.microbatch_slots"),
            ({"rollout.mode": "streaming"}, "rollout.slots"), ({}, "rollout.rows")):
        workdir = tmp_path / field
        workdir.mkdir()
        claimed(workdir, changes, caplog)
        other = {field: (8,) if field == "rollout.slots" else 2}
        with pytest.raises(config.ConfigError, match=f"  {field}: .* there, .* now"):
            claimed(workdir, changes | other, caplog)
        assert "mesh.fsdp" in claimed(workdir, changes | {"mesh.fsdp": 2}, caplog)


def test_of_a_failed_update_the_writer_keeps_the_slots_of_all_processes(tmp_path):
    """One of several processes has packed its own slots; for the file all are packed, once."""
    asked, none = [], reductions.Sum(np.int32(0))
    fetched = [{"policy/skipped": none}, {"policy/skipped": reductions.Sum(np.int32(1))}] * 2

    def whole():
        asked.append(len(PROCESSES))
        return prepared(SLOTS, updates=2)

    with contextlib.ExitStack() as stack:
        opened = journal.opened(str(tmp_path), runs.configure(), stack, done=-1, steps=3)
        other = journal.Journal(str(tmp_path), opened.cfg, None, None)
        journal.write_failed(other, fetched, step=3, work=whole)
        journal.write_failed(opened, [fetched[0]], step=3, work=whole)
        assert not asked
        journal.write_failed(opened, fetched, step=3, work=whole)
    assert asked == [3]
    kept = sorted((tmp_path / "failed_updates").iterdir())
    assert [path.name for path in kept] == [f"step_000003_update_{n}.npz" for n in (2, 4)]
    second = prepared(SLOTS, updates=2)[1].batches
    with np.load(kept[0]) as arrays:
        for number, batch in enumerate(second):
            np.testing.assert_array_equal(arrays[f"{number}.weights"], batch.weights)
        assert len(arrays.files) == 7 * len(second)
