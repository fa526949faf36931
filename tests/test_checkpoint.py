import dataclasses
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from dapo_jax import config, types
from dapo_jax.runtime import checkpoint, checkpoint_files, tree_store

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPLIT = jax.sharding.NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)),
                                   jax.sharding.PartitionSpec("data"))


def i32(*values):
    return np.array(values if len(values) > 1 else values[0], np.int32)


def samples(rows: int) -> types.Samples:
    rng = np.random.default_rng(rows)
    return jax.tree.map(lambda c: rng.integers(0, 2, (rows, *c.shape[1:])).astype(c.dtype),
                        types.no_samples(5))


def run_state(step: int, rows: int = 0, width: int = 8) -> types.RunState:
    """Values depend on `step`; the dtypes are those a run has."""
    rng = np.random.default_rng(step)
    w = rng.normal(size=(width, 3)).astype(np.float32)
    params = {"block": {"w": jax.device_put(w, SPLIT), "half": jnp.asarray(w, jnp.bfloat16)}}
    train = types.TrainState(params=params, opt_state=(jnp.int32(step), {"nu": jnp.float32(1e-30)}),
                             updates=jnp.int32(step))
    controller = types.ControllerState(
        predictor=types.PredictorState(i32(1, 2), i32(3, 4), i32(2), np.float32(5),
                                       np.float32(0.5)),
        history=types.HistoryState(
            visits=rng.integers(0, 9, 4).astype(np.int32),
            successes=rng.random(4, np.float32), trials=rng.random(4, np.float32),
            streak=rng.integers(0, 9, 4).astype(np.int32), last=i32(-1, 3, 4, 9)),
        order=types.EpochOrder(rng.permutation(4).astype(np.int32), i32(0), np.int32(step)),
        next_group=i32(7), empty_steps=i32(0))
    return types.RunState(train=train, controller=controller,
                          demonstrations=types.EpochOrder(np.zeros(0, np.int32), i32(0), i32(0)),
                          buffer=samples(rows), step=i32(step))


def abstract(state: types.RunState) -> types.RunState:
    """As a new process makes it: shapes and shardings on the device, an empty buffer."""
    train = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                         state.train)
    return dataclasses.replace(state, train=train, buffer=types.no_samples(5))


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        if isinstance(a, jax.Array):
            assert a.sharding == b.sharding


def saved(workdir, *states, keep=5):
    manager = checkpoint.open_manager(workdir, keep=keep)
    for state in states:
        checkpoint.save(manager, state)
    checkpoint.close(manager)
    return checkpoint.open_manager(workdir, keep=keep)


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_a_state_comes_back_to_the_bit_with_any_number_of_carried_rows(tmp_path, rows):
    state = run_state(3, rows)
    manager = saved(tmp_path, state)
    assert_same_bits(checkpoint.restore(manager, abstract(state)), state)
    assert_same_bits(checkpoint.restore(manager, run_state(9, 2)), state)
    checkpoint.close(manager)


