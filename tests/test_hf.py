"""Folders: what is read of them, and one clear error for each way to be broken."""

import dataclasses
import json
import logging
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny

from dapo_jax import config
from dapo_jax.models import families, hf, hf_config, hf_out
from dapo_jax.models import spec as specs

SPEC = specs.ModelSpec(vocab=20, layers=2, d_model=8, heads=2, kv_heads=1, head_size=4, ff=12,
                       rope_base=500.0, tied=False)


def random_values(spec, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=tensor.file_shape).astype(np.float32)
            for name, tensor in families.tensors(spec, "hf").items()}


def write(folder, spec=SPEC, values=None, **changes):
    """A folder as others write it: one file by the safetensors library."""
    folder.mkdir(exist_ok=True)
    values = random_values(spec) if values is None else values
    safetensors.numpy.save_file(values, folder / hf.SINGLE, metadata={"format": "pt"})
    described = hf_config.write(spec, dtype="float32") | changes
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def shard(folder, values, parts=3):
    """The single file's tensors in several files with an index."""
    (folder / hf.SINGLE).unlink(missing_ok=True)
    places = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        chosen = dict(list(sorted(values.items()))[part::parts])
        safetensors.numpy.save_file(chosen, folder / name)
        places |= dict.fromkeys(chosen, name)
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def load(folder):
    source = hf.open(folder)
    spec = hf.spec(source)
    return spec, tiny.gathered(spec, hf.pieces(source, spec))


