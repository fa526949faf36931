"""Several processes of one run: how they start, and the little that they tell each other.

Each holds the same host state and takes the same decisions, so nobody leads. They exchange what
only one of them knows (the rewards it scored, a signal it received) and, every step, a digest of
what must be the same.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax._src import cache_key
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dapo_jax import command_line, config, types
from dapo_jax.runtime import mesh as mesh_lib

Value = TypeVar("Value")

LEAST = 1 << 10  # bytes of the smallest exchange
MOST = 1_000_000  # processes, and seconds that one is waited for
_waited = {"meetings": 0.0}  # seconds; see `waited`
MANUAL, ALONE = "manual", "none"


class Parted(RuntimeError):
    """The processes of a run no longer hold the same state, or one did not come in time."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How the processes of a run find each other."""

    kind: str = ALONE  # none: one process; manual; or a name that jax.distributed knows
    coordinator: str = ""  # host:port of process 0; manual
    count: int = 1  # manual
    index: int = 0  # manual
    heartbeat_seconds: int = 100  # without a sign of life from a process, all others end
    join_seconds: int = 300  # that a process waits at the start for all others


FLAGS = {
    "cluster": command_line.Flag(ALONE, "how a run's processes find each other: none (it has one), "
                                 "manual (the next three flags), auto, or slurm, ompi, mpi4py, "
                                 "k8s, as jax.distributed names them"),
    "coordinator": command_line.Flag("", "HOST:PORT of process 0"),
    "processes": command_line.Flag(1, "how many there are"),
    "process": command_line.Flag(0, "which this is, from 0"),
    "heartbeat": command_line.Flag(100, "seconds without a sign of life from a process, after "
                                   "which all others end"),
    "join": command_line.Flag(300, "seconds that a process waits for the others at the start; then "
                              "it ends, as if one had died")}


def from_flags(flags: Mapping[str, Any]) -> Cluster:
    """The settings that the flags give."""
    return Cluster(flags["cluster"], flags["coordinator"], flags["processes"], flags["process"],
                   flags["heartbeat"], flags["join"])


def start(cluster: Cluster) -> None:
    """Join the run's other processes; to be called before anything asks jax for its devices.

    Raises ConfigError if the settings contradict each other or the others do not come.
    """
    _check(cluster)
    if cluster.kind == ALONE:
        return
    manual: dict[str, Any] = {}
    if cluster.kind == MANUAL:
        manual = {"coordinator_address": cluster.coordinator, "num_processes": cluster.count,
                  "process_id": cluster.index}
    method = None if cluster.kind in (MANUAL, "auto") else cluster.kind
    try:
        jax.distributed.initialize(
            **manual, cluster_detection_method=method,
            initialization_timeout=cluster.join_seconds,
            heartbeat_timeout_seconds=cluster.heartbeat_seconds,
            # One that ends by an error waits so long for the others, who wait for it.
            shutdown_timeout_seconds=cluster.heartbeat_seconds)
    except (RuntimeError, ValueError, KeyError, ImportError) as error:
        missing = " is not set" if isinstance(error, KeyError) else ""
        raise config.ConfigError(
            f"--cluster={cluster.kind}: the processes of the run did not find each other: {error}"
            f"{missing}. Outside such a cluster take --cluster=manual (--help says more)"
            ) from error
    if cluster.coordinator.rpartition(":")[0] in ("127.0.0.1", "localhost"):
        _find_programs_of_others()


def _find_programs_of_others() -> None:
    """Let the processes of one machine's CPU find in a shared cache folder what process 0, which
    alone writes there, compiled. Their keys differ by nothing but jax's fingerprint of the CPU as
    each process sees it; on several machines it also tells apart what their processors can do."""
    def described(hash_obj: Any, accelerators: np.ndarray) -> None:
        kinds = [(device.device_kind, device.process_index) for device in accelerators.flat]
        hash_obj.update(repr(kinds).encode())
    if jax.default_backend() == "cpu":
        cache_key._hash_accelerator_config = described


def _check(cluster: Cluster) -> None:
    """Refuse what jax.distributed would take: it would end by a crash, wait for ever, or not be
    asked at all."""
    given = [name for name, value, usual in (
        ("coordinator", cluster.coordinator, ""), ("processes", cluster.count, 1),
        ("process", cluster.index, 0)) if value != usual]
    if given and cluster.kind != MANUAL:
        raise config.ConfigError(f"--{given[0]} needs --cluster=manual, not {cluster.kind}")
    host, _, port = cluster.coordinator.rpartition(":")
    if cluster.kind == MANUAL and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise config.ConfigError("--cluster=manual needs --coordinator=HOST:PORT of process 0, not "
                                 f"{cluster.coordinator!r}")
    for name, number in (("processes", cluster.count), ("heartbeat", cluster.heartbeat_seconds),
                         ("join", cluster.join_seconds)):
        if not 1 <= number <= MOST:
            raise config.ConfigError(f"--{name}={number}: must be from 1 to {MOST}")
    if not 0 <= cluster.index < cluster.count:
        raise config.ConfigError(f"--process={cluster.index}: must be from 0 to --processes - 1 = "
                                 f"{cluster.count - 1}")


def main() -> bool:
    """Whether this is the process that writes the run's files."""
    return jax.process_index() == 0