def test_saved_values_are_those_at_the_call(tmp_path):
    state = run_state(3, 2)
    want = jax.tree.map(lambda x: np.array(x), state)
    manager = checkpoint.open_manager(tmp_path, keep=1)
    checkpoint.save(manager, state)
    spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    jax.tree.map(spoil, state.train.params)
    state.buffer.reward[:] = -5
    checkpoint.wait(manager)
    got = checkpoint.restore(manager, abstract(run_state(3)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == b.tobytes()
    checkpoint.close(manager)


def test_the_newest_are_kept_and_latest_is_on_disk(tmp_path):
    manager = checkpoint.open_manager(tmp_path, keep=2)
    assert checkpoint.latest(manager) is None
    for step in (1, 2, 3):
        checkpoint.save(manager, run_state(step))
        seen = checkpoint.latest(manager)
        assert seen is None or (tmp_path / "checkpoints" / str(seen)).is_dir()
    checkpoint.wait(manager)
    assert checkpoint.latest(manager) == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert checkpoint.restore(manager, abstract(run_state(0)), step=2).step == 2
    with pytest.raises(config.ConfigError, match="complete checkpoint of step 1; there are: 3, 2"):
        checkpoint.restore(manager, abstract(run_state(0)), step=1)
    checkpoint.save(manager, run_state(3))  # a second save of a step changes nothing
    checkpoint.close(manager)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("lost, how", [
    ("_CHECKPOINT_METADATA", pathlib.Path.unlink), ("_CHECKPOINT_METADATA", empty),
    ("leaves/metadata", pathlib.Path.unlink), ("arrays/_METADATA", empty),
    ("arrays/manifest.ocdbt", empty), ("arrays", shutil.rmtree), ("leaves", shutil.rmtree),
])
def test_a_checkpoint_without_its_last_files_is_passed_over(tmp_path, caplog, lost, how):
    saved(tmp_path, run_state(2), run_state(4)).close()
    how(tmp_path / "checkpoints" / "4" / lost)
    manager = checkpoint.open_manager(tmp_path, keep=1)
    assert "incomplete: 4; the newest complete is 2" in caplog.text
    assert checkpoint.latest(manager) == 2
    assert_same_bits(checkpoint.restore(manager, abstract(run_state(0))), run_state(2))
    checkpoint.save(manager, run_state(4))  # the step is reached again
    checkpoint.wait(manager)
    assert_same_bits(checkpoint.restore(manager, abstract(run_state(0))), run_state(4))
    checkpoint.close(manager)


# Orbax leaves reads running when one fails; they then find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [0, 10])
def test_truncated_array_files_are_passed_over_with_a_message(tmp_path, caplog, size):
    saved(tmp_path, run_state(2), run_state(4)).close()
    for path in (tmp_path / "checkpoints" / "4" / "arrays").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:size])
    manager = checkpoint.open_manager(tmp_path, keep=2)
    assert_same_bits(checkpoint.restore(manager, abstract(run_state(0))), run_state(2))
    assert "checkpoint 4 cannot be read, trying an older one" in caplog.text
    assert checkpoint.latest(manager) == 2
    checkpoint.close(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_lacks_one_shard_is_passed_over_with_why(tmp_path, caplog):
    """Small values lie in tables of several files; a shard of more than 1 KiB in one of its own."""
    wide = run_state(2, width=4096)
    saved(tmp_path, wide, run_state(4, width=4096)).close()
    found = (tmp_path / "checkpoints" / "4" / "arrays").rglob("d/*")
    largest = max(found, key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 40_000
    largest.unlink()
    manager = checkpoint.open_manager(tmp_path, keep=2)
    assert_same_bits(checkpoint.restore(manager, abstract(wide)), wide)
    (told,) = [line for line in caplog.text.splitlines() if "cannot be read" in line]
    assert "checkpoint 4 cannot be read, trying an older one: process 0: " in told
    assert "train.params.block." in told and len(told) < 1000
    checkpoint.close(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_parameters_that_cannot_be_read_are_an_error_that_names_the_checkpoint(tmp_path):
    state = run_state(4, width=4096)
    saved(tmp_path, state).close()
    for path in (tmp_path / "checkpoints" / "4" / "arrays").rglob("d/*"):
        if path.stat().st_size > 40_000:
            path.unlink()
    like = abstract(state).train.params
    with pytest.raises(config.ConfigError, match="checkpoint 4 cannot be read: .*train.params"):
        tree_store.params_of_run(tmp_path, like)
    tree_store.save(tmp_path / "reference", state.train.params)
    for path in (tmp_path / "reference").rglob("d/*"):
        path.unlink()
    with pytest.raises(config.ConfigError, match="reference cannot be read: .*put a copy of it"):
        tree_store.restore(tmp_path / "reference", like)


def scored(workdir, *pairs, keep=1):
    """Checkpoints of these (step, score), each in a process of its own, as it were."""
    for step, score in pairs:
        manager = checkpoint.open_manager(workdir, keep=keep)
        checkpoint.save(manager, run_state(step), score=score)
        checkpoint.close(manager)
    manager = checkpoint.open_manager(workdir, keep=keep)
    found = checkpoint.best(manager), checkpoint.latest(manager)
    checkpoint.close(manager)
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir()), *found


def test_the_best_is_kept_beside_the_newest_also_by_a_run_that_goes_on(tmp_path):
    first = ((1, 0.2), (2, 0.7), (3, None), (4, float("nan")), (5, 0.4))
    assert scored(tmp_path, *first) == ([2, 5], 2, 5)
    assert scored(tmp_path, (6, 0.7)) == ([6], 6, 6)  # of equal ones the newest
    assert scored(tmp_path, (7, 0.1)) == ([6, 7], 6, 7)


def test_one_manager_keeps_the_same_as_many(tmp_path):
    manager = checkpoint.open_manager(tmp_path, keep=1)
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (5, 0.4)):
        checkpoint.save(manager, run_state(step), score=score)
    checkpoint.close(manager)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "5"]


