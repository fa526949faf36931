"""TensorBoard's event files, written where the call is made: tensorboardX's own SummaryWriter does
it in a thread, which ends when the disk is full, and then the run waits for it for ever."""

import os
import pathlib
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2


def open_board(folder: str | os.PathLike, *, first_step: int) -> EventsWriter:
    """A new event file in the folder; earlier files' events from `first_step` on are hidden."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The name's time counts seconds, in which a run may be started twice.
    board = EventsWriter(str(folder / "events"), f".{os.getpid()}")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    board.write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))
    return board


def write(board: EventsWriter, values: Mapping[str, float], *, step: int) -> None:
    """A step's numbers, on the disk when this returns; OSError if they cannot be."""
    summary = summary_pb2.Summary(value=[
        summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    board.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
    board.flush()


def close(board: EventsWriter) -> None:
    """Write out what is left and close the file."""
    board.close()
