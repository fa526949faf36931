"""What a run tells about itself: metrics.jsonl, TensorBoard, the progress line, compiles.

Clocks here feed the display only; nothing that steers a run may read them.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
import rich.console
import rich.progress

from dapo_jax.runtime import board as boards

REPETITION_LIMIT = 0.2  # above it a text counts as repeating itself
REPETITION_CHARACTERS = 16384  # of each text, its last ones: loops are found at the end
PLAIN_SECONDS = 5.0  # between progress lines that go to a file
RECENT_STEPS = 20  # that the expected end is estimated from


def repetition(text: str) -> float:
    """Repeatness of `text` over its characters, in [0, 1): Open-Reasoner-Zero, arXiv 2503.24290.

    2 * sum(LCP of neighbouring sorted suffixes) / (n (n + 1)), which is 1 - distinct substrings /
    all substrings; 0 for n <= 1. O(n log^2 n): ranks of all substrings of 1, 2, 4, ... characters
    are doubled until every suffix has its own.
    """
    n = len(text)
    if n <= 1:
        return 0.0
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    ranks = [_dense(characters.astype(np.int64))]
    while ranks[-1].max() < n - 1:
        width = 2 ** (len(ranks) - 1)
        second = np.zeros(n, np.int64)
        second[:max(n - width, 0)] = ranks[-1][width:] + 1
        ranks.append(_dense(ranks[-1] * (n + 1) + second))
    order = np.argsort(ranks[-1])
    first, second, common = order[:-1].copy(), order[1:].copy(), 0
    # Two suffixes never share a rank past the end of the shorter one, so equal ranks mean equal
    # characters; the padding keeps a suffix that is used up unequal to all.
    for level in reversed(range(len(ranks))):
        padded = np.append(ranks[level], -1)
        step = np.where(padded[first] == padded[second], 2 ** level, 0)
        first, second, common = first + step, second + step, common + int(step.sum())
    return 2.0 * common / (n * (n + 1))


def _dense(keys: np.ndarray) -> np.ndarray:
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def repetition_metrics(texts: Sequence[str]) -> dict[str, float]:
    """`repetition/mean` and `repetition/share` (above 0.2) over texts; NaN without texts.

    Of longer texts the last 16384 characters are looked at.
    """
    counts = collections.Counter(text[-REPETITION_CHARACTERS:] for text in texts)
    if not counts:
        return {"repetition/mean": math.nan, "repetition/share": math.nan}
    values = np.array([repetition(text) for text in counts])
    weights = np.array(list(counts.values()), np.float64) / len(texts)
    return {"repetition/mean": float(weights @ values),
            "repetition/share": float(weights @ (values > REPETITION_LIMIT))}


# -------------------------------------------------------------------------------------------- lines


@dataclasses.dataclass(frozen=True)
class Logger:
    """Another place for the numbers of a line."""

    log: Callable[[int, Mapping[str, float]], None]  # step, numbers by name
    close: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Writer:
    """Where metric lines go."""

    lines: TextIO
    board: Any | None  # of board.py
    logger: Logger | None


def open_writer(workdir: str | os.PathLike, *, resume_step: int, tensorboard: bool,
                logger: Logger | None = None) -> Writer:
    """Continue DIR/metrics.jsonl (and DIR/tb) after `resume_step`; -1 starts them anew. `logger` is
    given the same numbers.

    Lines of later steps are cut off, and so is a torn line with all that follows it. Only one
    process of a run may call this.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "metrics.jsonl"
    _cut(path, resume_step)
    board = None
    if tensorboard:
        board = boards.open_board(workdir / "tb", first_step=resume_step + 1)
    return Writer(path.open("a", encoding="utf-8"), board, logger)


def write(writer: Writer, line: Mapping[str, Any]) -> None:
    """Append one line, `step` first; what is not finite becomes null. Numbers go to TensorBoard
    and to the logger."""
    step = int(line["step"])
    values = plain({"step": step} | {k: v for k, v in line.items() if k != "step"})
    writer.lines.write(json.dumps(values, allow_nan=False) + "\n")
    writer.lines.flush()
    numbers = {name: value for name, value in values.items()
               if name != "step" and type(value) in (int, float)}
    if writer.board is not None:
        boards.write(writer.board, numbers, step=step)
    if writer.logger is not None:
        writer.logger.log(step, numbers)


