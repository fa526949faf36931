"""From a ConfigDict to checked records: unknown fields, wrong types, and contradictions that need
no look at data or devices."""

import dataclasses
from typing import Any, get_args, get_type_hints

import ml_collections
from ml_collections import config_dict

from dapo_jax import config


def from_dict(values: ml_collections.ConfigDict) -> config.Config:
    """The frozen records, checked; ConfigError names the field at fault and what to do."""
    return check(_to_record(config.Config, values, ""))


def _to_record(record: type, values: ml_collections.ConfigDict, prefix: str) -> Any:
    types = get_type_hints(record)
    fields = {field.name: field for field in dataclasses.fields(record)}
    for name in values:
        if name not in fields:
            raise config.ConfigError(
                f"unknown field config.{prefix}{name}{config.near(name, fields)}")
    result = {}
    for name, field in fields.items():
        value = values[name] if name in values else getattr(record(), name)
        where = f"config.{prefix}{name}"
        if dataclasses.is_dataclass(types[name]):
            if not isinstance(value, ml_collections.ConfigDict):
                raise config.ConfigError(f"{where} is a section, not the value {value!r}")
            result[name] = _to_record(types[name], value, f"{prefix}{name}.")
        else:
            result[name] = _value(value, types[name], field.metadata["choices"], where)
    return record(**result)


def _value(value: Any, annotation: Any, choices: tuple[str, ...], where: str) -> Any:
    kind = config.plain_type(annotation)
    if value is None and type(None) in get_args(annotation):
        return None
    if isinstance(value, config_dict.FieldReference):
        value = value.get()
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise config.ConfigError(f"{where} must be {kind.__name__}, not {value!r}")
    if choices and value not in choices:
        raise config.ConfigError(f"{where} is {value!r}; allowed: {', '.join(choices)}")
    return value


def check(cfg: config.Config) -> config.Config:
    """Refuse contradictions that need no look at data or devices; returns its argument."""
    _check_model(cfg.model)
    _check_sampling(cfg)
    for name, phase in (("sft", cfg.sft), ("rl", cfg.rl)):
        _check_phase(phase, name, cfg)
    if not any((cfg.sft.steps, cfg.sft.epochs, cfg.rl.steps, cfg.rl.epochs)):
        raise config.ConfigError("nothing to do: steps and epochs of config.sft and config.rl are "
                                 "all 0")
    _require(cfg.seed >= 0, "seed", cfg.seed, "0 or more")
    _require(cfg.overlong.cache <= cfg.rollout.max_new_tokens, "overlong.cache",
             cfg.overlong.cache, f"at most rollout.max_new_tokens = {cfg.rollout.max_new_tokens}")
    for name in ("data", "fsdp", "tensor"):
        size = getattr(cfg.mesh, name)
        _require(size >= 1 or (name == "data" and size == -1), f"mesh.{name}", size, "at least 1")
    return cfg


def _require(fact: bool, name: str, value: Any, rule: str) -> None:
    if not fact:
        raise config.ConfigError(f"config.{name} is {value!r}; it must be {rule}")


def _check_model(model: config.Model) -> None:
    for name in ("layers", "d_model", "heads", "kv_heads", "head_size", "ff", "head_chunk"):
        _require(getattr(model, name) >= 1, f"model.{name}", getattr(model, name), "at least 1")
    _require(model.heads % model.kv_heads == 0, "model.kv_heads", model.kv_heads,
             f"a divisor of model.heads = {model.heads}")
    _require(model.head_size % 2 == 0, "model.head_size", model.head_size, "even")
    _require(model.source != "gguf" or bool(model.path or model.package), "model.path", model.path,
             "a .gguf file (or set config.model.package), as model.source is gguf")
    _require(model.source != "folder" or bool(model.path), "model.path", model.path,
             "a folder with config.json and safetensors, as model.source is folder")
    _require(model.source != "preset" or bool(model.preset), "model.preset", model.preset,
             "a name of models/presets.py, as model.source is preset")


