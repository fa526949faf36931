import math

import jax
import pytest

from dapo_jax import config
from dapo_jax.models import hf_config, presets, transformer

# As their publishers count them, tied embeddings once; of Gemma 3 from 4B on the text part alone.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "gemma3-270m": 268_098_176, "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304}


def test_every_preset_is_counted():
    assert presets.PRESETS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_parameters_of_the_model_it_is_named_after(name):
    spec = presets.spec(name)
    made = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_is_the_spec_of_the_config_json_written_for_it(name, tmp_path):
    spec = presets.spec(name, param_dtype="bfloat16", remat="full")
    values = hf_config.write(spec, dtype="bfloat16", stop_ids=(1, 2), bos_id=3)
    assert hf_config.read(values, path=tmp_path, param_dtype="bfloat16", remat="full") == spec


def test_an_unknown_preset_is_refused_with_near_names():
    with pytest.raises(config.ConfigError, match="did you mean qwen2.5-0.5b"):
        presets.spec("qwen2-0.5b")
