"""Whole runs in this process: equal programs are compiled once for all of them."""

import functools
import json
import pathlib

import jax
import metric_names
import numpy as np
import tiny_config

from dapo_jax import config_checks, setup, setup_phases, train
from dapo_jax.learner import optim, update
from dapo_jax.rollout import engine
from dapo_jax.runtime import checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
FREE = ("time/", "tokens_per_second/", "compiles")  # may differ between equal runs
RL_ONLY = {"sft.steps": 0}


def configure(changes=()):
    """The checked tiny configuration with changes by dotted name."""
    values = tiny_config.get_config()
    values.update_from_flattened_dict(dict(changes))
    return config_checks.from_dict(values)


@functools.cache
def _optimizer(cfg, horizon):
    return optim.optimizer(cfg, horizon)


def _shared_optimizer(phase, steps):
    """A constant rate knows no end, so runs of any length have one optimizer, and its programs."""
    constant = phase.optimizer.schedule == "constant"
    return _optimizer(phase.optimizer, 1 if constant else
                      steps * phase.updates_per_step * phase.epochs_per_batch)


def _remembered(function):
    cached = functools.cache(function)

    def call(*arguments, **options):
        options = {name: tuple(value) if isinstance(value, list) else value
                   for name, value in options.items()}
        return cached(*arguments, **options)

    return call


ENGINE, PROGRAMS = map(_remembered, (engine.compile_engine, update.compile_programs))


def reuse_programs(monkeypatch):
    """Let runs that need the same programs share them; a run's own compiles are not counted."""
    monkeypatch.setattr(engine, "compile_engine", ENGINE)
    monkeypatch.setattr(update, "compile_programs", PROGRAMS)
    monkeypatch.setattr(setup_phases, "optimizer", _shared_optimizer)


def run(workdir, changes=()):
    """Exit status of the tiny run with changes; docs/metrics.md has to name all that it wrote."""
    status = train.train(configure(changes), str(workdir))
    if (pathlib.Path(workdir) / "metrics.jsonl").is_file():
        metric_names.check_lines(pathlib.Path(workdir) / "metrics.jsonl")
    return status


def lines(workdir):
    """Lines of metrics.jsonl."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(workdir, phase="rl"):
    """Lines of one phase."""
    return [line for line in lines(workdir) if line["phase"] == phase]


def exact(workdir):
    """Lines without what may differ between equal runs."""
    return [{name: value for name, value in line.items() if not name.startswith(FREE)}
            for line in lines(workdir)]


def sample_files(workdir):
    """Content of each file of DIR/samples."""
    return {path.name: path.read_bytes()
            for path in sorted((pathlib.Path(workdir) / "samples").iterdir())}


def rollouts(workdir, step):
    """Rows of one step's samples."""
    path = pathlib.Path(workdir) / "samples" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def state(workdir, changes=(), step=None):
    """The newest checkpoint, or that of `step`, on the host."""
    parts = setup.prepare(configure(changes))
    manager = checkpoint.open_manager(workdir, keep=9)
    found = checkpoint.latest(manager) if step is None else step
    restored = checkpoint.restore(manager, setup.like_state(parts, found), step=step)
    checkpoint.close(manager)
    return jax.tree.map(np.asarray, jax.device_get(restored))


def assert_same_state(first, second):
    """Bit for bit."""
    one, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (first, second))
    assert [path for path, _ in one] == [path for path, _ in other]
    for (path, a), (_, b) in zip(one, other, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def assert_same_run(first, second):
    """Metrics, samples and final state of two work directories, bit for bit."""
    for one, other in zip(exact(first), exact(second), strict=True):
        assert one == other, [f"{name}: {one.get(name)} and {other.get(name)}"
                              for name in one.keys() | other.keys()
                              if one.get(name) != other.get(name)]
    assert sample_files(first) == sample_files(second)
    assert_same_state(state(first), state(second))