def test_only_what_every_evaluation_measures_says_which_is_the_best():
    for name in ("eval/avg@4", "eval/pass@4", "eval/maj@4", "eval/greedy"):
        assert runs.configure({"checkpoint.best": name}).checkpoint.best == name
    with pytest.raises(config.ConfigError, match="best is 'eval/avg@8'; it must be .*eval/avg@4"):
        runs.configure({"checkpoint.best": "eval/avg@8"})
    with pytest.raises(config.ConfigError, match="checkpoint.best"):
        runs.configure({"checkpoint.best": "eval/greedy", "eval.greedy": False})


@pytest.mark.slow
def test_a_run_keeps_the_best_it_evaluated_though_it_was_interrupted(tmp_path):
    changes = {"checkpoint.best": "eval/avg@4", "checkpoint.keep": 1, "eval.every": 2}
    for steps in (2, 6):
        assert runs.run(tmp_path, changes | {"rl.steps": steps}) == 0
    scores = {line["step"]: line["eval/avg@4"] for line in runs.lines(tmp_path)
              if line["step"] in (4, 6, 8, 10)}  # the ends of phases, and every second
    wanted = {max(scores, key=lambda step: (scores[step], step)), 10}
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == wanted


@pytest.mark.parametrize("version, message", [
    ({"dapo_jax_format": 2}, "4 has format 2, and this dapo_jax reads 1"),
    ({}, "4 names no format of dapo_jax"), ({"dapo_jax_format": "1"}, "names no format")])
def test_a_newer_or_foreign_format_is_refused_and_stays(tmp_path, version, message):
    saved(tmp_path, run_state(2), run_state(4)).close()
    path = tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": version}))
    manager = checkpoint.open_manager(tmp_path, keep=2)
    with pytest.raises(config.ConfigError, match=message):
        checkpoint.restore(manager, abstract(run_state(0)))
    checkpoint.close(manager)
    with pytest.raises(config.ConfigError, match=message):
        tree_store.params_of_run(tmp_path, abstract(run_state(0)).train.params)
    assert path.is_file()


@pytest.mark.parametrize("text", ["[]", '{"custom_metadata": [1]}'])
def test_a_checkpoint_that_says_strange_things_of_itself_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(config.ConfigError, match="checkpoints cannot be read: .+ no other program"):
        checkpoint.open_manager(tmp_path, keep=1)
    assert path.read_text() == text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("text", ["[]", '{"step": 3}', '{"step": ["flt", []]}'])
def test_a_table_of_shapes_that_is_none_is_passed_over_with_a_message(tmp_path, caplog, text):
    saved(tmp_path, run_state(2), run_state(4)).close()
    table = tmp_path / "checkpoints" / "4" / "leaves" / "metadata"
    table.write_text(text)
    manager = checkpoint.open_manager(tmp_path, keep=2)
    with pytest.raises(config.ConfigError, match="4 cannot be read: .*is no table of .*remove it"):
        tree_store.check_run(tmp_path, abstract(run_state(0)).train.params)
    assert checkpoint.restore(manager, abstract(run_state(0))).step == 2
    assert "checkpoint 4 cannot be read" in caplog.text and "leaves/metadata is no" in caplog.text
    checkpoint.close(manager)


@pytest.mark.parametrize("text", ["", '{"sco', "3"])
def test_a_damaged_score_costs_its_checkpoint_and_no_other(tmp_path, caplog, text):
    saved(tmp_path, run_state(2), run_state(4)).close()
    (tmp_path / "checkpoints" / "4" / "metrics" / "metrics").write_text(text)
    manager = checkpoint.open_manager(tmp_path, keep=2)
    assert "checkpoint 4 is renamed to incomplete_4_0" in caplog.text
    assert (checkpoint.latest(manager), checkpoint.best(manager)) == (2, None)
    assert checkpoint.restore(manager, abstract(run_state(0))).step == 2
    checkpoint.close(manager)


def test_of_another_phase_an_older_state_is_read_as_the_tree_that_it_is(tmp_path):
    """The optimizer of the newest checkpoint, which cannot be read, has another state."""
    old = run_state(2)
    old = dataclasses.replace(old, train=dataclasses.replace(old.train, opt_state=(jnp.int32(7),)))
    saved(tmp_path, old, run_state(4)).close()
    (tmp_path / "checkpoints" / "4" / "leaves" / "metadata").write_text("[]")
    manager = checkpoint.open_manager(tmp_path, keep=2)
    asked = []

    def like(step):
        asked.append(step)
        return abstract({2: old, 4: run_state(4)}[step])
    assert_same_bits(checkpoint.restore(manager, like), old)
    assert asked == [4, 2]
    checkpoint.close(manager)


