"""Timelines of single steps, by jax.profiler."""

import contextlib
import pathlib
from collections.abc import Collection, Iterator

import jax


@contextlib.contextmanager
def traced(workdir: str, *, step: int, wanted: Collection[int]) -> Iterator[None]:
    """Trace what is done inside if `step` is one of those wanted.

    DIR/profile/step_N/ then holds, some folders down, perfetto_trace.json.gz for ui.perfetto.dev
    and the files that TensorBoard's profiler reads.
    """
    if step not in wanted:
        yield
        return
    folder = pathlib.Path(workdir) / "profile" / f"step_{step:06d}"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would slow the step and fill the trace
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        yield
