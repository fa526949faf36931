"""Promise 1: loss and gradient of an update do not depend on how its samples are split, for any
weight scheme but the wrong one: random microbatches, packings, buckets and devices."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.learner import algorithms, packing, update, weights
from dapo_jax.runtime import mesh as mesh_lib

SPEC = dataclasses.replace(tiny.SPEC, layers=1, d_model=16, ff=16)
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 0.7, 16)
TABLE, NEW = tiny.table(), 6
MESHES = {1: ((1, 1, 1),), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 4: ((2, 2, 1), (1, 2, 2)),
          8: ((2, 2, 2), (4, 2, 1), (1, 4, 2))}  # devices -> data, fsdp, tensor
SPLITS, FEW, DOUBLE = 50, (0, 2), 4
HERE = os.path.dirname(os.path.abspath(__file__))


@dataclasses.dataclass(frozen=True)
class Split:
    shape: packing.PackShape
    mesh: tuple
    pieces: int  # that the samples are cut into, each packed for itself


def made():
    """Groups of 1 to 5 samples of 1 to 6 tokens, some of them masked; advantage by sample."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(8), [3, 1, 5, 2, 4, 3, 1, 5]).astype(np.int32)
    n = len(group)
    length = rng.integers(1, NEW + 1, n).astype(np.int32)
    mask = np.arange(NEW) < length[:, None]
    mask[rng.random(mask.shape) < 0.1] = False
    mask[2] = False  # a sample that was masked
    columns = {field.name: np.zeros(n, getattr(types.no_samples(NEW), field.name).dtype)
               for field in dataclasses.fields(types.Samples)}
    samples = types.Samples(**columns | {
        "tokens": rng.integers(0, SPEC.vocab, (n, NEW)).astype(np.int32), "loss_mask": mask,
        "logprobs": rng.normal(-4, 0.3, (n, NEW)).astype("f4"), "length": length, "group": group,
        "prompt": rng.permutation(8).astype(np.int32)[group], "valid": np.ones(n, bool)})
    return samples, rng.normal(size=n).astype("f4")


SAMPLES, ADVANTAGE = made()


def random_split(number):
    """The split of that number, and the number of devices it is for: 1, 2, 4 and 8 in turn."""
    rng = np.random.default_rng(number)
    devices = (1, 2, 4, 8)[number % 4]
    mesh = MESHES[devices][rng.integers(len(MESHES[devices]))]
    parts = mesh[0] * mesh[1]
    packed = bool(rng.random() < 0.4)
    slots, rows = parts * int(rng.integers(1, 4)), int(rng.integers(1, 6))
    prompts = (int(rng.choice([14, 21])),) if packed else ((8,), (4, 8), (3, 5, 7))[
        rng.integers(3)]
    completions = (int(rng.choice([6, 11])),) if packed else ((6,), (3, 6), (2, 4, 9))[
        rng.integers(3)]
    tokens = 0 if packed or rng.random() < 0.5 else parts * (
        prompts[-1] + rows * completions[-1]) * int(rng.integers(1, 3))
    return Split(packing.PackShape(slots, rows, prompts, completions, tokens, parts, packed), mesh,
                 int(rng.integers(1, 4))), devices


@functools.cache
def parameters(dtype):
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tiny.params(SPEC))


def table_of(scheme):
    return weights.WEIGHTS[scheme](SAMPLES.loss_mask, SAMPLES.group, max_length=NEW)


def batches_of(split, number, scheme):
    """The samples in a random order, cut, and packed piece by piece."""
    rng = np.random.default_rng([number, 1])
    order = rng.permutation(len(SAMPLES))
    cuts = np.sort(rng.integers(1, len(SAMPLES), split.pieces - 1))
    weight, batches = table_of(scheme), []
    for rows in np.split(order, cuts):
        batches += packing.pack(
            SAMPLES.take(rows), prompts=TABLE, advantages=ADVANTAGE[rows], weights=weight[rows],
            fresh=np.zeros(len(rows), bool), shape=split.shape)
    return batches


def summed(number, schemes, dtype="float32"):
    """Loss and flat gradient of each scheme under a split, accumulated as an update does it."""
    split, devices = random_split(number)
    spec = dataclasses.replace(SPEC, compute_dtype=dtype)
    mesh = tiny.mesh(*split.mesh, devices=jax.devices()[:devices])
    params = mesh_lib.put(parameters(dtype), mesh_lib.param_shardings(mesh, spec))
    one = jax.jit(functools.partial(update.accumulate, spec=spec, settings=SETTINGS))
    found = {}
    for scheme in schemes:
        batches = [mesh_lib.put(
            jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, batch),
            mesh_lib.batch_sharding(mesh)) for batch in batches_of(split, number, scheme)]
        with jax.set_mesh(mesh):
            sums = update.start(params, batches[0], spec=spec, settings=SETTINGS)
            for batch in batches:
                sums = one(sums, params, batch)
        found[scheme] = float(sums[1]["policy/loss"].total), flat(sums[0])
    return found


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def means(per_token, scheme):
    """The nested mean that a scheme stands for, over the samples as they are, by its definition."""
    on = SAMPLES.loss_mask.astype(np.float64)
    tokens = on.sum(1)
    of_sample = (per_token * on).sum(1)
    some = tokens > 0
    if scheme == "token":
        return of_sample.sum() / tokens.sum()
    if scheme == "sequence":
        return (of_sample[some] / tokens[some]).mean()
    if scheme == "constant":
        return (of_sample[some] / NEW).mean()
    groups = [SAMPLES.group == g for g in np.unique(SAMPLES.group[some])]
    return sum(of_sample[g].sum() / tokens[g].sum() for g in groups) / len(groups)


