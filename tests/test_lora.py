import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch_model
from safetensors import numpy as safetensors

from dapo_jax import config
from dapo_jax.models import families, hf_out, lora, transformer

SPEC = tiny.SPEC
CFG = config.Lora(rank=3, alpha=6.0, patterns=("attention.*", "mlp.up", "mlp.down"))
TOKENS = np.random.default_rng(3).integers(0, 64, (2, 5)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return tiny.params()


@pytest.fixture(scope="module")
def adapter():
    """One whose B is not 0, so that each part has a gradient."""
    rng = np.random.default_rng(0)
    made = lora.init(SPEC, CFG, jax.random.key(0))
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype("f4"), made)


def test_a_new_adapter_changes_nothing_and_has_the_patterns_matrices(params):
    made = lora.init(SPEC, CFG, jax.random.key(0))
    assert {part: set(matrices) for part, matrices in made["blocks"].items()} == {
        "attention": {"query", "key", "value", "out"}, "mlp": {"up", "down"}}
    assert made["blocks"]["attention"]["out"]["a"].shape == (2, 4, 8, 3)
    assert made["blocks"]["attention"]["out"]["b"].shape == (2, 3, 32)
    bound = np.abs(made["blocks"]["mlp"]["down"]["a"]).max()
    assert 0.8 * 48 ** -0.5 < bound <= 48 ** -0.5  # PEFT's kaiming_uniform(sqrt(5))
    merged = lora.merge(params, made, CFG)
    jax.tree.map(np.testing.assert_array_equal, merged, params)


def test_a_pattern_of_no_matrix_is_refused():
    for pattern in ("attention.quer", "mlp.norm", "embedding"):
        with pytest.raises(config.ConfigError, match=f"'{pattern}' names no matrix .*mlp.gate"):
            lora.targets(SPEC, ("mlp.*", pattern))


def test_every_axis_of_an_adapter_has_a_logical_name(adapter):
    axes = lora.logical_axes(SPEC, CFG)
    jax.tree.map(lambda leaf, names: None if leaf.ndim == len(names) else pytest.fail(str(names)),
                 adapter, axes)
    assert axes["blocks"]["attention"]["query"] == {
        "a": ("layers", "embed", "rank"), "b": ("layers", "rank", "heads", "head")}


def peft_merged(tree, adapter):
    """PEFT's formula, W + alpha / r * B A with W [out, in], a matrix and a layer at a time."""
    tree = jax.tree.map(np.array, tree)
    for part, matrices in adapter["blocks"].items():
        for name, pair in matrices.items():
            for layer in range(2):
                a = pair["a"][layer].reshape(-1, 3).T
                b = pair["b"][layer].reshape(3, -1).T
                tree["blocks"][part][name][layer] += (6.0 / 3 * (b @ a)).T.reshape(
                    tree["blocks"][part][name][layer].shape)
    return tree


def test_attached_equals_merged_and_torch_in_values_and_gradients(params, adapter):
    torch = torch_model.torch()
    merged = lora.merge(params, adapter, CFG)
    want = peft_merged(params, adapter)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, want)

    def loss(adapter):
        logits = tiny.full_logits(SPEC, lora.attach(params, adapter, CFG), TOKENS)
        return jax.nn.logsumexp(logits, -1).sum(), logits
    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(adapter)
    model = torch_model.llama(SPEC, want)
    theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits
    np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4)
    torch.logsumexp(theirs, -1).sum().backward()
    layer = model.model.layers[1]
    for part, name, weight in (("attention", "query", layer.self_attn.q_proj.weight),
                               ("attention", "out", layer.self_attn.o_proj.weight),
                               ("mlp", "down", layer.mlp.down_proj.weight)):
        pair, got = adapter["blocks"][part][name], grads["blocks"][part][name]
        full = 2.0 * weight.grad.numpy()  # of alpha / r * B A
        a, b = pair["a"][1].reshape(-1, 3).T, pair["b"][1].reshape(3, -1).T
        np.testing.assert_allclose(got["a"][1].reshape(-1, 3).T, b.T @ full, atol=2e-5, rtol=1e-4)
        np.testing.assert_allclose(got["b"][1].reshape(3, -1).T, full @ a.T, atol=2e-5, rtol=1e-4)


def test_the_sampler_refuses_an_adapter_that_is_not_merged(params, adapter):
    with pytest.raises(ValueError, match="merge"):
        transformer.unstack(SPEC, lora.attach(params, adapter, CFG))


def test_the_folder_holds_what_peft_s_names_and_formula_say(tmp_path, params, adapter):
    hf_out.adapter(tmp_path, SPEC, adapter, CFG, base="some/model")
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["peft_type"]) == (3, 6.0, "LORA")
    assert told["target_modules"] == sorted([
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    arrays = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    want = peft_merged(params, adapter)
    tensors = {n: t for n, t in families.tensors(SPEC, "hf").items() if t.layer is not None}
    seen = 0
    for name, tensor in tensors.items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" not in arrays:
            continue
        part, leaf = tensor.path[1:]
        weight = tensor.flatten(np.asarray(params["blocks"][part][leaf][tensor.layer]))
        a, b = arrays[f"{at}.lora_A.weight"], arrays[f"{at}.lora_B.weight"]
        np.testing.assert_allclose(
            weight + 2.0 * b @ a, tensor.flatten(want["blocks"][part][leaf][tensor.layer]),
            atol=1e-6)
        seen += 1
    assert 2 * seen == len(arrays) == 24


@pytest.mark.slow
def test_attached_takes_less_memory_than_merged_since_no_matrix_gets_a_gradient():
    spec = dataclasses.replace(SPEC, layers=8, d_model=256, ff=1024, remat="full")
    shapes = jax.eval_shape(lambda: (transformer.init(spec, jax.random.key(0)),
                                     lora.init(spec, CFG, jax.random.key(0))))

    def temporary(adapted):
        total = lambda adapter, tree: tiny.full_logits(  # noqa: E731
            spec, adapted(tree, adapter, CFG), TOKENS).sum()
        gradient = jax.jit(jax.grad(total))
        return gradient.lower(*shapes[::-1]).compile().memory_analysis().temp_size_in_bytes
    matrices = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes[0]["blocks"]))
    assert temporary(lora.merge) > matrices > 3 * temporary(lora.attach)


@pytest.mark.slow
def test_peft_loads_the_folder_and_computes_the_same(tmp_path, params, adapter):
    torch = torch_model.torch()
    peft = pytest.importorskip("peft", reason="peft is not installed")
    hf_out.adapter(tmp_path, SPEC, adapter, CFG, base="")
    model = peft.PeftModel.from_pretrained(torch_model.llama(SPEC, params), tmp_path)
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    ours = tiny.full_logits(SPEC, lora.merge(params, adapter, CFG), TOKENS)
    np.testing.assert_allclose(jnp.asarray(ours), theirs, atol=1e-4)
