"""Which model and tokenizer a configuration gives, and which do not go together."""

import hf_models
import pytest

from dapo_jax import config, config_checks, setup
from dapo_jax.models import presets


def settings(tokenizer=None, **model):
    values = config.default()
    values.task.train_size, values.eval.prompts, values.rl.prompts_per_step = 20, 4, 4
    values.model.update(model)
    values.tokenizer.update(tokenizer or {})
    return config_checks.from_dict(values)


def test_a_preset_is_prepared_without_making_its_weights():
    parts = setup.prepare(settings(source="preset", preset="qwen3-0.6b", param_dtype="bfloat16",
                                   compute_dtype="bfloat16", remat="full"))
    assert parts.weights is None and parts.spec == presets.spec(
        "qwen3-0.6b", param_dtype="bfloat16", compute_dtype="bfloat16", remat="full")


@pytest.mark.parametrize(("dtypes", "want"), [
    ({}, ("float32", "float32")), ({"compute_dtype": "bfloat16"}, ("float32", "bfloat16")),
    ({"param_dtype": "bfloat16"}, ("bfloat16", "float32"))])  # auto is float32 on CPU
def test_precision_is_the_configuration_s(dtypes, want):
    spec = setup.prepare(settings(**dtypes)).spec
    assert (spec.param_dtype, spec.compute_dtype) == want


@pytest.mark.parametrize(("model", "named"), [
    ({"source": "folder"}, "model.path is ''.*a folder with config.json"),
    ({"source": "preset"}, "model.preset is ''"), ({"source": "gguf"}, "model.path is ''"),
    ({"source": "hub"}, "model.source is 'hub'; allowed: scratch, preset, folder, gguf")])
def test_a_source_without_its_name_is_refused(model, named):
    with pytest.raises(config.ConfigError, match=named):
        settings(**model)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = hf_models.save(hf_models.model("llama", vocab_size=18), tmp_path / "model")
    with pytest.raises(config.ConfigError, match="20 tokens, the embedding of .*model only 18"):
        setup.prepare(settings(source="folder", path=str(path)))
    with pytest.raises(config.ConfigError, match="257 tokens, .*embedding of .*model only 18"):
        setup.prepare(settings({"kind": "bytes"}, source="folder", path=str(path)))


def test_a_tokenizer_smaller_than_the_embedding_is_not(tmp_path):
    path = hf_models.save(hf_models.model("llama"), tmp_path / "model")
    parts = setup.prepare(settings(source="folder", path=str(path)))
    assert parts.spec.vocab == parts.tokenizer.vocab_size == 64
