"""How fast this machine multiplies and copies: what the work of a program is held against."""

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

MATRIX = {"cpu": 1536}  # rows and columns of the product by platform; elsewhere the next
LARGE_MATRIX = 8192
COPIED = {"cpu": 2 ** 26}  # bytes copied, well above the caches
LARGE_COPY = 2 ** 30


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates reached by one matrix product and one copy, all devices together."""

    flops: float  # operations a second
    bytes: float  # read and written a second


def measure(dtype: str, *, repeats: int) -> Limits:
    """The best of `repeats` products of square matrices, and of copies, times the devices.

    Run it beside what it is compared with: on a shared machine it changes.
    """
    platform = jax.default_backend()
    size = MATRIX.get(platform, LARGE_MATRIX)
    square = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: jnp.dot(x, x))
    seconds = min(timed(lambda: product(square), repeats=repeats).all)
    count = COPIED.get(platform, LARGE_COPY) // 4
    copied = jnp.ones(count, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    devices = len(jax.devices()) if platform != "cpu" else 1  # CPU devices share one memory
    return Limits(2.0 * size ** 3 / seconds * devices,
                  8.0 * count / min(timed(lambda: copy(copied), repeats=repeats).all) * devices)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of equal calls; `cpu` is the processor time of the whole process."""

    all: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the wall clock."""
        return statistics.median(self.all)

    @property
    def cpu_median(self) -> float:
        """Of the processor time."""
        return statistics.median(self.cpu)


def timed(call: Callable[[], object], *, repeats: int) -> Times:
    """Time `repeats` calls after one that is not counted; each is waited for."""
    jax.block_until_ready(call())
    walls, cpus = [], []
    for _ in range(repeats):
        begun, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        walls.append(time.perf_counter() - begun)
        cpus.append(time.process_time() - used)
    return Times(tuple(walls), tuple(cpus))


def peak_bytes() -> int:
    """Most memory held so far: of the first accelerator, or of the process on CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
