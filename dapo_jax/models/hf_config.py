"""config.json of a Hugging Face folder: to a ModelSpec, and back.

A key that is not known could change what the model computes, so it is refused unless its value
says that it is off.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.models import families
from dapo_jax.models.families import Family
from dapo_jax.models.spec import ModelSpec, RopeScaling

Json = Mapping[str, Any]

# Field of the spec -> key, where the value is the same.
_SAME = {
    "vocab": "vocab_size", "layers": "num_hidden_layers", "d_model": "hidden_size",
    "heads": "num_attention_heads", "ff": "intermediate_size"}
_ROPE = {"factor": "factor", "low_frequency": "low_freq_factor",
         "high_frequency": "high_freq_factor",
         "original_context": "original_max_position_embeddings"}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_KEYS = ("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping",
               "final_logit_softcapping")
_READ = {
    *_SAME.values(), "architectures", "model_type", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "hidden_act", "layer_types", "sliding_window"}
_OF_QWEN = {"use_sliding_window", "max_window_layers"}
_OF_GEMMA = {*_GEMMA_KEYS, "rope_local_base_freq", "sliding_window_pattern",
             "_sliding_window_pattern"}
# What the forward pass does not depend on.
_HARMLESS = {
    "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "initializer_range", "attention_dropout", "pretraining_tp",
    "cache_implementation", "name_or_path", "model_name", "tokenizer_class", "return_dict",
    "id2label", "label2id", "chunk_size_feed_forward", "max_length", "min_length", "do_sample",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty",
    "max_window_layers", "transformers.js_config", "unsloth_fixed", "unsloth_version"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_SENSES = ("vision_config", "audio_config", "text_config", "image_token_id", "mm_tokens_per_image")


def read(values: Json, *, path: pathlib.Path, **chosen: Any) -> ModelSpec:
    """The spec that config.json (`values`, from `path`) describes; `chosen` are fields of the
    spec that it does not decide. ConfigError names what is unknown or missing."""
    family = _family(values, path)
    _refuse_unknown(values, path)
    sizes: dict[str, Any] = {field: _whole(values, key, path) for field, key in _SAME.items()}
    spec = ModelSpec(
        **sizes,
        kv_heads=values.get("num_key_value_heads") or _whole(values, "num_attention_heads", path),
        head_size=_head_size(values, family, path),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tied=bool(values.get("tie_word_embeddings", family.tied)),
        context=values.get("max_position_embeddings") or 2048,
        family=_name(family), **family.features, **_gemma(values, family), **chosen)
    spec = dataclasses.replace(spec, **_rope(values, family, path))
    _check_activation(values, spec, path)
    return _with_windows(values, spec, family, path)


def _name(family: Family) -> str:
    return next(name for name, known in families.FAMILIES.items() if known is family)


def _family(values: Json, path: pathlib.Path) -> Family:
    kind = values.get("model_type")
    architectures = values.get("architectures") or []
    shown = f"{path}: model_type {kind!r}, architectures {architectures}"
    if any(values.get(key) for key in _EXPERTS) or "moe" in str(kind) or kind == "mixtral":
        raise config.ConfigError(f"{shown}: mixture-of-experts models are not supported")
    if any(key in values for key in _SENSES):
        raise config.ConfigError(f"{shown}: multimodal models are not supported, only text; "
                                 "export its language model to a folder of its own")
    for family in families.FAMILIES.values():
        if family.model_type == kind and architectures in ([], [family.architecture]):
            return family
    known = ", ".join(f"{f.model_type} ({f.architecture})" for f in families.FAMILIES.values())
    raise config.ConfigError(f"{shown}: not supported; supported are {known}")


def _refuse_unknown(values: Json, path: pathlib.Path) -> None:
    known = _READ | _HARMLESS | _OF_QWEN | _OF_GEMMA
    unknown = {key: value for key, value in values.items()
               if key not in known and value and not key.startswith("_")}
    if unknown:
        raise config.ConfigError(
            f"{path}: {unknown} may change what the model computes and is not known here; take "
            "it out if it does not")


def _whole(values: Json, key: str, path: pathlib.Path) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config.ConfigError(f"{path}: {key} is {value!r}; it must be a whole number from 1")
    return value


def _head_size(values: Json, family: Family, path: pathlib.Path) -> int:
    width, heads = _whole(values, "hidden_size", path), _whole(values, "num_attention_heads", path)
    size = values.get("head_dim") or family.head_size or width // heads
    if size % 2:
        raise config.ConfigError(f"{path}: heads of odd size {size} cannot be rotated")
    return size


def _gemma(values: Json, family: Family) -> dict[str, Any]:
    """What only Gemma's configurations hold, with the defaults of its classes."""
    if not family.period:
        return {}
    caps = (50.0, 30.0) if family.model_type == "gemma2" else (None, None)
    return {"query_scalar": float(values.get("query_pre_attn_scalar", 256)),
            "attention_softcap": values.get("attn_logit_softcapping", caps[0]),
            "logit_softcap": values.get("final_logit_softcapping", caps[1])}


