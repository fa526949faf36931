import json
import pathlib

import hf_models
import pytest

from dapo_jax import config
from dapo_jax.models import families, hf, hf_config, presets
from dapo_jax.models import spec as specs

PATH = pathlib.Path("folder/config.json")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}


def values(name="llama", **changes):
    family = families.FAMILIES[name]
    return {"model_type": family.model_type, "architectures": [family.architecture], **SMALL,
            **({"sliding_window": 5} if family.period else {}), **changes}


def read(name="llama", **changes):
    return hf_config.read(values(name, **changes), path=PATH)


# ------------------------------------------------------------------------------- what is understood


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_both_ways_to_write_positions_give_one_spec(name, tmp_path):
    """transformers writes `rope_parameters`, older folders `rope_theta` and `rope_scaling`."""
    hf_models.configuration(name).save_pretrained(tmp_path)
    new = hf.json_file(tmp_path / "config.json") | {
        "architectures": [families.FAMILIES[name].architecture]}
    spec = hf_config.read(new, path=PATH)
    old = hf_config.write(spec, dtype="float32")
    assert "rope_parameters" in new and "rope_parameters" not in old
    assert hf_config.read(json.loads(json.dumps(old)), path=PATH) == spec


@pytest.mark.parametrize("name", presets.PRESETS)
def test_transformers_understands_what_is_written(name, tmp_path):
    spec = presets.spec(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config.write(spec, dtype="bfloat16", stop_ids=(7, 8), bos_id=3)))
    theirs = hf_models.library().AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [families.FAMILIES[spec.family].architecture]
    assert (theirs.eos_token_id, theirs.bos_token_id) == ([7, 8], 3)
    theirs.save_pretrained(tmp_path)
    assert hf_config.read(hf.json_file(path), path=path) == spec


@pytest.mark.parametrize(("name", "tied", "size"), [
    ("llama", False, 8), ("qwen2", False, 8), ("qwen3", False, 128), ("gemma2", True, 256),
    ("gemma3", True, 256)])
def test_what_a_file_leaves_out_is_as_in_transformers(name, tied, size):
    spec = read(name)
    assert (spec.tied, spec.head_size, spec.norm_eps) == (tied, size, 1e-6)
    assert spec.attention_softcap == (50.0 if name == "gemma2" else None)
    assert spec.logit_softcap == (30.0 if name == "gemma2" else None)
    assert (spec.rope_base, spec.local_rope_base) == (
        (1e6, 1e4) if name == "gemma3" else (1e4, None))
    assert spec.sliding == {"gemma2": (True, False, True, False),
                            "gemma3": (True,) * 4}.get(name, ())


def test_caps_that_are_off_are_off():
    spec = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert spec.attention_softcap is None and spec.logit_softcap is None


def test_windows_of_qwen_begin_at_the_configured_layer():
    window = {"sliding_window": 5, "max_window_layers": 3}
    assert read("qwen2", use_sliding_window=True, **window).sliding == (False,) * 3 + (True,)
    spec = read("qwen2", use_sliding_window=False, **window)
    assert (spec.sliding, spec.sliding_window) == ((), 0)


def test_what_runs_do_not_depend_on_is_ignored():
    assert read(torch_dtype="bfloat16", use_cache=True, _name_or_path="x", attention_bias=False,
                quantization_config=None, pretraining_tp=1) == read()


def test_choices_of_the_run_are_taken_over():
    spec = hf_config.read(values(), path=PATH, param_dtype="bfloat16", remat="full")
    assert spec.param_dtype == "bfloat16" and spec.remat


# ------------------------------------------------------------------------------------- refusals


def refused(match, **changed):
    with pytest.raises(config.ConfigError, match=match) as caught:
        hf_config.read(changed, path=PATH)
    assert str(PATH) in str(caught.value)


@pytest.mark.parametrize(("changes", "match"), [
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"model_type": "mixtral"}, "mixture-of-experts"),
    ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "mixture-of-experts"),
    ({"num_experts": 8}, "mixture-of-experts"), ({"num_local_experts": 8}, "mixture-of-experts"),
    ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
      "text_config": {}, "vision_config": {}}, "multimodal"),
    ({"model_type": None}, "model_type None")])
def test_other_models_are_refused_by_name(changes, match):
    refused(match, **values(**changes))


@pytest.mark.parametrize(("changes", "match"), [
    ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"), ({"new_trick": 0.5}, "new_trick"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"head_dim": 7}, "odd size 7"), ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ({"vocab_size": "64"}, "vocab_size is '64'"), ({"hidden_size": 0}, "hidden_size is 0")])
def test_fields_that_are_not_known_or_not_possible_are_named(changes, match):
    refused(match, **values(**changes))


@pytest.mark.parametrize("scaling", [
    {"rope_type": "yarn", "factor": 4.0}, {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0]}, {"type": "mrope", "mrope_section": [1, 2]},
    {"rope_type": "default", "mrope_section": [1, 2]}, {"rope_type": "linear"},
    {"rope_type": "llama3", "factor": 8.0}])
def test_unknown_positions_are_refused(scaling):
    refused("positions", **values(rope_scaling=scaling))
    refused("positions", **values(rope_parameters={"rope_theta": 1e4} | scaling))


def test_scaled_positions_of_sliding_layers_are_refused():
    parameters = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                  "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    refused("sliding layers", **values("gemma3", rope_parameters=parameters))


@pytest.mark.parametrize("types", [["full_attention"] * 3, ["chunked_attention"] * 4])
def test_layer_types_that_do_not_fit_are_refused(types):
    refused("layer_types", **values("gemma2", layer_types=types))


def test_sliding_layers_without_a_window_are_refused():
    refused("sliding_window is None", **values("gemma2", sliding_window=None))


def test_the_plain_spec_is_a_llama():
    spec = specs.ModelSpec(vocab=4, layers=1, d_model=8, heads=2, kv_heads=1, head_size=4, ff=8)
    written = hf_config.write(spec, dtype="float32")
    assert written["model_type"] == "llama" and hf_config.read(written, path=PATH) == spec
