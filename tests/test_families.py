"""Every family against transformers' own models, through a folder that transformers wrote."""

import functools

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
import tiny

from dapo_jax.models import families, head, hf, hf_config, layers, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import decode

TOKENS = np.random.default_rng(3).integers(0, 64, (2, 16)).astype(np.int32)  # 3 windows long

prefill = jax.jit(transformer.prefill, static_argnums=0)
extend = jax.jit(transformer.extend, static_argnums=0)


class Pair:
    """One model, theirs and ours."""

    def __init__(self, name, folder):
        self.theirs = hf_models.model(name)
        source = hf.open(hf_models.save(self.theirs, folder))
        self.spec = hf.spec(source)
        self.tree = tiny.gathered(self.spec, hf.pieces(source, self.spec))

    def logits(self, hidden):
        return np.asarray(head.logits(self.tree, hidden, softcap=self.spec.logit_softcap))


@pytest.fixture(scope="module", params=hf_models.NAMES)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_are_equal_at_every_position(pair):
    got = tiny.full_logits(pair.spec, pair.tree, TOKENS)
    np.testing.assert_allclose(got, hf_models.logits(pair.theirs, TOKENS), atol=1e-4)


def test_prompts_then_rows_equal_padded_batches_on_either_side(pair):  # B52
    """A prompt beyond the window, a short one, and rows that reach back into both."""
    lengths, width, new = (9, 2), 11, 5
    padded = np.full((2, width), 7, np.int32)
    for row, tokens, length in zip(padded, TOKENS, lengths):
        row[:length] = tokens[:length]
    last, cache = prefill(pair.spec, pair.tree, padded, np.array(lengths, np.int32))
    rows = np.stack([tokens[n:n + new] for tokens, n in zip(TOKENS, lengths)])[:, None]
    rows = np.concatenate([np.full_like(rows, 5), rows], axis=1)  # a neighbour in each slot
    states = extend(pair.spec, pair.tree, rows, cache)
    first, rest = pair.logits(last), pair.logits(states[:, 1])
    total = max(lengths) + new
    for slot, (tokens, length) in enumerate(zip(TOKENS, lengths)):
        for left in (True, False):
            batch, mask = np.full((1, total), 7), np.zeros((1, total), int)
            start = total - length - new if left else 0
            batch[0, start:start + length + new] = tokens[:length + new]
            mask[0, start:start + length + new] = 1
            want = hf_models.logits(pair.theirs, batch, mask)[0, start:]
            np.testing.assert_allclose(first[slot], want[length - 1], atol=1e-4)
            np.testing.assert_allclose(rest[slot], want[length:length + new], atol=1e-4)


def test_cached_decoding_equals_the_whole_sequence_beyond_the_window(pair):
    spec, cut, new = pair.spec, (3, 7), 9
    padded = np.full((2, 8), 7, np.int32)
    for row, tokens, length in zip(padded, TOKENS, cut):
        row[:length] = tokens[:length]
    _, cache = prefill(spec, pair.tree, padded, np.array(cut, np.int32))
    want = hf_models.logits(pair.theirs, TOKENS)

    @jax.jit
    def one(tree, tokens, own, index):
        return transformer.decode(spec, transformer.unstack(spec, tree), tokens, cache, own,
                                  column=index, position=jnp.full(tokens.shape, index))

    own = decode.empty(spec, slots=2, rows=2, width=1, new=new + 1).own
    for index in range(new):
        tokens = np.array([[5, row[at + index]] for row, at in zip(TOKENS, cut)], np.int32)
        state, own = one(pair.tree, tokens, own, jnp.int32(index))
        for slot, at in enumerate(cut):
            np.testing.assert_allclose(pair.logits(state[slot, 1]), want[slot, at + index],
                                       atol=1e-4)


def test_gradients_of_a_token_loss_are_equal_on_every_parameter(pair):
    import torch

    def loss(tree):
        hidden = tiny.full_hidden(pair.spec, tree, TOKENS[:, :-1])
        logp, _ = head.token_stats(tree, hidden, TOKENS[:, 1:], temperature=1.0, chunk=8,
                                   softcap=pair.spec.logit_softcap)
        return -logp.mean()

    got = jax.grad(loss)(pair.tree)
    batch = torch.tensor(TOKENS, dtype=torch.long)
    pair.theirs.zero_grad()
    pair.theirs(batch, labels=batch).loss.backward()
    theirs = {name: weight.grad.numpy() for name, weight in pair.theirs.named_parameters()}
    tensors = families.tensors(pair.spec, "hf")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        leaf = functools.reduce(lambda tree, key: tree[key], tensor.path, got)
        ours = tensor.flatten(np.asarray(leaf if tensor.layer is None else leaf[tensor.layer]))
        scale = np.abs(theirs[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(ours, theirs[name], rtol=1e-3, atol=1e-3 * scale, err_msg=name)


def test_every_option_of_the_spec_is_at_work_in_some_family(tmp_path):
    plain = specs.ModelSpec(vocab=64, layers=4, d_model=32, heads=4, kv_heads=2, head_size=16,
                            ff=48)
    changed = set()
    for name in hf_models.NAMES:
        hf_models.configuration(name).save_pretrained(tmp_path / name)
        values = hf.json_file(tmp_path / name / "config.json")
        values["architectures"] = [families.FAMILIES[name].architecture]
        spec = hf_config.read(values, path=tmp_path)
        changed |= {field for field, value in vars(plain).items() if value != getattr(spec, field)}
    runs = {"param_dtype", "compute_dtype", "remat", "attention"}
    assert set(vars(plain)) - changed - runs == {
        "vocab", "layers", "d_model", "heads", "kv_heads", "ff"}


# ------------------------------------------------------------------------- against loops in numpy


@pytest.mark.parametrize(("extra", "leaves"), [
    ({}, set()), ({"qkv_bias": True}, {"query_bias", "key_bias", "value_bias"}),
    ({"qk_norm": True}, {"query_norm", "key_norm"})])
def test_llama_qwen2_and_qwen3_equal_a_plain_numpy_forward(extra, leaves):  # B82
    spec = specs.ModelSpec(vocab=64, layers=2, d_model=32, heads=4, kv_heads=2, head_size=8, ff=48,
                           **extra)
    tree = tiny.params(spec)
    # The loops use what is there; without this a part left out would be left out on both sides.
    assert tree["blocks"]["attention"].keys() - {"norm", "query", "key", "value", "out"} == leaves
    got = np.asarray(tiny.full_logits(spec, tree, TOKENS[:1, :12]))[0]
    want = plain_model.forward(tree, TOKENS[0, :12], eps=spec.norm_eps,
                               frequencies=layers.rope_frequencies(spec).astype(np.float64))
    for position in (0, 1, 5, 11):
        np.testing.assert_allclose(got[position], want[position], atol=1e-4)


# ----------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_file_s_values_come_back_after_the_way_in_and_out(name):
    spec = specs.ModelSpec(vocab=10, layers=2, d_model=6, heads=3, kv_heads=1, head_size=4, ff=5,
                           tied=False, **families.FAMILIES[name].features)
    for naming in ("hf", "gguf"):
        tensors = families.tensors(spec, naming)
        paths = {(tensor.path, tensor.layer) for tensor in tensors.values()}
        assert len(paths) == len(tensors)
        for tensor in tensors.values():
            values = np.random.default_rng(0).normal(size=tensor.file_shape)
            part = tensor.arrange(values)
            assert part.shape == tensor.shape
            np.testing.assert_array_equal(tensor.flatten(part), values)
