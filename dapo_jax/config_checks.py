"""From a ConfigDict to checked records: unknown fields, wrong types, and contradictions that need
no look at data or devices."""

import dataclasses
import math
import operator
from typing import Any, get_args, get_type_hints

import ml_collections
from ml_collections import config_dict

from dapo_jax import config, config_checks_effects, config_checks_environment


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
        raise config.ConfigError(f"{where} is {value!r}; allowed: "
                                 + ", ".join(one or "'' (nothing)" for one in choices))
    return value


# Smallest values.
LEAST: dict[str, float] = {
    "seed": 0, "model.layers": 1, "model.d_model": 1, "model.heads": 1, "model.kv_heads": 1,
    "model.head_size": 1, "model.ff": 1, "model.head_chunk": 0, "task.train_size": 0,
    "lora.rank": 0, "rollout.max_new_tokens": 1, "rollout.rows": 0, "rollout.chunk": 1,
    "rollout.top_k": 0, "rollout.max_context": 0, "rollout.reward_lag": 0,
    "scoring.workers": 1, "scoring.memory_mb": 0,
    "environment.turn_tokens": 0, "environment.memory_mb": 0, "environment.backoff": 0,
    "environment.bound": 1, "environment.pause": 0,
    "filter.tolerance": 0, "dynamic_sampling.carry_steps": 0,
    "dynamic_sampling.max_rounds": 1, "dynamic_sampling.max_prompts": 0,
    "dynamic_sampling.max_empty_steps": 1,
    "dynamic_sampling.predictor.round_cost": 0, "dynamic_sampling.predictor.prompt_cost": 0,
    "dynamic_sampling.carry_share": 0, "dynamic_sampling.budget.least": 2,
    "dynamic_sampling.budget.first": 2, "dynamic_sampling.budget.stages": 1,
    "dynamic_sampling.budget.each": 1, "dynamic_sampling.choice.longest_gap": 0,
    "select.ngram": 1, "select.strata": 1,
    "buffer.capacity": 0, "buffer.replay": 0, "buffer.max_age": 1,
    "overlong.cache": 0, "overlong.factor": 0, "eval.every": 0, "eval.prompts": 1,
    "eval.samples": 1, "eval.top_k": 0, "eval.page_rows": 0,
    "task.shots": 0, "checkpoint.every": 0, "checkpoint.keep": 1,
    "log.samples_per_step": 0, "mesh.fsdp": 1, "mesh.tensor": 1,
    **{f"{phase}.{name}": least for phase in ("sft", "rl") for name, least in {
        "steps": 0, "epochs": 0, "prompts_per_step": 1, "samples_per_prompt": 1,
        "updates_per_step": 1, "epochs_per_batch": 1, "microbatch_slots": 1, "microbatch_tokens": 0,
        "packed_prompts": 0, "packed_rows": 1, "optimizer.warmup_updates": 0,
        "optimizer.end_factor": 0, "optimizer.clip_norm": 0}.items()},
}
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1), "rollout.temperature": (1e-3, 1e3), "eval.temperature": (1e-3, 1e3),
    "environment.timeout": (1e-3, 1e6), "environment.seconds": (1e-3, 1e6),
    "environment.discount": (0, 1), "environment.demonstrated": (0, 1),
    "environment.turns": (1, 10_000), "environment.workers": (1, 4096),
    "environment.retries": (0, 1000), "environment.reply_lag": (0, 1_000_000),
    "environment.parked": (0, 1_000_000), "environment.parked_host": (0, 1_000_000),
    "processes.late_seconds": (1e-3, 1e6), "checkpoint.deadline": (0, 1e9),
    "scoring.timeout": (1e-3, 1e6), "scoring.failure_reward": (-1e6, 1e6),
    "task.digits": (0, 18), "dynamic_sampling.predictor.alpha": (0, 1e3),
    "dynamic_sampling.predictor.ratio1": (0, 1e3), "dynamic_sampling.predictor.ratio2": (0, 1e3),
    "dynamic_sampling.predictor.max_multiplier": (1, 1e6),
    "dynamic_sampling.predictor.window": (1, 10_000), "dynamic_sampling.budget.most": (0, 10_000),
    "dynamic_sampling.history.decay": (0, 1), "dynamic_sampling.choice.skip_growth": (0, 1),
    "dynamic_sampling.choice.skip_most": (0, 0.99), "dynamic_sampling.choice.target": (0, 1),
    "rollout.min_p": (0, 1), "eval.min_p": (0, 1),
    # In single precision more is infinite, and an eps of 0 makes NaN of a gradient of 0.
    "lora.alpha": (1e-30, 1e30),
    **{f"{phase}.optimizer.{name}": bounds for phase in ("sft", "rl") for name, bounds in {
        "learning_rate": (1e-30, 1e6), "eps": (1e-30, 1e6), "weight_decay": (0, 1e6)}.items()},
}
ABOVE_0 = (
    "model.rope_base", "model.norm_eps",
    "dynamic_sampling.refill_factor", "dynamic_sampling.predictor.q",
    "dynamic_sampling.history.prior_right", "dynamic_sampling.history.prior_wrong")