@pytest.mark.parametrize("left, fine", [
    ([], True), (["4.orbax-checkpoint-tmp-1"], True), (["4"], False), (["incomplete_4_0"], False)])
def test_a_run_does_not_begin_anew_over_what_was_whole_once(tmp_path, left, fine):
    """A save that was killed has another name, and is no loss."""
    for name in left:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    manager = checkpoint.open_manager(tmp_path, keep=2)
    if fine:
        checkpoint_files.check_none_was_there(manager)
    else:
        with pytest.raises(config.ConfigError, match=f"left of some: {left[0]}; put back .*remove"):
            checkpoint_files.check_none_was_there(manager)
    checkpoint.close(manager)


def test_a_folder_that_is_named_nearly_as_a_step_is_left_alone(tmp_path):
    saved(tmp_path, run_state(2)).close()
    for name in ("0004", "²"):
        (tmp_path / "checkpoints" / name).mkdir()
    manager = checkpoint.open_manager(tmp_path, keep=2)
    assert checkpoint.latest(manager) == 2
    checkpoint.save(manager, run_state(4))
    checkpoint.close(manager)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"0004", "²", "2", "4"}


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(config.ConfigError, match="checkpoints cannot be read: .+; is it a folder"):
        checkpoint.open_manager(tmp_path, keep=1)


FULL = """
    import pathlib, sys
    import jax, numpy as np
    from dapo_jax import config
    from dapo_jax.runtime import checkpoint
    sys.path.insert(0, "tests")
    import test_checkpoint

    manager = checkpoint.open_manager(sys.argv[1], keep=1)
    for step, size in ((2, 8), (4, 1 << 20)):
        state = test_checkpoint.run_state(step)
        state.train.params["big"] = np.random.default_rng(0).normal(size=size)
        state.train.params["big"] = jax.device_put(state.train.params["big"].astype(np.float32))
        checkpoint.save(manager, state)
        try:
            checkpoint.wait(manager)
        except config.ConfigError as error:
            print(step, error)
"""


def test_a_full_disk_is_told_and_costs_no_earlier_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk],
                             capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    try:
        child = subprocess.run([sys.executable, "-c", textwrap.dedent(FULL), str(disk)], cwd=ROOT,
                               capture_output=True, text=True, timeout=400)
        assert re.match(r"4 .*the last checkpoint could not be written: .*No space left.*"
                        r"Complete there: 2; make room", child.stdout, re.DOTALL), child
        manager = checkpoint.open_manager(disk, keep=1)
        state = run_state(2)
        state.train.params["big"] = np.zeros(8, np.float32)
        assert checkpoint.restore(manager, state).step == 2
        checkpoint.close(manager)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_parameters_come_alone_whatever_else_the_state_holds(tmp_path):
    saved(tmp_path, run_state(2), run_state(4, 6)).close()
    for wanted in (2, 4, -1):
        want = run_state(wanted if wanted > 0 else 4).train.params
        step, got = tree_store.params_of_run(tmp_path, abstract(run_state(0)).train.params,
                                             wanted=wanted)
        assert step == (wanted if wanted > 0 else 4)
        assert_same_bits(got, want)
    with pytest.raises(config.ConfigError, match="checkpoint of step 3; there are: 4, 2$"):
        tree_store.params_of_run(tmp_path, abstract(run_state(0)).train.params, wanted=3)


def test_a_run_without_a_checkpoint_is_named_by_its_setting_with_what_to_do(tmp_path):
    like = abstract(run_state(0)).train.params
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("none", "file", "new"):
        said = f"config.rl.reference={tmp_path / name} holds no complete checkpoint; name .* a run"
        with pytest.raises(config.ConfigError, match=said):
            tree_store.check_run(tmp_path / name, like, where="config.rl.reference")


def test_with_nothing_readable_the_message_says_what_to_do(tmp_path):
    manager = checkpoint.open_manager(tmp_path, keep=2)
    with pytest.raises(config.ConfigError, match="no checkpoint that can be read; start in"):
        checkpoint.restore(manager, run_state(0))
    with pytest.raises(config.ConfigError, match="checkpoint.keep is 0"):
        checkpoint.open_manager(tmp_path, keep=0)