def weighed(per_token, scheme):
    """The same mean by the weights, which are single: the sum of a split has their rounding too."""
    return (table_of(scheme).astype(np.float64) * per_token).sum()


def whole(schemes, dtype="float32", mean=means):
    """Loss and gradient of all samples at once, each a whole sequence of its own."""
    spec = dataclasses.replace(SPEC, compute_dtype=dtype)
    start = np.array([len(TABLE.tokens[p]) for p in SAMPLES.prompt])
    tokens = np.zeros((len(SAMPLES), start.max() + NEW), np.int32)
    for row, prompt, own, end in zip(tokens, SAMPLES.prompt, SAMPLES.tokens, start):
        row[:end], row[end:end + NEW] = TABLE.tokens[prompt], own
    places = start[:, None] - 1 + np.arange(NEW)

    def per_token(tree):
        logp = jax.nn.log_softmax(tiny.full_logits(spec, tree, tokens) / 0.7)
        logp = logp[np.arange(len(SAMPLES))[:, None], places, SAMPLES.tokens]
        ratio, advantage = jnp.exp(logp - SAMPLES.logprobs.astype(dtype)), ADVANTAGE[:, None]
        bounded = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        return -jnp.where(advantage < 0, jnp.maximum(bounded, 10.0 * advantage), bounded)

    params = parameters(dtype)

    def values(tree):
        found = jnp.stack([mean(per_token(tree), scheme) for scheme in schemes])
        return found, found

    gradients, losses = jax.jit(jax.jacrev(values, has_aux=True))(params)
    gradients = jax.tree.leaves(gradients)
    return {scheme: (float(losses[i]), flat([leaf[i] for leaf in gradients]))
            for i, scheme in enumerate(schemes)}


def off(got, want):
    """Distance of the gradients over their norm."""
    return float(np.linalg.norm(got[1] - want[1]) / np.linalg.norm(want[1]))


SCHEMES = tuple(weights.WEIGHTS)


@pytest.fixture(scope="module")
def right():
    return whole(SCHEMES)


def check(found, right):
    for scheme in SCHEMES:
        assert found[scheme][0] == pytest.approx(right[scheme][0], abs=5e-6), scheme
        assert off(found[scheme], right[scheme]) <= 5e-6, scheme


@pytest.mark.parametrize("number", [
    n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in range(SPLITS) if n % 4 < 3])
def test_no_split_changes_the_loss_or_the_gradient(right, number):
    check(summed(number, SCHEMES), right)


@pytest.mark.slow
def test_no_split_over_eight_devices_does_either(right):
    """In a process that has eight; it prints the figures of its splits."""
    numbers = [n for n in range(SPLITS) if n % 4 == 3]
    code = ("import json, test_splits as t; print(json.dumps({n: {s: (v[0], v[1].tolist()) for s, v"
            f" in t.summed(n, t.SCHEMES).items()}} for n in {numbers}}}))")
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=1800,
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(
            [HERE, os.path.dirname(HERE), os.environ.get("PYTHONPATH", "")])})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 12
    for of in found.values():
        check({scheme: (loss, np.array(gradient)) for scheme, (loss, gradient) in of.items()},
              right)


@pytest.mark.slow
def test_in_double_precision_splits_agree_to_ten_digits():
    with jax.enable_x64(True):
        want = whole(SCHEMES, "float64", mean=weighed)
        for number in [n for n in range(SPLITS) if n % 4 < 3][:DOUBLE]:
            found = summed(number, SCHEMES, "float64")
            assert max(off(found[scheme], want[scheme]) for scheme in SCHEMES) <= 1e-10
            assert max(abs(found[s][0] - want[s][0]) for s in SCHEMES) <= 1e-10


def test_the_splits_are_as_different_as_they_are_meant_to_be():
    splits = [random_split(number) for number in range(SPLITS)]
    assert {devices for _, devices in splits} == {1, 2, 4, 8}
    assert 10 <= sum(split.shape.packed for split, _ in splits) <= 35
    assert sum(split.shape.tokens > 0 for split, _ in splits) >= 5
    assert len({len(batches_of(split, n, "token")) for n, (split, _) in enumerate(splits)}) >= 6
    assert len({split.shape for split, _ in splits}) >= 40
    few = [random_split(number)[0] for number in FEW]
    assert {split.shape.packed for split in few} == {True, False}
    assert {int(np.prod(split.mesh)) for split in few} == {1, 4}


def test_the_mean_of_microbatch_means_does_depend_on_the_split():
    """So its update is another one for every packing; the right scheme's weights never change."""
    found = set()
    for number in range(8):
        batches = batches_of(random_split(number)[0], number, "token")
        tokens = np.array([(batch.weights > 0).sum() for batch in batches])  # of each as one row
        wrong = weights.shares(tokens, weights.microbatch_count(tokens, np.arange(len(batches))))
        by_token = sum(float((w * batch.advantages * (batch.weights > 0)).sum(dtype=np.float64))
                       for w, batch in zip(wrong, batches, strict=True))
        right = sum(float((batch.weights * batch.advantages).sum(dtype=np.float64))
                    for batch in batches)
        assert right == pytest.approx(float((table_of("token") * ADVANTAGE[:, None]).sum()),
                                      abs=1e-6)
        found.add(round(by_token, 4))
    assert len(found) > 5