def _check_sampling(cfg: config.Config) -> None:
    rollout, dynamic = cfg.rollout, cfg.dynamic_sampling
    _require(rollout.temperature > 0, "rollout.temperature", rollout.temperature, "above 0")
    for name, group in (("rollout", rollout), ("eval", cfg.eval)):
        _require(0 < group.top_p <= 1, f"{name}.top_p", group.top_p, "in (0, 1]")
        _require(group.top_k >= 0, f"{name}.top_k", group.top_k, "0 (all) or more")
    _require(cfg.eval.temperature > 0, "eval.temperature", cfg.eval.temperature,
             "above 0 (config.eval.greedy reports temperature 0)")
    for name in ("prompts", "samples"):
        _require(getattr(cfg.eval, name) >= 1, f"eval.{name}", getattr(cfg.eval, name),
                 "at least 1")
    _require(rollout.max_new_tokens >= 1, "rollout.max_new_tokens", rollout.max_new_tokens,
             "at least 1")
    _check_ladder(rollout.slots, "rollout.slots")
    _check_ladder(cfg.prompts.buckets, "prompts.buckets")
    for name in ("max_rounds", "max_empty_steps"):
        _require(getattr(dynamic, name) >= 1, f"dynamic_sampling.{name}", getattr(dynamic, name),
                 "at least 1: every loop is bounded")
    _require(dynamic.max_prompts >= 0, "dynamic_sampling.max_prompts", dynamic.max_prompts,
             "0 (twenty times prompts_per_step) or more")
    _require(dynamic.carry_steps >= 0, "dynamic_sampling.carry_steps", dynamic.carry_steps,
             "0 or more")
    _require(dynamic.refill_factor > 0, "dynamic_sampling.refill_factor", dynamic.refill_factor,
             "above 0")
    predictor = dynamic.predictor
    _require(predictor.window >= 1, "dynamic_sampling.predictor.window", predictor.window,
             "at least 1")
    _require(0 < predictor.gamma <= 1, "dynamic_sampling.predictor.gamma", predictor.gamma,
             "in (0, 1]")
    _require(1 <= predictor.multiplier <= predictor.max_multiplier,
             "dynamic_sampling.predictor.multiplier", predictor.multiplier,
             f"from 1 to max_multiplier = {predictor.max_multiplier}")
    _require(cfg.scoring.workers >= 1, "scoring.workers", cfg.scoring.workers, "at least 1")
    _require(cfg.scoring.timeout > 0, "scoring.timeout", cfg.scoring.timeout, "above 0 seconds")


def _check_ladder(sizes: tuple, name: str) -> None:
    good = sizes and all(isinstance(s, int) and s >= 1 for s in sizes) and list(sizes) == sorted(
        set(sizes))
    _require(bool(good), name, sizes, "an ascending tuple of whole numbers from 1")


def _check_phase(phase: config.Phase, name: str, cfg: config.Config) -> None:
    for field in ("steps", "epochs"):
        _require(getattr(phase, field) >= 0, f"{name}.{field}", getattr(phase, field), "0 or more")
    for field in ("prompts_per_step", "samples_per_prompt", "updates_per_step", "microbatch_slots"):
        _require(getattr(phase, field) >= 1, f"{name}.{field}", getattr(phase, field), "at least 1")
    if phase.prompts_per_step % phase.updates_per_step:
        raise config.ConfigError(
            f"config.{name}.prompts_per_step = {phase.prompts_per_step} groups cannot be split "
            f"into config.{name}.updates_per_step = {phase.updates_per_step} updates of whole "
            "groups: "
            f"{phase.prompts_per_step} / {phase.updates_per_step} = "
            f"{phase.prompts_per_step / phase.updates_per_step:g}")
    if phase.completion_buckets:
        _check_ladder(phase.completion_buckets, f"{name}.completion_buckets")
        _require(phase.completion_buckets[-1] >= cfg.rollout.max_new_tokens,
                 f"{name}.completion_buckets", phase.completion_buckets,
                 f"large enough for rollout.max_new_tokens = {cfg.rollout.max_new_tokens}")
    optimizer = phase.optimizer
    _require(optimizer.learning_rate > 0, f"{name}.optimizer.learning_rate",
             optimizer.learning_rate, "above 0")
    _require(optimizer.warmup_updates >= 0, f"{name}.optimizer.warmup_updates",
             optimizer.warmup_updates, "0 or more")
