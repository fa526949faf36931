"""Mean hidden states of completions, against a plain pass over each sample's whole sequence."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from test_step import hand_made

from dapo_jax import config, types
from dapo_jax.learner import features, packing
from dapo_jax.models import lora, transformer
from dapo_jax.runtime import mesh as mesh_lib

ADAPTER = config.Lora(rank=3, alpha=6.0, patterns=("attention.*", "mlp.up", "mlp.down"))
TABLE = tiny.table()
UPDATE = packing.PackShape(4, 2, (8,), (tiny.NEW,))
PACK = features.pack_shape(UPDATE, prompts=(8,), completions=(3, tiny.NEW), rows=3)
ONE = dataclasses.replace(PACK, completion_buckets=(tiny.NEW,))
prefill = jax.jit(transformer.prefill, static_argnums=0)


def made():
    """Groups of 1 to 7 samples of 1 to 6 tokens, in mixed order; some tokens masked, in the last
    sample all."""
    rng = np.random.default_rng(5)
    group = np.repeat(np.arange(6), [3, 1, 7, 2, 4, 3])
    samples = hand_made([rng.integers(0, 64, rng.integers(1, tiny.NEW + 1)) for _ in group],
                        group=group, reward=group % 2, prompt=rng.permutation(8)[group])
    mask = samples.loss_mask & (rng.random(samples.loss_mask.shape) < 0.8)
    mask[-1] = False
    return dataclasses.replace(samples, loss_mask=mask).take(rng.permutation(len(group)))


SAMPLES = made()


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def programs():
    return features.compile_programs(tiny.SPEC, config.Lora(), tiny.mesh(), pack=PACK)


@pytest.fixture(scope="module")
def adapter():
    """One whose B is not 0."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: lora.init(tiny.SPEC, ADAPTER, jax.random.key(0)))
    return jax.tree.map(lambda leaf: (0.2 * rng.normal(size=leaf.shape)).astype("f4"), shapes)


def place(tree, mesh=None):
    return mesh_lib.put(tree, mesh_lib.replicated(mesh or tiny.mesh()))


def plain(params, samples):
    """Each prefix of a sample's sequence run on its own, as a prompt; its last state is that of its
    last token."""
    prefixes, owner = [], []
    for row in range(len(samples)):
        whole = [*TABLE.tokens[samples.prompt[row]], *samples.tokens[row]]
        start = len(TABLE.tokens[samples.prompt[row]])
        for place in np.flatnonzero(samples.loss_mask[row]):
            prefixes.append(whole[:start + place + 1])
            owner.append(row)
    tokens = np.zeros((len(prefixes), 7 + tiny.NEW), np.int32)
    for target, prefix in zip(tokens, prefixes):
        target[:len(prefix)] = prefix
    states = np.asarray(prefill(tiny.SPEC, params, tokens, np.array(list(map(len, prefixes))))[0])
    return np.array([states[np.array(owner) == row].mean(axis=0) if row in owner
                     else np.zeros(tiny.SPEC.d_model) for row in range(len(samples))])


def test_features_are_the_mean_states_of_a_plain_pass_over_each_sample(programs, params):
    with jax.transfer_guard("disallow"):
        found = features.of(programs, place(params), SAMPLES, table=TABLE)
    assert found.dtype == np.float32 and found.shape == (len(SAMPLES), tiny.SPEC.d_model)
    np.testing.assert_allclose(found, plain(params, SAMPLES), atol=1e-5)
    empty = ~SAMPLES.loss_mask.any(axis=1)
    assert empty.any() and not found[empty].any() and found[~empty].any(axis=1).all()


def test_features_do_not_depend_on_the_order_of_samples_or_on_others(programs, params):
    found = functools.partial(features.of, programs, place(params), table=TABLE)
    whole = found(SAMPLES)
    order = np.random.default_rng(1).permutation(len(SAMPLES))
    np.testing.assert_allclose(found(SAMPLES.take(order)), whole[order], atol=1e-5)
    few = np.arange(0, len(SAMPLES), 3)
    np.testing.assert_allclose(found(SAMPLES.take(few)), whole[few], atol=1e-5)


def test_of_no_samples_there_are_no_features(programs, params):
    none = types.no_samples(tiny.NEW)
    assert features.of(programs, place(params), none, table=TABLE).shape == (0, 32)


def merged(params, adapter):
    merge = jax.jit(lora.merge, static_argnums=2)
    return jax.tree.map(np.asarray, merge(params, adapter, ADAPTER))


def test_an_adapter_s_features_are_those_of_the_merged_model(params, adapter):
    programs = features.compile_programs(tiny.SPEC, ADAPTER, tiny.mesh(), pack=ONE)
    found = features.of(programs, place(adapter), SAMPLES, table=TABLE, base=place(params))
    np.testing.assert_allclose(found, plain(merged(params, adapter), SAMPLES), atol=1e-5)
    assert np.abs(found - plain(params, SAMPLES)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_mesh_of_several_devices_gives_the_same_features(params, adapter, shape, rank):
    mesh = tiny.mesh(*shape)
    cfg = ADAPTER if rank else config.Lora()
    pack = features.pack_shape(
        dataclasses.replace(UPDATE, parts=mesh_lib.batch_parts(mesh)), prompts=(8,),
        completions=(tiny.NEW,), rows=3)
    programs = features.compile_programs(tiny.SPEC, cfg, mesh, pack=pack)
    model = mesh_lib.put(params, mesh_lib.param_shardings(mesh, tiny.SPEC))
    if rank:
        structs = mesh_lib.trained_structs(mesh, tiny.SPEC, cfg)
        trained = mesh_lib.put(adapter, jax.tree.map(lambda leaf: leaf.sharding, structs))
        found = features.of(programs, trained, SAMPLES, table=TABLE, base=model)
    else:
        found = features.of(programs, model, SAMPLES, table=TABLE)
    wanted = merged(params, adapter) if rank else params
    np.testing.assert_allclose(found, plain(wanted, SAMPLES), atol=1e-5)


def test_a_microbatch_has_about_the_update_s_tokens_and_a_slot_a_device():
    assert PACK.rows == 3 and PACK.tokens == 4 * (8 + 2 * tiny.NEW)
    assert [packing.slots_of(PACK, *shape) for shape in packing.shapes(PACK)] == [4, 3]
    packed = packing.PackShape(2, 1, (64,), (16,), parts=2, packed=True)
    rows = features.pack_shape(packed, prompts=(8,), completions=(16,), rows=4)
    assert not rows.packed and rows.tokens == 160 and packing.slots_of(rows, 8, 16) == 2
    small = packing.PackShape(0, 1, (8,), (16,), tokens=48, parts=2)
    wide = features.pack_shape(small, prompts=(8,), completions=(16,), rows=8)
    assert wide.tokens == 2 * (8 + 8 * 16) and packing.slots_of(wide, 8, 16) == 2