SHARES = ("rollout.top_p", "eval.top_p", "dynamic_sampling.predictor.gamma")


def check(cfg: config.Config) -> config.Config:
    """Refuse contradictions that need no look at data or devices; returns its argument."""
    _check_numbers(cfg)
    _check_model(cfg.model)
    _check_sampling(cfg)
    for name, phase in (("sft", cfg.sft), ("rl", cfg.rl)):
        _check_phase(phase, name, cfg)
    if not any((cfg.sft.steps, cfg.sft.epochs, cfg.rl.steps, cfg.rl.epochs)):
        raise config.ConfigError("nothing to do: steps and epochs of config.sft and config.rl are "
                                 "all 0")
    _require(cfg.mesh.data >= 1 or cfg.mesh.data == -1, "mesh.data", cfg.mesh.data,
             "at least 1, or -1 for all devices that are left")
    _require(cfg.sft.samples_per_prompt == 1, "sft.samples_per_prompt", cfg.sft.samples_per_prompt,
             "1: a prompt has one demonstration")
    _check_task(cfg.task)
    _require((cfg.buffer.replay > 0) == (cfg.buffer.capacity > 0), "buffer.replay",
             cfg.buffer.replay, f"above 0 exactly if buffer.capacity is, which is "
             f"{cfg.buffer.capacity}: groups are kept to be learned from again")
    _require(cfg.buffer.replay <= cfg.buffer.capacity, "buffer.replay", cfg.buffer.replay,
             f"at most buffer.capacity = {cfg.buffer.capacity}")
    _require(bool(cfg.lora.patterns) and all(isinstance(one, str) for one in cfg.lora.patterns),
             "lora.patterns", cfg.lora.patterns, "a tuple of texts, such as ('attention.*',)")
    _require(all(isinstance(step, int) and step >= 1 for step in cfg.log.profile_steps),
             "log.profile_steps", cfg.log.profile_steps, "a tuple of steps, such as (20,)")
    _check_best(cfg)
    config_checks_environment.check(cfg)
    config_checks_effects.check(cfg)
    return cfg


def _check_best(cfg: config.Config) -> None:
    """Only what every evaluation measures can say which checkpoint is the best."""
    known = [f"eval/{name}@{cfg.eval.samples}" for name in ("avg", "pass", "maj")]
    known += ["eval/greedy"] * cfg.eval.greedy
    _require(cfg.checkpoint.best in ("", *known), "checkpoint.best", cfg.checkpoint.best,
             f"empty or one of {', '.join(known)}")


# Fields of files; fields that only some tasks read.
_OF_FILES = ("train_path", "eval_path", "train_sources", "eval_sources", "where")
_DRAWN = ("arithmetic", "columns", "countdown", "environment", "reasoning_gym")
_READ_BY = {**dict.fromkeys(_OF_FILES, ("math", "multiple_choice", "jsonl")),
            "options": ("countdown", "reasoning_gym"), "dataset": ("reasoning_gym",),
            "shots": ("arithmetic", "countdown", "reasoning_gym")}


def _check_task(task: config.Task) -> None:
    _check_pass_rates(task)
    _require(task.name not in _DRAWN or task.train_size >= 1, "task.train_size", task.train_size,
             f"at least 1 for the task {task.name}")
    for name, tasks in _READ_BY.items():
        if getattr(task, name) and task.name not in tasks:
            raise config.ConfigError(
                f"config.task.{name} is {getattr(task, name)!r}, which the task {task.name!r} does "
                f"not read: set config.task.name to {' or '.join(tasks)}, or leave it out")


def _check_pass_rates(task: config.Task) -> None:
    bounds = task.pass_rate_range
    good = (len(bounds) == 2 and all(isinstance(one, (int, float)) for one in bounds)
            and 0 <= bounds[0] <= bounds[1] <= 1)
    _require(good, "task.pass_rate_range", bounds, "a lowest and a highest rate within 0 and 1")


def _require(fact: bool, name: str, value: Any, rule: str) -> None:
    if not fact:
        raise config.ConfigError(f"config.{name} is {value!r}; it must be {rule}")


