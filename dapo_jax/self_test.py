"""What must hold wherever the system runs, tried in seconds on a tiny model."""

import dataclasses
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax import config, config_checks, setup, types
from dapo_jax.envs import coin
from dapo_jax.envs import pool as pools
from dapo_jax.learner import algorithms, packing, update, weights
from dapo_jax.models import spec as specs
from dapo_jax.models import transformer
from dapo_jax.runtime import checkpoint
from dapo_jax.runtime import mesh as mesh_lib

CLOSE = 1e-5  # relative difference that the order of float32 sums may make
NEW = 4  # tokens of a completion
# A microbatch each for all samples, and for two prompts with two samples each.
SPLITS = (packing.PackShape(4, 4, (4,), (NEW,)), packing.PackShape(2, 2, (4,), (NEW,)))


class Wrong(Exception):
    """A check that ran and did not find what must be."""


def exact_loss() -> str:
    """One batch, split in two ways: loss and gradient must not differ. Says by how much they do."""
    spec = specs.ModelSpec(vocab=32, layers=1, d_model=16, heads=2, kv_heads=1, head_size=8, ff=16)
    mesh, samples = mesh_lib.make(config.Mesh()), _samples(spec.vocab)
    init = jax.jit(lambda: transformer.init(spec, jax.random.key(0)),
                   out_shardings=mesh_lib.param_shardings(mesh, spec))
    # Else an accelerator multiplies float32 numbers as shorter ones, in its own way by shape.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        params = init()
        one, other = (_summed(spec, mesh, params, samples, shape) for shape in SPLITS)
    off = max(float(np.linalg.norm(a - b) / np.linalg.norm(a))
              for a, b in zip(one, other, strict=True))
    if not off <= CLOSE:  # NaN too
        raise Wrong(f"two splits of one batch differ by {off:.1e} of loss or gradient, more than "
                    f"{CLOSE:.0e}")
    return f"two splits of {len(samples)} samples agree to {off:.0e}"


def _samples(vocab: int) -> types.Samples:
    """Groups of 1 to 4 samples of 1 to NEW tokens."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(4), [3, 1, 4, 2]).astype(np.int32)
    length = rng.integers(1, NEW + 1, len(group)).astype(np.int32)
    shape = (len(group), NEW)
    blank = {field.name: np.zeros(len(group), getattr(types.no_samples(NEW), field.name).dtype)
             for field in dataclasses.fields(types.Samples)}
    return types.Samples(**blank | {
        "tokens": rng.integers(0, vocab, shape).astype(np.int32),
        "loss_mask": np.arange(NEW) < length[:, None], "length": length, "group": group,
        "logprobs": rng.normal(-3.5, 0.3, shape).astype(np.float32), "prompt": group,
        "valid": np.ones(len(group), bool)})


def _summed(spec: specs.ModelSpec, mesh: jax.sharding.Mesh, params: types.Tree,
            samples: types.Samples, shape: packing.PackShape) -> tuple[np.ndarray, np.ndarray]:
    """Loss f64[1] and flat gradient f64[P] of the samples, packed in this shape."""
    rng = np.random.default_rng(1)
    table = types.PromptTable(tuple(rng.integers(0, spec.vocab, n).astype(np.int32)
                                    for n in (2, 4, 3, 1)), ({},) * 4, ())
    batches = packing.pack(
        samples, prompts=table, advantages=rng.normal(size=len(samples)).astype(np.float32),
        weights=weights.token(samples.loss_mask, samples.group, max_length=NEW),
        fresh=np.zeros(len(samples), bool), shape=shape)
    settings = update.Settings(algorithms.loss_settings(algorithms.dapo()), 1.0, 16)
    add = jax.jit(lambda sums, batch: update.accumulate(
        sums, params, batch, spec=spec, settings=settings))
    sums = update.start(params, batches[0], spec=spec, settings=settings)
    for batch in batches:
        sums = add(sums, mesh_lib.put(batch, mesh_lib.batch_sharding(mesh)))
    gradient, metrics = mesh_lib.fetch(sums)
    return (np.array([metrics["policy/loss"].total], np.float64),
            np.concatenate([np.ravel(leaf).astype(np.float64)
                            for leaf in jax.tree.leaves(gradient)]))


def resume() -> str:
    """A run's state, saved and restored into what a new process would make: equal to the bit."""
    parts = setup.prepare(_tiny())
    state = setup.initial_state(parts)
    with tempfile.TemporaryDirectory(prefix="dapo_jax_doctor_") as folder:
        manager = checkpoint.open_manager(folder, keep=1)
        try:
            checkpoint.save(manager, state)
            checkpoint.wait(manager)
            found = checkpoint.restore(manager, setup.like_state(parts, 0))
        finally:
            checkpoint.close(manager)
    leaves = _named(state)
    for name, leaf in _named(found).items():
        if leaf.tobytes() != leaves[name].tobytes():
            raise Wrong(f"{name} is not what was saved")
    return f"{len(leaves)} arrays saved and restored, equal to the bit"


def _tiny() -> config.Config:
    values = config.default()
    values.update_from_flattened_dict({
        "model.layers": 1, "model.d_model": 16, "model.heads": 2, "model.kv_heads": 1,
        "model.head_size": 8, "model.ff": 16, "task.train_size": 40, "eval.prompts": 4})
    return config_checks.from_dict(values)


def _named(state: types.RunState) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(mesh_lib.fetch(state))}


def scoring() -> str:
    """A worker process starts and gives the rewards that its function gives here."""
    texts = ("one", "two", "three", "four")
    with pools.open("dapo_jax.envs.coin:score", config.Scoring()) as pool:
        pools.ready(pool)
        scores = pools.score(pool, texts, [{}] * len(texts))
    wanted = [coin.score(text, {}) for text in texts]
    if not _same(scores.reward, wanted) or not scores.valid.all():
        raise Wrong(f"rewards {scores.reward.tolist()}, not {wanted}; {scores.first_failure}")
    return f"a worker process scored {len(texts)} answers"


def _same(found: np.ndarray, wanted: Sequence[float]) -> bool:
    return found.tolist() == list(wanted)
