"""TensorBoard's event files, written where the call is made: tensorboardX's own SummaryWriter does
it in a thread, which ends when the disk is full, and then the run waits for it for ever."""

import functools
import os
import pathlib
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any


@functools.cache
def _library() -> tuple[ModuleType, ModuleType, ModuleType]:
    """tensorboardX's event_file_writer, event_pb2 and summary_pb2. Imported when the first file is
    opened: it imports torch where that is installed, and of a run's processes only one writes."""
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2
    return event_file_writer, event_pb2, summary_pb2


def open_board(folder: str | os.PathLike, *, first_step: int) -> Any:
    """A new event file in the folder; earlier files' events from `first_step` on are hidden."""
    writers, event_pb2, _ = _library()
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The name's time counts seconds, in which a run may be started twice.
    board = writers.EventsWriter(str(folder / "events"), f".{os.getpid()}")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    board.write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))
    return board


def write(board: Any, values: Mapping[str, float], *, step: int) -> None:
    """A step's numbers, on the disk when this returns; OSError if they cannot be."""
    _, event_pb2, summary_pb2 = _library()
    summary = summary_pb2.Summary(value=[
        summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    board.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
    board.flush()


def close(board: Any) -> None:
    """Write out what is left and close the file."""
    board.close()