def _check_activation(values: Json, spec: ModelSpec, path: pathlib.Path) -> None:
    key = "hidden_act" if spec.activation == "silu" else "hidden_activation"
    given = values.get(key)
    if given is not None and _ACTIVATIONS.get(given) != spec.activation:
        raise config.ConfigError(f"{path}: {key} = {given!r} is not supported for {spec.family}, "
                                 f"only {spec.activation}")


# --------------------------------------------------------------------------------------- positions


def _rope(values: Json, family: Family, path: pathlib.Path) -> dict[str, Any]:
    """Base, scaling and local base, from either way to write them."""
    local = family.model_type == "gemma3_text"
    given = dict(values.get("rope_parameters") or {})
    full = given.get("full_attention") or {} if local and "full_attention" in given else given
    full = {"rope_theta": values.get("rope_theta", 1e6 if local else 1e4),
            **(values.get("rope_scaling") or {}), **full}
    near = {"rope_theta": values.get("rope_local_base_freq", 1e4),
            **(given.get("sliding_attention") or {})}
    if local and near.get("rope_type", "default") != "default":
        raise config.ConfigError(f"{path}: rope_parameters of sliding layers are {near}; only an "
                                 "unscaled base is supported")
    return {"rope_base": float(full["rope_theta"]), "rope_scaling": _scaling(full, path),
            "local_rope_base": float(near["rope_theta"]) if local else None}


def _scaling(given: Json, path: pathlib.Path) -> RopeScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    numbers = {field: given[key] for field, key in _ROPE.items() if key in given}
    needed = {"default": set(), "linear": {"factor"}, "llama3": set(_ROPE)}.get(kind)
    extra = {key: value for key, value in given.items()
             if key not in ("rope_theta", "rope_type", "type", *_ROPE.values())}
    if needed is None or extra or not needed <= numbers.keys():
        raise config.ConfigError(
            f"{path}: positions {dict(given)} are not supported; rope_type may be 'default', "
            "'linear' with a factor, or 'llama3' with its four numbers")
    return RopeScaling(kind, **{field: numbers[field] for field in needed}) if needed else None


def _with_windows(
    values: Json, spec: ModelSpec, family: Family, path: pathlib.Path
) -> ModelSpec:
    window, kinds = values.get("sliding_window"), _layer_types(values, spec, family)
    if len(kinds) != spec.layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise config.ConfigError(f"{path}: layer_types {kinds} are not supported; {spec.layers} "
                                 "of sliding_attention and full_attention are wanted")
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(sliding) or (not family.period and not values.get("use_sliding_window")):
        return spec
    if not window:
        raise config.ConfigError(f"{path}: layers slide, and sliding_window is {window!r}")
    return dataclasses.replace(spec, sliding_window=window, sliding=sliding)


def _layer_types(values: Json, spec: ModelSpec, family: Family) -> list[str]:
    if values.get("layer_types"):
        return values["layer_types"]
    if family.period:
        period = (values.get("sliding_window_pattern")
                  or values.get("_sliding_window_pattern") or family.period)
        return layer_types(families.sliding_layers(spec.layers, period))
    first = values.get("max_window_layers", 28)
    return layer_types(tuple(layer >= first for layer in range(spec.layers)))


def layer_types(sliding: tuple[bool, ...]) -> list[str]:
    """The words of config.json."""
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


# ----------------------------------------------------------------------------------------- writing


def write(spec: ModelSpec, *, dtype: str, stop_ids: tuple[int, ...] = (),
          bos_id: int | None = None) -> dict[str, Any]:
    """config.json for a spec: `read` of it gives the spec again."""
    family = families.FAMILIES[spec.family]
    act = next(word for word, name in _ACTIVATIONS.items() if name == spec.activation)
    values: dict[str, Any] = {
        "architectures": [family.architecture], "model_type": family.model_type,
        **{key: getattr(spec, field) for field, key in _SAME.items()},
        "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_size,
        "rms_norm_eps": spec.norm_eps, "tie_word_embeddings": spec.tied,
        "max_position_embeddings": spec.context, "rope_theta": spec.rope_base,
        "rope_scaling": _scaling_json(spec.rope_scaling), "hidden_act": act, "torch_dtype": dtype,
        "bos_token_id": bos_id, "eos_token_id": list(stop_ids) or None, "pad_token_id": None}
    if family.period:
        values |= {
            "hidden_activation": values.pop("hidden_act"),
            "query_pre_attn_scalar": int(spec.query_scalar or spec.head_size),
            "attn_logit_softcapping": spec.attention_softcap,
            "final_logit_softcapping": spec.logit_softcap,
            "rope_local_base_freq": spec.local_rope_base}
    if any(spec.sliding):
        values |= {"sliding_window": spec.sliding_window,
                   "layer_types": layer_types(spec.sliding)}
        values |= {} if family.period else {"use_sliding_window": True, "max_window_layers": 0}
    return {key: value for key, value in values.items() if value is not None or key in _GEMMA_KEYS}


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = _ROPE if scaling.kind == "llama3" else {"factor": "factor"}
    return {"rope_type": scaling.kind,
            **{key: getattr(scaling, field) for field, key in fields.items()}}