def close(writer: Writer) -> None:
    """Write out what is left and close the files."""
    writer.lines.close()
    if writer.board is not None:
        boards.close(writer.board)
    if writer.logger is not None:
        writer.logger.close()


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays and scalars as numbers or lists, not finite as None."""
    if value is None or type(value) in (str, bool, int):  # most of what is written, by far
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _cut(path: pathlib.Path, resume_step: int) -> None:
    if not path.exists():
        return
    old = path.read_bytes()
    kept = b"".join(line for line in whole_lines(old) if json.loads(line)["step"] <= resume_step)
    if kept != old:
        fresh = path.with_suffix(".tmp")
        with fresh.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)


def whole_lines(content: bytes) -> list[bytes]:
    """Lines of a metrics.jsonl up to the first one that is no JSON object with a step."""
    lines = []
    for line in content.splitlines(keepends=True):
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line)["step"], int)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            break
        lines.append(line)
    return lines


# ----------------------------------------------------------------------------------------- progress


@dataclasses.dataclass
class Progress:
    """What the display remembers between steps."""

    total: int  # 0: not known
    done: int
    times: collections.deque  # seconds that recent steps took
    bar: rich.progress.Progress | None  # None: standard error is no terminal
    last: float  # seconds at the end of the newest step
    accuracy: float | None = None
    printed: float = -math.inf
    pending: str = ""


def open_progress(total: int, done: int) -> Progress:
    """Start to show `done` of `total` steps (0: not known) on standard error."""
    bar = None
    if sys.stderr.isatty():
        columns = (rich.progress.BarColumn(bar_width=24),
                   rich.progress.TextColumn("{task.description}"))
        bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True),
                                     redirect_stdout=False)
        bar.add_task("", total=total or None, completed=done)
        bar.start()
    return Progress(total, done, collections.deque(maxlen=RECENT_STEPS), bar, time.monotonic())


def advance(progress: Progress, line: Mapping[str, Any]) -> None:
    """Show a metric line: a bar on a terminal, else a plain line at most every five seconds."""
    now = time.monotonic()
    progress.done = int(line["step"])
    # A step's own seconds, so that a phase's compiling does not count as if it came again.
    progress.times.append(float(line.get("time/step") or now - progress.last))
    progress.last = now
    progress.accuracy = _accuracy(line, progress.accuracy)
    seconds = sum(progress.times) / len(progress.times)
    text = progress_line(line, total=progress.total, accuracy=progress.accuracy, seconds=seconds)
    if progress.bar is not None:
        progress.bar.update(progress.bar.task_ids[0], description=text, completed=progress.done)
    elif now - progress.printed >= PLAIN_SECONDS:
        progress.printed, progress.pending = now, ""
        print(text, file=sys.stderr, flush=True)
    else:
        progress.pending = text


def close_progress(progress: Progress) -> None:
    """End the display; the last line is always shown."""
    if progress.bar is not None:
        progress.bar.stop()
    elif progress.pending:
        print(progress.pending, file=sys.stderr, flush=True)
        progress.pending = ""


def progress_line(line: Mapping[str, Any], *, total: int, accuracy: float | None,
                  seconds: float) -> str:
    """Step, phase, reward (SFT: loss), held-out accuracy, time per step and left, in one line."""
    step = int(line["step"])
    parts = [f"step {step}/{total}" if total else f"step {step}", str(line.get("phase", ""))]
    if line.get("reward/mean") is not None:
        parts.append(f"reward {float(line['reward/mean']):.3f}")
    elif line.get("policy/loss") is not None:
        parts.append(f"loss {float(line['policy/loss']):.3f}")
    if accuracy is not None:
        parts.append(f"accuracy {accuracy:.3f}")
    parts.append(f"{seconds:.2f} s/step")
    if total:
        left = round(max(total - step, 0) * seconds)
        parts.append(f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
    return "  ".join(part for part in parts if part)


def _accuracy(line: Mapping[str, Any], known: float | None) -> float | None:
    names = [name for name in line if name.startswith("eval/avg@")] + ["eval/greedy"]
    values = [line[name] for name in names if line.get(name) is not None]
    return float(values[0]) if values else known


# ----------------------------------------------------------------------------------------- compiles

# A module's variable, as jax too keeps its listeners for the life of the process.
_compiles: collections.Counter[str] = collections.Counter()


@functools.cache
def count_compiles() -> None:
    """Start to count the programs handed to XLA's compiler in this process; once is enough."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def compile_count() -> int:
    """Programs handed to the compiler since `count_compiles`.

    jax 0.10.2 sends one /jax/core/compile/backend_compile_duration for each, also where the
    persistent compilation cache answers, and none where a jitted function has the shape already:
    so the number does not depend on what that cache holds.
    """
    return _compiles["backend_compile"]


def _on_event(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs, details
    if "backend_compile" in event:
        _compiles["backend_compile"] += 1
