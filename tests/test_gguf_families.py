"""GGUF files of every family, named by the gguf package's own map, and every quantisation."""

import gguf as package
import hf_models
import numpy as np
import pytest
import tiny
from gguf_files import paired, source, write

from dapo_jax import config
from dapo_jax.models import gguf

TOKENS = np.random.default_rng(3).integers(0, 64, (2, 16)).astype(np.int32)
KINDS = package.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_JAX_CACHE", str(tmp_path / "cache"))


def model(name):
    # llama.cpp scales queries by the head size, but for two models of 27B.
    changes = {"query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    if name == "gemma3":
        changes |= {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4}
    if name == "gemma2":
        changes |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if name == "llama":
        changes |= {"rope_scaling": None}
    return hf_models.model(name, **changes)


def convert(theirs, name, path):
    """As llama.cpp's converter: its names, a rotation's pairs together, 1 added to norms."""
    cfg, arch = theirs.config, next(a for a, n in package.MODEL_ARCH_NAMES.items() if n == name)
    names = package.get_tensor_name_map(arch, cfg.num_hidden_layers)
    writer = package.GGUFWriter(path, name)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    size = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = cfg.rope_parameters.get("full_attention", cfg.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if name.startswith("gemma"):
        writer.add_sliding_window(cfg.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(cfg.attn_logit_softcapping)
        writer.add_final_logit_softcapping(cfg.final_logit_softcapping)
    for key, value in theirs.state_dict().items():
        if key == "lm_head.weight" and cfg.tie_word_embeddings:
            continue
        value = value.numpy()
        if name == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            value = paired(value, size)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            value = value + 1
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_logits_equal_transformers_before_the_conversion(name, tmp_path):
    theirs = model(name)
    file = gguf.open(convert(theirs, name, tmp_path / "model.gguf"))
    spec = gguf.spec(file)
    assert spec.family == name and spec.context == 128
    tree = tiny.gathered(spec, gguf.pieces(file, spec))
    np.testing.assert_allclose(tiny.full_logits(spec, tree, TOKENS),
                               hf_models.logits(theirs, TOKENS), atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_transformers_reads_the_same_norms_from_the_file(name, tmp_path):
    """That the 1 of `1 + w` stands in the file is llama.cpp's habit, which transformers undoes."""
    pytest.importorskip("accelerate")
    path = convert(model(name), name, tmp_path / "model.gguf")
    theirs = hf_models.library().AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name).state_dict()
    file = gguf.open(path)
    spec = gguf.spec(file)
    tree = tiny.gathered(spec, gguf.pieces(file, spec))
    for n in range(spec.layers):
        np.testing.assert_allclose(tree["blocks"]["mlp"]["post_norm"][n], atol=1e-6, desired=theirs[
            f"model.layers.{n}.post_feedforward_layernorm.weight"].numpy())
    np.testing.assert_allclose(tree["norm"], theirs["model.norm.weight"].numpy(), atol=1e-6)


def test_the_27b_models_scale_queries_by_width_over_heads(tmp_path):
    theirs = hf_models.model("gemma3", num_hidden_layers=62, head_dim=4, hidden_size=16,
                             intermediate_size=16)
    assert gguf.spec(gguf.open(convert(theirs, "gemma3", tmp_path / "m.gguf"))).query_scalar == 4.0


def test_a_window_that_a_family_has_not_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", source(), attention__sliding_window=8)
    with pytest.raises(config.ConfigError, match="llama.attention.sliding_window = 8"):
        gguf.spec(gguf.open(path))


# ---------------------------------------------------------------------------------- quantisations


def scales(q, j):
    """Six bits of scale and of minimum, packed over twelve bytes (ggml, k-quants)."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def half(block, at):
    return float(np.frombuffer(bytes(block[at:at + 2]), np.float16)[0])


def q4_k(block):
    d, low, packed, codes = half(block, 0), half(block, 2), block[4:16], block[16:144]
    for j in range(8):
        scale, minimum = scales(packed, j)
        for byte in codes[j // 2 * 32:j // 2 * 32 + 32]:
            yield d * scale * (byte >> 4 if j % 2 else byte & 15) - low * minimum


def q5_k(block):
    d, low, packed = half(block, 0), half(block, 2), block[4:16]
    high, codes = block[16:48], block[48:176]
    for j in range(8):
        scale, minimum = scales(packed, j)
        for at, byte in enumerate(codes[j // 2 * 32:j // 2 * 32 + 32]):
            code = (byte >> 4 if j % 2 else byte & 15) + 16 * (high[at] >> j & 1)
            yield d * scale * code - low * minimum


def q6_k(block):
    low, high, factors, d = block[:128], block[128:192], block[192:208], half(block, 208)
    for i in range(256):
        part, at = i // 128, i % 128
        byte = low[part * 64 + at % 64]
        code = (byte >> 4 if at >= 64 else byte & 15) | (
            high[part * 32 + at % 32] >> (at // 32 * 2) & 3) << 4
        signed = (factors[i // 16] ^ 128) - 128
        yield d * signed * (code - 32)


def quantised(path, kind, data):
    """The up-projection of a file as the loader gives it; D is 256, the block of the k-quants."""
    tensors = source()
    writer = package.GGUFWriter(path, "llama")
    for name, weight in tensors.items():
        writer.add_tensor(name, weight)
    writer.add_tensor("extra", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf.open(path)
    return file.read("extra"), file.shapes["extra"]


@pytest.mark.parametrize(("kind", "size", "rule"), [
    (KINDS.Q4_K, 144, q4_k), (KINDS.Q5_K, 176, q5_k), (KINDS.Q6_K, 210, q6_k)])
def test_k_quants_are_read_as_ggml_lays_them_out(tmp_path, kind, size, rule):
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (3, 2, size), dtype=np.uint8)
    for at in (0, 2) if kind != KINDS.Q6_K else (208,):
        blocks[:, :, at:at + 2] = rng.normal(size=(3, 2)).astype(np.float16)[..., None].view("u1")
    got, shape = quantised(tmp_path / "m.gguf", kind, blocks.reshape(3, 2 * size))
    assert got.shape == shape == (3, 512) and got.dtype == np.float32
    want = [[list(rule([int(b) for b in block])) for block in row] for row in blocks]
    np.testing.assert_allclose(got, np.array(want).reshape(3, 512), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "steps"), [
    (KINDS.Q4_0, 8), (KINDS.Q4_1, 15), (KINDS.Q8_0, 127), (KINDS.BF16, 128), (KINDS.F16, 1024),
    (KINDS.F32, None)])
def test_other_types_are_right_within_their_rounding(tmp_path, kind, steps):
    values = np.random.default_rng(6).normal(size=(4, 64)).astype(np.float32)
    data = values if kind == KINDS.F32 else package.quants.quantize(values, kind)
    got, shape = quantised(tmp_path / "m.gguf", kind, data)
    assert got.shape == shape == (4, 64)
    if steps is None:
        np.testing.assert_array_equal(got, values)
        return
    blocks = values.reshape(4, 2, 32)
    wide = blocks.max(-1) - blocks.min(-1) if kind == KINDS.Q4_1 else np.abs(blocks).max(-1)
    error = np.abs(got - values).reshape(4, 2, 32).max(-1)
    # Half a step, and of Q4_0, whose range is not symmetric, a whole one; scales are float16.
    assert (error <= wide / steps * (1.02 if kind == KINDS.Q4_0 else 0.52) + 1e-3 * wide).all()
    assert error.max() > 0
