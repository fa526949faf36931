"""A pure function over many jobs in processes of its own, results in order, progress shown.

Processes are started with `python -c`, not `multiprocessing`, so that neither jax nor the parent's
main module is imported in them. They end with their pipe, so none outlives its parent.
"""

import collections
import concurrent.futures
import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.progress

LOG = logging.getLogger(__name__)
MOST = 16  # processes; each holds a tokenizer
PLAIN_SECONDS = 5.0  # between lines where standard error is no terminal
START = f"from {__name__} import serve; serve()"


def count() -> int:
    """Processes worth starting: the cores that this one may use, bounded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, MOST))


def ordered(function: Callable[[Any, Any], Any], jobs: Sequence[Any], *,
            prepare: Callable[[Any], Any], given: Any, title: str) -> Iterator[Any]:
    """`function(prepare(given), job)` for each job, in the order of the jobs.

    Both functions are module-level ones, and all that passes is pickled. What a job raises is
    raised here. At most two jobs per process are under way, so results do not pile up.
    """
    number = min(count(), len(jobs))
    with contextlib.ExitStack() as stack:
        opening = pickle.dumps((function, prepare, given))
        free: queue.SimpleQueue[tuple[subprocess.Popen, bytes]] = queue.SimpleQueue()
        for _ in range(number):
            free.put((stack.enter_context(_process()), opening))
        threads = stack.enter_context(_threads(number))
        advance = stack.enter_context(_progress(title, len(jobs)))
        under_way: collections.deque[concurrent.futures.Future] = collections.deque()
        for job in jobs:
            if len(under_way) == 2 * number:
                yield under_way.popleft().result()
                advance()
            under_way.append(threads.submit(_ask, free, job))
        while under_way:
            yield under_way.popleft().result()
            advance()


@contextlib.contextmanager
def _threads(number: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """A thread for each process; jobs that did not begin are dropped at the end."""
    threads = concurrent.futures.ThreadPoolExecutor(max(number, 1))
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _process() -> Iterator[subprocess.Popen]:
    code = f"import sys; sys.path[:] = {sys.path!r}; {START}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ask(free: queue.SimpleQueue, job: Any) -> Any:
    """The answer of the process that is free next; `opening` goes to it before its first job."""
    process, opening = free.get()
    try:
        process.stdin.write(opening)
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        good, result = pickle.load(process.stdout)
    except (EOFError, OSError) as error:
        raise RuntimeError(f"a process that prepares data ended with status {process.wait()}; is "
                           "there too little memory?") from error
    finally:
        free.put((process, b""))
    if not good:
        raise result
    return result


def serve() -> None:
    """Answer jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not come among the replies
    with contextlib.suppress(EOFError, BrokenPipeError):
        function, prepare, given = pickle.load(requests)
        ready = None
        while True:
            job = pickle.load(requests)
            try:
                ready = ready or (prepare(given),)
                reply = (True, function(ready[0], job))
            except Exception as error:  # raised again in the parent
                reply = (False, error)
            pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
            replies.flush()


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` parts: a bar on a terminal, else a line at times."""
    if sys.stderr.isatty():
        with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
        return
    state = {"done": 0, "printed": time.monotonic()}

    def advance() -> None:
        state["done"] += 1
        if time.monotonic() - state["printed"] >= PLAIN_SECONDS:
            state["printed"] = time.monotonic()
            LOG.info("%s: %d of %d parts", title, state["done"], total)

    yield advance
