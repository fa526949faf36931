"""Which model and tokenizer a configuration gives, and which do not go together."""

import dataclasses

import hf_models
import pytest

from dapo_jax import config, config_checks, setup
from dapo_jax.learner import packing
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


@pytest.mark.parametrize(("changes", "message"), [
    ({"packed_prompts": 4}, "config.rl.packed_prompts = 4 holds no prompt of 16 tokens"),
    ({"microbatch_tokens": 20}, "config.rl.microbatch_tokens = 20 is too few .* at least 144")])
def test_microbatches_that_hold_too_little_are_refused(changes, message):
    cfg = settings()
    with pytest.raises(config.ConfigError, match=message):
        setup.prepare(dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, **changes)))


def test_packed_microbatches_take_their_shape_from_the_phase():
    cfg = settings()
    rl = dataclasses.replace(cfg.rl, packed_prompts=32, packed_rows=3, microbatch_tokens=200)
    (phase,) = setup.prepare(dataclasses.replace(cfg, rl=rl)).phases
    assert packing.shapes(phase.pack) == [(32, 8)] and phase.pack.packed
    assert packing.slots_of(phase.pack, 32, 8) == 200 // (32 + 3 * 8)


def test_a_step_may_have_as_many_samples_as_its_budgets_allow():
    for kind, most, want in (("fixed", 0, 2 * 16), ("hard_more", 50, 50)):
        values = config.default()
        values.dynamic_sampling.budget.kind, values.dynamic_sampling.budget.most = kind, most
        values.dynamic_sampling.max_prompts = 100
        assert setup.most_samples(config_checks.from_dict(values)) == 100 * want
