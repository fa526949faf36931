import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.runtime import processes

ROOT = pathlib.Path(__file__).resolve().parent.parent

PROBE = """
import dataclasses, json, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dapo_jax import config
from dapo_jax.runtime import mesh as mesh_lib, metrics, processes

address, index = sys.argv[1], int(sys.argv[2])
processes.start(processes.Cluster("manual", address, 2, index, heartbeat_seconds=100))
found = {"devices": len(jax.devices()), "main": processes.main()}
share = processes.share(5)
found["share"] = list(range(5))[share]
metrics.count_compiles()
processes.compile_exchanges(5000)
before = metrics.compile_count()
large = processes.gather("x" * 4000 if index else "", what="large", seconds=60)
found["lengths"] = [len(text) for text in large]
found["again"] = [processes.gather(10 * n + index, what="same name", seconds=60) for n in range(3)]
found["compiles"] = metrics.compile_count() - before

def refuse():
    raise config.ConfigError("only process 0 can know")

try:
    processes.first_alone(refuse, what="refusal", seconds=60)
except config.ConfigError as error:
    found["refused"] = str(error)

mesh = mesh_lib.make(config.Mesh(data=2, fsdp=2))
values = np.arange(16, dtype=np.float32).reshape(8, 2)
with jax.transfer_guard("disallow"):
    split = mesh_lib.put(values, mesh_lib.batch_sharding(mesh))
    pair = mesh_lib.put({"a": np.int32(7), "b": values}, {
        "a": mesh_lib.replicated(mesh), "b": NamedSharding(mesh, PartitionSpec("data"))})
total = jax.jit(lambda a, b: a.sum() + b["a"] + b["b"].sum(),
                out_shardings=mesh_lib.replicated(mesh))
found["total"] = float(mesh_lib.fetch(total(split, pair)))
found["rows"] = [shard.data[:, 0].tolist() for shard in split.addressable_shards]

sys.path.insert(0, "tests")
from test_filling import PACKED, SLOTS, prepared
from dapo_jax.learner import packing, stacks
whole = jax.jit(lambda tree: tree, out_shardings=mesh_lib.replicated(mesh))
own, found["stacked"] = mesh_lib.own_parts(mesh), []
for shape in (SLOTS, PACKED):
    sizes = {lengths: 2 for lengths in packing.shapes(shape)}
    mine, every = ([batch for work in prepared(one, updates=2)
                    for batch in stacks.stacked(work.batches, sizes)]
                   for one in (dataclasses.replace(shape, own=own), shape))
    for here, wanted in zip(mine, every, strict=True):
        with jax.transfer_guard("disallow"):
            joined = whole(stacks.put(here, mesh_lib.batch_sharding(mesh)))
        jax.tree.map(np.testing.assert_array_equal, joined, wanted)
        found["stacked"].append(int(here.count))
found["own"] = own
state = {"order": {"cursor": np.int32(3), "epoch": np.int32(0)}, "step": np.int32(index)}
digests = processes.gather(processes.digests(state), what="digests", seconds=60)
try:
    processes.check_same(digests, where="after step 3")
except processes.Parted as error:
    found["parted"] = str(error)
if index == 1:
    time.sleep(8)
begun = time.monotonic()
try:
    processes.gather(0, what="rewards of step 4", seconds=1)
except processes.Parted as error:
    found["late"], found["waited"] = str(error), time.monotonic() - begun
print(json.dumps(found), flush=True)
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def found():
    """What two processes of two devices each say."""
    return both(PROBE, {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"})


def both(code, env):
    """What two processes print at their end."""
    address = f"127.0.0.1:{free_port()}"
    started = [subprocess.Popen(
        [sys.executable, "-c", code, address, str(index)], cwd=ROOT, text=True, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE) for index in range(2)]
    results = []
    for process in started:
        out, error = process.communicate(timeout=400)
        assert out.strip(), error
        results.append(json.loads(out.strip().splitlines()[-1]))
    return results


def test_all_see_all_devices_and_one_writes(found):
    assert [one["devices"] for one in found] == [4, 4]
    assert [one["main"] for one in found] == [True, False]


def test_shares_are_disjoint_and_whole(found):
    assert [one["share"] for one in found] == [[0, 2, 4], [1, 3]]


def test_what_one_knows_all_know_in_the_processes_order_and_nothing_compiles(found):
    for one in found:
        assert one["lengths"] == [0, 4000] and one["again"] == [[0, 1], [10, 11], [20, 21]]
        assert one["compiles"] == 0


def test_what_process_0_refuses_all_refuse(found):
    assert [one["refused"] for one in found] == ["only process 0 can know"] * 2


def test_arrays_are_put_in_parts_and_computed_on_together(found):
    assert [one["total"] for one in found] == [120 + 7 + 120] * 2
    assert [one["rows"] for one in found] == [[[0, 2], [4, 6]], [[8, 10], [12, 14]]]


def test_stacks_of_what_each_process_packed_are_those_of_all(found):
    """Compared in the processes themselves, put together by the devices."""
    assert [one["own"] for one in found] == [[0, 1], [2, 3]]
    for one in found:
        assert max(one["stacked"]) == 2 and len(one["stacked"]) >= 4


def test_a_state_that_differs_names_the_field_and_the_process(found):
    for one in found:
        assert "after step 3" in one["parted"] and "step (process 1)" in one["parted"]
        assert "cursor" not in one["parted"]


def test_one_that_is_late_ends_the_others_in_time_by_name(found):
    assert "rewards of step 4" in found[0]["late"] and found[0]["waited"] < 7


def test_one_that_never_comes_is_waited_for_no_longer_than_asked():
    begun = time.monotonic()
    code = ("from dapo_jax.runtime import processes; processes.start(processes.Cluster("
            f"'manual', '127.0.0.1:{free_port()}', 2, 0, join_seconds=1))")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           timeout=250)
    assert ended.returncode not in (0, 2, 3)  # a launcher starts it again
    assert "DEADLINE_EXCEEDED" in ended.stderr, ended.stderr
    assert time.monotonic() - begun < 200  # of which most are imports, on a busy machine


CACHED = """
import json, sys
import jax, numpy as np
from dapo_jax import config
from dapo_jax.runtime import mesh as mesh_lib, processes

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
processes.start(processes.Cluster("manual", sys.argv[1], 2, int(sys.argv[2])))
mesh = mesh_lib.make(config.Mesh(data=2, fsdp=2))
rows = mesh_lib.put(np.arange(8, dtype=np.float32), mesh_lib.batch_sharding(mesh))
total = jax.jit(lambda a: (a * a).sum(), out_shardings=mesh_lib.replicated(mesh))(rows)
print(json.dumps({"total": float(total), "asked": events.count("compile_requests_use_cache"),
                  "found": events.count("cache_hits")}))
