import os
import struct
import subprocess
import sys

from tensorboardX.proto import event_pb2

from dapo_jax.runtime import board


def events(folder):
    """What the files hold: records of a length, its checksum, the content, its checksum."""
    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            size = struct.unpack("<Q", content[:8])[0]
            found.append(event_pb2.Event.FromString(content[12:12 + size]))
            content = content[16 + size:]
    return found


def test_numbers_stand_under_their_step_and_are_on_the_disk_at_once(tmp_path):
    one = board.open_board(tmp_path / "tb", first_step=3)
    board.write(one, {"reward/mean": 0.25, "sampling/rounds": 2}, step=3)
    version, start, step = events(tmp_path / "tb")
    assert version.file_version == "brain.Event:2"
    assert start.step == 3 and start.session_log.status == event_pb2.SessionLog.START
    assert step.step == 3 and step.wall_time > 1e9
    assert {value.tag: value.simple_value for value in step.summary.value} == {
        "reward/mean": 0.25, "sampling/rounds": 2.0}
    board.close(one)


def test_a_run_that_goes_on_within_the_second_has_a_file_of_its_own(tmp_path, monkeypatch):
    for number in (11, 12):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        board.close(board.open_board(tmp_path, first_step=0))
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_that_write_no_events_do_not_import_what_writes_them():
    subprocess.run([sys.executable, "-c", "import sys; from dapo_jax import train; "
                    "assert not {'tensorboardX', 'torch'} & set(sys.modules)"], check=True)