def check(tree, values, spec=SPEC):
    """Every tensor acts as torch's layers of that name do."""
    x = np.random.default_rng(1).normal(size=spec.d_model)
    attention, mlp = tree["blocks"]["attention"], tree["blocks"]["mlp"]
    for n in range(spec.layers):
        at = f"model.layers.{n}."
        for leaf, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            np.testing.assert_allclose(np.einsum("d,dhe->he", x, attention[leaf][n]).ravel(),
                                       values[f"{at}self_attn.{name}.weight"] @ x, atol=1e-5)
        y = np.random.default_rng(2).normal(size=(spec.heads, spec.head_size))
        np.testing.assert_allclose(np.einsum("he,hed->d", y, attention["out"][n]),
                                   values[f"{at}self_attn.o_proj.weight"] @ y.ravel(), atol=1e-5)
        for leaf in ("gate", "up"):
            np.testing.assert_allclose(x @ mlp[leaf][n], values[f"{at}mlp.{leaf}_proj.weight"] @ x,
                                       atol=1e-5)
        np.testing.assert_array_equal(mlp["down"][n].T, values[f"{at}mlp.down_proj.weight"])
        for part, name in ((attention, "input"), (mlp, "post_attention")):
            np.testing.assert_array_equal(part["norm"][n], values[f"{at}{name}_layernorm.weight"])
    np.testing.assert_array_equal(tree["embedding"], values["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tree["norm"], values["model.norm.weight"])


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


# --------------------------------------------------------------------------------------- reading


def test_every_tensor_arrives_where_it_belongs(folder):
    spec, tree = load(folder)
    assert spec == SPEC
    check(tree, random_values(SPEC))
    np.testing.assert_array_equal(tree["head"].T, random_values(SPEC)["lm_head.weight"])


def test_several_files_with_an_index_are_read_as_one(folder):
    _, whole = load(folder)
    shard(folder, random_values(SPEC))
    _, parts = load(folder)
    for a, b in zip(*map(lambda t: sorted(leaves(t)), (whole, parts))):
        assert a[0] == b[0]
        np.testing.assert_array_equal(a[1], b[1])


def leaves(tree, path=""):
    for key, value in tree.items():
        yield from leaves(value, f"{path}/{key}") if isinstance(value, dict) else [
            (f"{path}/{key}", value)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_to_the_bit(tmp_path, dtype):
    values = {name: value.astype(dtype) for name, value in random_values(SPEC).items()}
    _, tree = load(write(tmp_path / "half", values=values))
    assert tree["embedding"].dtype == np.float32
    check(tree, {name: value.astype(np.float32) for name, value in values.items()})


# ------------------------------------------------------------------------------------ heads (B81)


TIED = dataclasses.replace(SPEC, tied=True)


def test_a_tied_model_without_a_head_uses_its_embedding(tmp_path):  # B81 a
    spec, tree = load(write(tmp_path / "model", TIED))
    assert spec.tied and "head" not in tree
    check_logits(spec, tree, random_values(TIED)["model.embed_tokens.weight"])


def check_logits(spec, tree, kernel):
    tokens = np.arange(6, dtype=np.int32)[None]
    hidden = np.asarray(tiny.full_hidden(spec, tree, tokens))
    np.testing.assert_allclose(tiny.full_logits(spec, tree, tokens), hidden @ kernel.T, atol=1e-5)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_model_s_redundant_head_is_left_out(tmp_path, caplog, equal):  # B81 b
    values = random_values(TIED)
    embedding = values["model.embed_tokens.weight"]
    values["lm_head.weight"] = embedding.copy() if equal else embedding + 1
    with caplog.at_level(logging.WARNING):
        spec, tree = load(write(tmp_path / "model", TIED, values))
    assert "head" not in tree
    check_logits(spec, tree, embedding)
    assert ("lm_head.weight differs" in caplog.text) != equal


def test_an_untied_head_is_used(folder):  # B81 c
    spec, tree = load(folder)
    check_logits(spec, tree, random_values(SPEC)["lm_head.weight"])


def test_an_untied_model_without_a_head_is_refused(tmp_path):  # B81 d
    values = random_values(SPEC)
    del values["lm_head.weight"]
    with pytest.raises(config.ConfigError, match="lacks: .'lm_head.weight'."):
        load(write(tmp_path / "model", values=values))


@pytest.mark.parametrize("spec", [TIED, SPEC])
def test_what_is_written_is_read_again_identically(tmp_path, spec):  # B81 a, c
    source = hf.open(write(tmp_path / "model", spec))
    first = tiny.gathered(spec, hf.pieces(source, spec))
    out = tmp_path / "again"
    out.mkdir()
    shutil.copy(tmp_path / "model" / "config.json", out)
    hf_out.weights(out, spec, lambda tensor: part_of(first, tensor), dtype="float32", largest=900)
    assert len(list(out.glob("*.safetensors"))) > 3
    assert safetensors.safe_open(next(out.glob("*.safetensors")), "numpy").metadata() == {
        "format": "pt"}
    again, second = load(out)
    assert again == spec
    for (_, a), (_, b) in zip(leaves(first), leaves(second)):
        np.testing.assert_array_equal(a, b)


def part_of(tree, tensor):
    for key in tensor.path:
        tree = tree[key]
    return tree if tensor.layer is None else tree[tensor.layer]


# ------------------------------------------------------------------------------ older Llama folders


def test_frequencies_in_a_file_are_compared_with_the_base(tmp_path):
    values = random_values(SPEC)
    right = 500.0 ** (-np.arange(0, 4, 2) / 4)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    load(write(tmp_path / "model", values=values | {name: right.astype(np.float32)}))
    with pytest.raises(config.ConfigError, match=name):
        load(write(tmp_path / "model", values=values | {name: right.astype(np.float32) * 1.1}))


# ---------------------------------------------------------------------------------- broken folders


def broken(folder, match):
    with pytest.raises(config.ConfigError, match=match) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_an_absent_folder_is_named(tmp_path):
    broken(tmp_path / "none", "no such folder")


def test_a_folder_without_config_json_is_refused(folder):
    (folder / "config.json").unlink()
    broken(folder, "config.json: there is no such file")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_config_json_that_is_none_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    broken(folder, "config.json: ")


@pytest.mark.parametrize("others", [[], ["pytorch_model.bin"]])
def test_a_folder_without_weights_is_refused(folder, others):
    (folder / hf.SINGLE).unlink()
    for name in others:
        (folder / name).touch()
    broken(folder, "no weights.*" + "".join(others))


def test_every_truncated_file_is_refused_by_name(folder):
    whole = (folder / hf.SINGLE).read_bytes()
    for size in (0, 7, 100, 500, len(whole) // 2, len(whole) - 1):
        (folder / hf.SINGLE).write_bytes(whole[:size])
        broken(folder, "model.safetensors: not a whole safetensors file")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight",
                                  "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    values = random_values(SPEC)
    del values[name]
    broken(write(tmp_path / "model", values=values), f"lacks: .'{name}'.; .*no place for: ..$")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight",
                                  "model.layers.0.self_attn.q_proj.bias", "score.weight"])
def test_a_surplus_tensor_is_named(tmp_path, name):
    values = random_values(SPEC) | {name: np.zeros(8, np.float32)}
    broken(write(tmp_path / "model", values=values), f"lacks: ..; .*no place for: .'{name}'.")


def test_a_tensor_of_another_shape_is_named(tmp_path):
    values = random_values(SPEC)
    values["model.layers.0.mlp.gate_proj.weight"] = np.zeros((8, 12), np.float32)
    broken(write(tmp_path / "model", values=values), r"gate_proj.weight has shape \(8, 12\)")


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_a_tensor_of_another_type_is_named(tmp_path, dtype):
    values = random_values(SPEC)
    values["model.norm.weight"] = values["model.norm.weight"].astype(dtype)
    broken(write(tmp_path / "model", values=values), "tensor model.norm.weight is ")


def test_an_index_that_does_not_fit_its_files_is_refused(folder):
    values = random_values(SPEC)
    places = shard(folder, values)
    for changed, match in (
            (places | {"model.extra.weight": "model-00001-of-00003.safetensors"}, "model.extra"),
            ({n: p for n, p in places.items() if n != "lm_head.weight"}, "not listed.*lm_head"),
            (places | {"lm_head.weight": "model-00009-of-00003.safetensors"}, "00009-of-00003"),
            (places | {"lm_head.weight": "../elsewhere.safetensors"}, "not names of files"),
            ({}, "weight_map is missing or empty")):
        (folder / hf.INDEX).write_text(json.dumps({"weight_map": changed}))
        broken(folder, match)


def test_an_absent_part_is_named(folder):
    shard(folder, random_values(SPEC))
    (folder / "model-00002-of-00003.safetensors").unlink()
    broken(folder, "model-00002-of-00003.safetensors")


def test_a_tensor_that_stands_in_two_files_is_named(folder):
    shard(folder, random_values(SPEC))
    part = folder / "model-00002-of-00003.safetensors"
    shutil.copy(folder / "model-00001-of-00003.safetensors", part)
    broken(folder, "stand in another file too")