"""


@pytest.mark.slow
def test_started_again_every_process_finds_what_process_0_compiled(tmp_path):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
           "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first, again = (both(CACHED, env) for _ in range(2))
    for one in first + again:
        assert one["total"] == 140 and one["asked"] >= 1
    assert [one["found"] for one in first] == [0, 0]
    assert [one["found"] for one in again] == [one["asked"] for one in again]


def test_what_is_waited_in_meetings_is_counted_also_where_one_does_not_come(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    asked = []

    def barrier(*, key, timeout_ms):
        asked.append((key, timeout_ms))
        time.sleep(0.05)
        if key == "late":
            raise RuntimeError("deadline")
    monkeypatch.setattr(processes.ocp.multihost, "get_barrier_sync_fn", lambda: barrier)
    before = processes.waited()
    processes.meet("in time", seconds=2.5)
    assert 0.05 <= processes.waited() - before < 5
    with pytest.raises(processes.Parted, match="'late' not all .* within 3 s.*deadline"):
        processes.meet("late", seconds=3)
    assert processes.waited() - before >= 0.1
    assert asked == [("in time", 2500), ("late", 3000)]


# ----------------------------------------------------------------------------------------- alone


def test_one_process_alone_meets_nobody():
    assert processes.gather("a", what="x", seconds=0.0) == ["a"]
    assert processes.share(3) == slice(0, 3, 1) and processes.main()
    begun = time.monotonic()
    processes.meet("x", seconds=60)
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize("change,match", [
    ({"coordinator": ""}, "--coordinator=HOST:PORT"), ({"coordinator": "host"}, "HOST:PORT"),
    ({"coordinator": "host:http"}, "not 'host:http'"), ({"coordinator": ":1234"}, "HOST:PORT"),
    ({"coordinator": "host:65536"}, "HOST:PORT"), ({"coordinator": "host:0"}, "HOST:PORT"),
    ({"index": 2}, "--process=2"), ({"index": -1}, "from 0 to --processes - 1 = 1"),
    ({"count": 0}, "--processes=0: must be from 1"), ({"count": -2}, "--processes=-2"),
    ({"heartbeat_seconds": 0}, "--heartbeat=0: must be from 1"),
    ({"join_seconds": -5}, "--join=-5: must be from 1 to"),
    ({"join_seconds": 10 ** 9}, "--join=1000000000"),
    ({"kind": "none"}, "--coordinator needs --cluster=manual, not none"),
    ({"kind": "none", "coordinator": ""}, "--processes needs --cluster=manual, not none"),
    ({"kind": "slurm", "coordinator": "", "count": 1, "index": 1}, "--process needs .*not slurm")])
def test_settings_that_contradict_each_other_are_refused(change, match):
    settings = {"kind": "manual", "coordinator": "127.0.0.1:1", "count": 2, "index": 0} | change
    with pytest.raises(config.ConfigError, match=match):
        processes.start(processes.Cluster(**settings))


@pytest.mark.parametrize("kind, match", [
    ("slurm", "'SLURM_JOB_ID' is not set"), ("ompi", "--cluster=ompi: .* is not set"),
    ("mpi4py", "mpi4py"), ("slrum", "--cluster=slrum")])
def test_a_cluster_that_is_not_here_is_named_and_what_to_take(monkeypatch, kind, match):
    """By jax's own search; only its look at whether devices were asked for already is left out."""
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    monkeypatch.setattr("jax._src.clusters.mpi4py_cluster.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(config.ConfigError, match=f"(?s){match}.*take --cluster=manual"):
        processes.start(processes.Cluster(kind))


def test_a_digest_tells_values_shapes_and_types_apart():
    arrays = [np.zeros(4, np.int32), np.zeros(4, np.float32), np.zeros((2, 2), np.int32),
              np.array([0, 0, 0, 1], np.int32)]
    assert len({processes.digests({"a": array})["a"] for array in arrays}) == 4
    assert processes.digests({"a": arrays[0]}) == processes.digests({"a": arrays[0][::1].copy()})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_log_on_a_full_disk_does_not_hide_why_a_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "process_0000.log").symlink_to("/dev/full")
    with pytest.raises(config.ConfigError, match="the cause"), processes.logged(tmp_path):
        raise config.ConfigError("the cause")