KILLED = """
    import os, pathlib, signal, sys, time
    import jax, numpy as np
    from dapo_jax.runtime import checkpoint
    sys.path.insert(0, "tests")
    import test_checkpoint

    workdir = pathlib.Path(sys.argv[1])
    manager = checkpoint.open_manager(workdir, keep=1)
    state = test_checkpoint.run_state(2)
    checkpoint.save(manager, state)
    checkpoint.wait(manager)
    big = jax.device_put(np.random.default_rng(0).normal(size=3 << 22).astype(np.float32))
    state = test_checkpoint.run_state(4)
    state.train.params["big"] = big
    checkpoint.save(manager, state)
    deadline = time.monotonic() + 30
    while not any((workdir / "checkpoints").glob("4.*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_while_it_saves_goes_on_from_the_one_before(tmp_path, caplog):  # B68
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], cwd=ROOT,
                           capture_output=True, text=True, timeout=400)
    assert child.returncode == -signal.SIGKILL, child.stderr
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(names) == 2 and names[0] == "2" and names[1].startswith("4.")
    manager = checkpoint.open_manager(tmp_path, keep=1)
    assert f"incomplete: {names[1]}; the newest complete is 2" in caplog.text
    assert checkpoint.latest(manager) == 2
    assert_same_bits(checkpoint.restore(manager, abstract(run_state(0))), run_state(2))
    checkpoint.save(manager, run_state(4))
    checkpoint.close(manager)
    manager = checkpoint.open_manager(tmp_path, keep=1)
    assert_same_bits(checkpoint.restore(manager, abstract(run_state(0))), run_state(4))
    checkpoint.close(manager)


def renamed(state):
    params = {"other": state.train.params["block"]}
    return dataclasses.replace(state, train=dataclasses.replace(state.train, params=params))


@pytest.mark.parametrize("change, message", [
    (lambda s: run_state(0, width=12),
     r"train.params.block.half is bfloat16\[8,3\], but this configuration needs bfloat16\[12,3\]"),
    (renamed, "holds no train.params.other.half"),
    (lambda s: dataclasses.replace(s, train=dataclasses.replace(s.train, opt_state=())),
     "also holds train.opt_state.0"),
    (lambda s: dataclasses.replace(s, train=dataclasses.replace(s.train, updates=jnp.float32(0))),
     r"train.updates is int32\[\], but this configuration needs float32\[\]"),
    (lambda s: dataclasses.replace(s, buffer=types.no_samples(6)),
     r"buffer.tokens is int32\[0,5\], but this configuration needs int32\[0,6\]"),
])
def test_another_model_is_refused_by_the_name_of_a_leaf(tmp_path, change, message):
    manager = saved(tmp_path, run_state(1))
    with pytest.raises(config.ConfigError, match=message):
        checkpoint.restore(manager, change(run_state(1)))
    assert checkpoint.latest(manager) == 1
    checkpoint.close(manager)


def test_a_state_moves_to_another_sharding(tmp_path):
    state = run_state(1)
    manager = saved(tmp_path, state)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    like = abstract(state)
    like.train.params["block"]["w"] = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=whole)
    got = checkpoint.restore(manager, like).train.params["block"]["w"]
    assert got.sharding == whole
    assert np.array_equal(np.asarray(got), np.asarray(state.train.params["block"]["w"]))
    checkpoint.close(manager)


def test_a_work_directory_of_another_configuration_is_refused(tmp_path):
    old = {"seed": 0, "rl": {"steps": 5, "optimizer": {"b1": 0.9}}, "levels": ((1, 2.0),)}
    checkpoint.check_config(tmp_path, old, free=())
    checkpoint.write_config(tmp_path, old)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    checkpoint.check_config(tmp_path, old, free=())
    new = {"seed": 1, "rl": {"steps": 6, "optimizer": {}}, "levels": ((1, 2.0),), "rlx": 1}
    with pytest.raises(config.ConfigError) as caught:
        checkpoint.check_config(tmp_path, new, free=("rl.steps",))
    assert str(caught.value).splitlines()[1:] == [
        "  seed: 0 there, 1 now", "  rlx: 'absent' there, 1 now",
        "  rl.optimizer.b1: 0.9 there, 'absent' now"]
    with pytest.raises(config.ConfigError, match="rlx"):
        checkpoint.check_config(tmp_path, new, free=("rl", "seed"))
    checkpoint.check_config(tmp_path, new, free=("rl", "seed", "rlx"))


@pytest.mark.parametrize("text", ['{"a": ', "[1]"])
def test_an_unreadable_configuration_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(config.ConfigError, match="config.json is no JSON object"):
        checkpoint.check_config(tmp_path, {}, free=())


def test_foreign_files_do_not_disturb(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "README").write_text("x")
    checkpoint.check_config(tmp_path, {"a": 1}, free=())
    manager = saved(tmp_path, run_state(1))
    assert checkpoint.latest(manager) == 1
    checkpoint.close(manager)
