"""Packed microbatches against the same samples, each in a row of its own."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.learner import algorithms, packing, segments, update

SPEC = dataclasses.replace(tiny.SPEC, layers=1, d_model=16, ff=24)
SLIDING = dataclasses.replace(SPEC, layers=2, sliding_window=3, sliding=(True, False),
                              local_rope_base=20.0)
SETTINGS = update.Settings(algorithms.loss_settings(algorithms.dapo()), 0.7, 16)
PLAIN = packing.PackShape(slots=12, rows=1, prompt_buckets=(7,), completion_buckets=(6,))
PACKED = packing.PackShape(slots=2, rows=2, prompt_buckets=(14,), completion_buckets=(11,),
                           packed=True)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    length = rng.integers(1, 7, 12).astype(np.int32)
    mask = np.arange(6) < length[:, None]
    group = np.repeat(np.arange(4), 3).astype(np.int32)
    empty = types.no_samples(6)
    columns = {field.name: np.zeros(12, getattr(empty, field.name).dtype)
               for field in dataclasses.fields(types.Samples)}
    return types.Samples(**columns | {
        "tokens": rng.integers(0, 64, (12, 6)).astype(np.int32), "loss_mask": mask,
        "logprobs": np.where(mask, -4.0, 0).astype("f4"), "length": length, "group": group,
        "prompt": np.array([0, 2, 4, 0], np.int32)[group], "valid": np.ones(12, bool)})


def pack(samples, shape):
    rng = np.random.default_rng(1)
    weight = samples.loss_mask * rng.uniform(0.5, 1.5, (12, 1)).astype("f4") / 40
    weight[:, 0] *= rng.random(12) < 0.8  # a token that is seen and not learned from
    return packing.pack(samples, prompts=tiny.table(), weights=weight, shape=shape,
                        advantages=rng.normal(size=12).astype("f4"), fresh=np.ones(12, bool))


def gradient(spec, params, batches, settings=SETTINGS):
    one = jax.jit(jax.value_and_grad(
        lambda p, b: update.loss(p, b, spec=spec, settings=settings)[0]))
    parts = [one(params, batch) for batch in batches]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


@pytest.mark.parametrize(("spec", "attention"), [
    (SPEC, "xla"), pytest.param(SPEC, "blocked", marks=pytest.mark.slow),
    pytest.param(SLIDING, "xla", marks=pytest.mark.slow)])
def test_packed_equals_unpacked_in_loss_and_gradient(samples, spec, attention):
    params = tiny.params(spec)
    plain, packed = pack(samples, PLAIN), pack(samples, PACKED)
    assert any(len(set(row[row >= 0])) > 1
               for b in packed for slot in b.packed.after for row in slot)
    want = gradient(spec, params, plain)
    got = gradient(dataclasses.replace(spec, attention=attention), params, packed)
    assert float(got[0]) == pytest.approx(float(want[0]), abs=1e-6)
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (got[1], want[1])]
    assert np.linalg.norm(flat[0] - flat[1]) <= 5e-6 * np.linalg.norm(flat[1])


@pytest.mark.slow
def test_sequence_ratios_are_of_samples_also_in_shared_rows(samples):
    settings = dataclasses.replace(SETTINGS, loss=algorithms.loss_settings(algorithms.gspo()))
    params = tiny.params(SPEC)
    want, got = (gradient(SPEC, params, pack(samples, shape), settings)[0]
                 for shape in (PLAIN, PACKED))
    assert float(got) == pytest.approx(float(want), abs=1e-6)


def test_totals_are_sums_over_each_sample():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 3, 7)).astype("f4")
    sample = np.array([5, 5, 2, 2, 2, 9, -1])
    got = segments.totals(values, np.broadcast_to(sample, values.shape))
    for t in range(7):
        np.testing.assert_allclose(got[..., t], values[..., sample == sample[t]].sum(-1), atol=1e-6)
    np.testing.assert_allclose(segments.totals(values, None)[..., 3], values.sum(-1), atol=1e-6)