@contextlib.contextmanager
def logged(workdir: str | os.PathLike) -> Iterator[None]:
    """Of several processes, each writes its messages to DIR/logs/process_0003.log too."""
    if jax.process_count() == 1:
        yield
        return
    folder = pathlib.Path(workdir) / "logs"
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"process_{jax.process_index():04d}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except BaseException:
        logging.getLogger().exception("ended by an error")
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # full disk; must not hide the run's error
            handler.close()


def share(size: int) -> slice:
    """The rows of `size` that are this process's part: every n-th, so that parts are alike."""
    return slice(jax.process_index(), size, jax.process_count())


def shares(size: int) -> list[slice]:
    """The parts of all processes."""
    return [slice(index, size, jax.process_count()) for index in range(jax.process_count())]


def gather(value: Value, *, what: str, seconds: float) -> list[Value]:
    """Every process's `value`, in their order. All must call it, at the same point of the run and
    from their main threads: what the devices exchange has one order.

    Raises Parted, naming `what`, if one of them has not come after `seconds`.
    """
    if jax.process_count() == 1:
        return [value]
    meet(what, seconds=seconds)
    content = pickle.dumps(value)
    sizes = _exchange(np.frombuffer(len(content).to_bytes(8, "little"), np.uint8), 8)
    lengths = [int.from_bytes(row.tobytes(), "little") for row in sizes]
    rows = _exchange(np.frombuffer(content, np.uint8), _width(max(lengths)))
    return [pickle.loads(row[:length].tobytes())
            for row, length in zip(rows, lengths, strict=True)]


def meet(what: str, *, seconds: float) -> None:
    """Wait until every process is here; Parted if one is not after `seconds`."""
    if jax.process_count() == 1:
        return
    begun = time.perf_counter()
    try:
        ocp.multihost.get_barrier_sync_fn()(key=what, timeout_ms=int(1000 * seconds))
    except Exception as error:  # the client's own error type is not public
        raise Parted(f"process {jax.process_index()} of {jax.process_count()}: at {what!r} not all "
                     f"processes came within {seconds:g} s; look at the logs of those named: "
                     f"{error}") from error
    finally:
        _waited["meetings"] += time.perf_counter() - begun


def waited() -> float:
    """Seconds that this process has spent in meetings, where it waits for the others."""
    return _waited["meetings"]


def leave(error: config.ConfigError, *, seconds: float) -> None:
    """Before a process leaves by `error`: return if all do, within `seconds`; else say it and end
    at once with the status of bad input. At a usual exit jax waits for the others and then aborts,
    and a launcher would start the same again."""
    try:
        meet("leaving by an error", seconds=seconds)
    except Parted:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(command_line.BAD_INPUT)


def first_alone(action: Callable[[], None], *, what: str, seconds: float) -> None:
    """Let process 0 do something for all; a ConfigError of it is raised in every process."""
    error = None
    if main():
        try:
            action()
        except config.ConfigError as refused:
            error = refused
    error = gather(error, what=what, seconds=seconds)[0]
    if error is not None:
        raise error


def compile_exchanges(largest: int) -> None:
    """Compile all that exchanges of up to `largest` bytes need."""
    if jax.process_count() == 1:
        return
    widths = [8]
    while widths[-1] < _width(largest):
        widths.append(max(LEAST, 2 * widths[-1]))
    for width in widths:
        _exchange(np.zeros(0, np.uint8), width)


def _width(size: int) -> int:
    return max(LEAST, 1 << (size - 1).bit_length())


def _exchange(content: np.ndarray, width: int) -> np.ndarray:
    """u8[processes, width]: each one's content with zeros behind it."""
    mesh = _meeting_place()
    row = np.zeros((1, width), np.uint8)
    row[0, :len(content)] = content
    own = mesh_lib.put(row, SingleDeviceSharding(mesh.devices[jax.process_index()]))
    rows = jax.make_array_from_single_device_arrays(
        (jax.process_count(), width), NamedSharding(mesh, PartitionSpec("process")), [own])
    return np.asarray(_everywhere()(rows))


@functools.cache
def _meeting_place() -> Mesh:
    """One device of each process."""
    firsts: dict[int, jax.Device] = {}
    for device in jax.devices():
        firsts.setdefault(device.process_index, device)
    return Mesh(np.array([firsts[index] for index in range(jax.process_count())]), ("process",))


@functools.cache
def _everywhere() -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(
        _meeting_place(), PartitionSpec()))


# ------------------------------------------------------------------------------------------- digest


def digests(tree: types.Tree) -> dict[str, str]:
    """A digest of each leaf of a tree of host arrays, by its dotted name."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): _digest(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _digest(leaf: np.ndarray) -> str:
    leaf = np.ascontiguousarray(leaf)
    head = f"{leaf.dtype.name}{leaf.shape}".encode()
    return hashlib.blake2b(head + leaf.tobytes(), digest_size=8).hexdigest()


def check_same(found: Sequence[Mapping[str, str]], *, where: str) -> None:
    """Raise Parted, naming the fields, if the processes' digests differ."""
    different = {name: [index for index, one in enumerate(found) if one.get(name) != first]
                 for name, first in found[0].items()}
    wrong = [f"{name} (process {', '.join(map(str, who))})"
             for name, who in different.items() if who]
    if wrong:
        raise Parted(f"{where}: not the same in all processes as in process 0: "
                     f"{'; '.join(wrong)}. Do all run the same code, data and reward function?")
