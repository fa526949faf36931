"""Commands in processes of their own: several at once, skipped where done, their ends reported."""

import dataclasses
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from dapo_jax.runtime import status_line

LOOK = 0.5  # seconds between looks at what runs
STOPPING = 120.0  # seconds that a process has to save what it did
TAIL = 12  # lines of a log that a failure shows


@dataclasses.dataclass(frozen=True)
class Job:
    """A command whose output goes to `log`; `done` says whether its result is there."""

    name: str
    arguments: tuple[str, ...]  # of the Python interpreter
    log: pathlib.Path
    done: Callable[[], bool]
    status: Callable[[], str] = lambda: ""  # how far it is, in a few words
    prepare: Callable[[], None] = lambda: None  # called before each start


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job without a result."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class _Process:
    job: Job
    process: subprocess.Popen


def run(jobs: Sequence[Job], *, at_once: int, signals: Sequence[int],
        show: status_line.Show) -> list[Failure]:
    """Run what is not done, in order; returns what failed.

    A signal in `signals` ends all that runs with SIGTERM, and nothing else is started.
    """
    waiting = [job for job in jobs if not job.done()]
    before, begun = len(jobs) - len(waiting), time.monotonic()
    running: list[_Process] = []
    failures: list[Failure] = []
    ended = 0
    try:
        while running or (waiting and not signals):
            while waiting and len(running) < at_once and not signals:
                running.append(_start(waiting.pop(0)))
            time.sleep(LOOK)
            over = [one for one in running if one.process.poll() is not None]
            running = [one for one in running if one.process.poll() is None]
            ended += len(over)
            failures += [failure for one in over if not signals and (failure := _failure(one))]
            if signals:
                _stop(running)
                running = []
            show(_line(running, done=before + ended, of=len(jobs), begun=begun))
    finally:
        _stop(running)  # an exception or a second signal: none is left behind
        show("")
    return failures


def _start(job: Job) -> _Process:
    job.prepare()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        # Of its own session: Ctrl-C reaches this process, which ends the job once and in order.
        return _Process(job, subprocess.Popen(
            [sys.executable, *job.arguments], stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True))


def _stop(running: Sequence[_Process]) -> None:
    for one in running:
        one.process.terminate()
    until = time.monotonic() + STOPPING
    for one in running:
        try:
            one.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def _failure(one: _Process) -> Failure | None:
    status = one.process.returncode
    if status == 0 and one.job.done():
        return None
    lines = one.job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = "\n".join(lines[-TAIL:])
    ended = f"exit status {status}" if status else "it ended without a result"
    return Failure(one.job.name, f"{ended}; the end of {one.job.log}:\n{said}")


def _line(running: Sequence[_Process], *, done: int, of: int, begun: float) -> str:
    minutes = (time.monotonic() - begun) / 60
    now = ", ".join(f"{one.job.name} {one.job.status()}".strip() for one in running)
    return f"{done} of {of} done, {minutes:.0f} min; {now}"