def _check_numbers(cfg: config.Config) -> None:
    """The bounds of single fields; a comparison with NaN is false, so it is refused too."""
    for name, least in LEAST.items():
        value = operator.attrgetter(name)(cfg)
        _require(least <= value < math.inf, name, value, f"at least {least}, and finite")
    for name, (least, most) in RANGES.items():
        value = operator.attrgetter(name)(cfg)
        _require(least <= value <= most, name, value, f"from {least:g} to {most:g}")
    for name in ABOVE_0:
        value = operator.attrgetter(name)(cfg)
        _require(0 < value < math.inf, name, value, "above 0, and finite")
    for name in SHARES:
        value = operator.attrgetter(name)(cfg)
        _require(0 < value <= 1, name, value, "in (0, 1]")


def _check_model(model: config.Model) -> None:
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
    _require(all(isinstance(text, str) and text for text in cfg.rollout.stop), "rollout.stop",
             cfg.rollout.stop, "a tuple of texts, such as ('\\n',)")
    _check_ladder(cfg.rollout.slots, "rollout.slots")
    _require(len(cfg.rollout.mesh) in (0, 3) and all(
        isinstance(size, int) and size >= 1 for size in cfg.rollout.mesh), "rollout.mesh",
             cfg.rollout.mesh, "() or three numbers from 1, (data, fsdp, tensor)")
    _check_ladder(cfg.prompts.buckets, "prompts.buckets")
    predictor = cfg.dynamic_sampling.predictor
    _require(1 <= predictor.multiplier <= predictor.max_multiplier,
             "dynamic_sampling.predictor.multiplier", predictor.multiplier,
             f"from 1 to max_multiplier = {predictor.max_multiplier}")
    _check_dynamic(cfg)
    _require(cfg.overlong.cache <= cfg.rollout.max_new_tokens, "overlong.cache",
             cfg.overlong.cache, f"at most rollout.max_new_tokens = {cfg.rollout.max_new_tokens}")


def _check_dynamic(cfg: config.Config) -> None:
    dynamic, samples = cfg.dynamic_sampling, cfg.rl.samples_per_prompt
    costs = dynamic.predictor
    _require((costs.round_cost > 0) == (costs.prompt_cost > 0),
             "dynamic_sampling.predictor.prompt_cost", costs.prompt_cost,
             f"above 0 exactly if round_cost is, which is {costs.round_cost:g}: both have one unit")
    for name in ("round_cost", "prompt_cost"):
        cost = getattr(costs, name)
        _require(cost == 0 or 1e-30 <= cost <= 1e30, f"dynamic_sampling.predictor.{name}", cost,
                 "0, or from 1e-30 to 1e30: it is kept in single precision")
    budget = dynamic.budget
    most = budget.most or 2 * samples
    if budget.kind in ("hard_more", "allocate"):
        _require(budget.least <= most, "dynamic_sampling.budget.least", budget.least,
                 f"at most dynamic_sampling.budget.most = {most}")
    if budget.kind == "allocate":
        _require(budget.least <= samples <= most, "dynamic_sampling.budget.least", budget.least,
                 f"at most rl.samples_per_prompt = {samples}, the mean budget, which is at most "
                 f"dynamic_sampling.budget.most = {most}")
    if budget.kind == "screening":
        _require(budget.first * budget.stages <= samples, "dynamic_sampling.budget.first",
                 budget.first, f"so small that {budget.stages} stages fit into "
                 f"rl.samples_per_prompt = {samples}")
    if budget.kind == "successive":
        _require(2 * budget.each <= most, "dynamic_sampling.budget.each", budget.each,
                 f"at most half of dynamic_sampling.budget.most = {most}")
    _require(0 < budget.tau < 1, "dynamic_sampling.budget.tau", budget.tau, "between 0 and 1")
    _require(dynamic.choice.kind != "difficulty" or not cfg.rl.epochs, "rl.epochs", cfg.rl.epochs,
             "0 (set rl.steps) where dynamic_sampling.choice.kind is difficulty: it has no epochs")


def _check_ladder(sizes: tuple, name: str) -> None:
    good = sizes and all(isinstance(s, int) and s >= 1 for s in sizes) and list(sizes) == sorted(
        set(sizes))
    _require(bool(good), name, sizes, "an ascending tuple of whole numbers from 1")


def _check_phase(phase: config.Phase, name: str, cfg: config.Config) -> None:
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
    for field in ("b1", "b2"):
        value = getattr(phase.optimizer, field)
        _require(0 <= value < 1, f"{name}.optimizer.{field}", value, "in [0, 1)")
    _require(phase.optimizer.name == "adamw" or phase.optimizer.moment_dtype == "float32",
             f"{name}.optimizer.moment_dtype", phase.optimizer.moment_dtype,
             "float32 with adafactor, which has no moments to narrow")
