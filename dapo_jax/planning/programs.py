"""The run's own programs, not yet compiled: of shapes alone, for any mesh."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from dapo_jax import config, setup_adapter, setup_phases, types
from dapo_jax.buffer import select
from dapo_jax.learner import algorithms, features, packing, update
from dapo_jax.models import attention, gguf, hf, lora, presets
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw, resharding
from dapo_jax.rollout import programs as rollout_programs
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.text import load


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and shapes of its arguments."""

    function: jax.stages.Wrapped
    mesh: mesh_lib.AnyMesh
    arguments: tuple[types.Tree, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is planned: one phase of a configuration."""

    cfg: config.Config
    spec: specs.ModelSpec
    traced: specs.ModelSpec  # the same, with attention that can be traced on this machine
    phase: config.Phase
    algorithm: algorithms.Algorithm
    shape_from: str  # says where the model's shape was taken from
    notes: tuple[str, ...] = ()  # what was changed to be planned


def program(function: jax.stages.Wrapped, mesh: mesh_lib.AnyMesh, *arguments: types.Tree
            ) -> Program:
    """A `mesh_lib.Build` that compiles nothing."""
    return Program(function, mesh, arguments)


def plan(cfg: config.Config, *, backend: str, parts: int = 1, sampling: int = 0) -> Plan:
    """The configuration's RL phase or, without one, SFT, for a kind of device: "tpu" or "gpu", and
    slots that are split into `parts`, those of the sampler into `sampling` (0: as many)."""
    name = "rl" if cfg.rl.steps or cfg.rl.epochs else "sft"
    cfg, notes = _spread(cfg, name, parts, sampling or parts)
    phase = getattr(cfg, name)
    algorithm = algorithms.resolve(phase.algorithm, where=f"{name}.algorithm")
    spec, shape_from = _spec(cfg, backend)
    if cfg.lora.rank:
        lora.check_rank(spec, cfg.lora)
    # cuDNN is asked for its version while it is traced: other kernels stand for it.
    traced = dataclasses.replace(spec, attention=_traceable(spec)) if (
        spec.attention == "cudnn") else spec
    return Plan(cfg, spec, traced, phase, algorithm, shape_from, notes)


def _traceable(spec: specs.ModelSpec) -> str:
    """What is traced for cuDNN: a kernel, or what models/attention.py falls back to."""
    able = spec.compute_dtype in ("bfloat16", "float16") and spec.attention_softcap is None
    return "tpu" if able and spec.head_size % 8 == 0 and spec.head_size <= 128 else "blocked"


def _spread(cfg: config.Config, name: str, parts: int, sampling: int
            ) -> tuple[config.Config, tuple[str, ...]]:
    """Numbers of slots raised to what the meshes can split, and what was raised."""
    phase, rollout = getattr(cfg, name), cfg.rollout
    up = lambda number, by: -(-number // by) * by  # noqa: E731
    asked = {"rollout.slots": (rollout.slots[-1], sampling)}
    ladder = tuple(dict.fromkeys(up(count, sampling) for count in rollout.slots))
    if not phase.microbatch_tokens:
        asked[f"{name}.microbatch_slots"] = phase.microbatch_slots, parts
    notes = tuple(f"config.{field} = {number} does not split over data x fsdp = {by}: planned "
                  f"with {up(number, by)}" for field, (number, by) in asked.items() if number % by)
    phase = dataclasses.replace(phase, microbatch_slots=up(phase.microbatch_slots, parts))
    return dataclasses.replace(cfg, **{
        "rollout": dataclasses.replace(rollout, slots=ladder), name: phase}), notes


def _spec(cfg: config.Config, backend: str) -> tuple[specs.ModelSpec, str]:
    """The shape of the model, and where it was found: in its files or, where these are not there,
    in the preset that the configuration names beside them."""
    model = cfg.model
    compute = "bfloat16" if model.compute_dtype == "auto" else model.compute_dtype
    chosen = {"compute_dtype": compute, "param_dtype": model.param_dtype, "remat": model.remat,
              "attention": attention.resolve(model.attention, backend)}
    if model.source == "scratch":
        tokenizer = load.made(load.Recipe(cfg.tokenizer, None, ""))
        return specs.from_scratch(model, tokenizer.vocab_size, **chosen), "config.model"
    files = model.source != "preset" and (model.package or pathlib.Path(model.path).exists())
    if files and model.source == "gguf":
        path = gguf.find(model)
        return gguf.spec(gguf.open(path), **chosen), str(path)
    if files:
        return hf.spec(hf.open(pathlib.Path(model.path)), **chosen), model.path
    if not model.preset:
        raise config.ConfigError(
            f"config.model.path = {model.path!r} is not here; to plan without the files, set "
            "config.model.preset to the name of the shape (models/presets.py)")
    return presets.spec(model.preset, **chosen), f"the preset {model.preset}"


def of_update(planned: Plan, mesh: mesh_lib.AnyMesh, *, slots: int = 0) -> update.Programs:
    """The update's programs; `slots` of a microbatch instead of the configured ones."""
    return update.compile_programs(
        planned.traced, settings(planned), setup_phases.optimizer(planned.phase, 1000), mesh,
        pack=pack(planned, mesh, slots=slots), build=program)


def settings(planned: Plan) -> update.Settings:
    """What is static in the phase's updates."""
    return setup_phases.update_settings(_name(planned), planned.phase, planned.algorithm,
                                        cfg=planned.cfg, spec=planned.traced)


def _name(planned: Plan) -> str:
    return "rl" if planned.phase is planned.cfg.rl else "sft"


def pack(planned: Plan, mesh: mesh_lib.AnyMesh, *, slots: int = 0) -> packing.PackShape:
    """The shape of the phase's microbatches: its longest, in which memory is largest."""
    shape = setup_phases.pack_shape(_name(planned), planned.phase, planned.cfg, mesh)
    shape = dataclasses.replace(shape, prompt_buckets=shape.prompt_buckets[-1:],
                                completion_buckets=shape.completion_buckets[-1:], stack=1)
    return dataclasses.replace(shape, slots=slots, tokens=0) if slots else shape


def of_rollout(planned: Plan, mesh: mesh_lib.AnyMesh, *, slots: int = 0, layers: int = 0,
               beside: bool = False) -> rollout_programs.Programs:
    """The sampler's programs at its most slots, or at `slots`, and longest prompts; with `layers`
    of the model's only, if given; `beside`: at the next smaller number of slots too."""
    rollout, environment = planned.cfg.rollout, planned.cfg.environment
    room = rollout_programs.Room(environment.parked, environment.parked_host)
    sampling = draw.Sampling(
        max_new_tokens=rollout.max_new_tokens, stop_ids=(0,), temperature=rollout.temperature,
        top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)
    return rollout_programs.compile_programs(
        cut(planned.traced, layers), sampling, mesh, rows=rows(planned),
        room=room if environment.name else None,
        slots=rollout.slots[-2:] if beside else (slots or rollout.slots[-1],),
        buckets=planned.cfg.prompts.buckets[-1:],
        chunk=min(rollout.chunk, rollout.max_new_tokens), gather=rollout.gather, build=program)


def of_states(planned: Plan, mesh: mesh_lib.AnyMesh) -> features.Programs | None:
    """What makes the hidden states that a selection reads; None where none does."""
    cfg, phase = planned.cfg, planned.phase
    if _name(planned) != "rl" or not any(one.reads_states for one in select.strategies(cfg)):
        return None
    shape = features.pack_shape(
        pack(planned, mesh), prompts=cfg.prompts.buckets[-1:],
        rows=min(cfg.rollout.rows or phase.samples_per_prompt, phase.samples_per_prompt),
        completions=config.completion_buckets(phase, cfg.rollout)[-1:])
    return features.compile_programs(planned.traced, cfg.lora, mesh, pack=shape, build=program)


def of_move(planned: Plan, trained: mesh_lib.AnyMesh, sampling: mesh_lib.AnyMesh
            ) -> Program | None:
    """What moves the parameters to the sampler's mesh; None where it is the trainer's."""
    made: Any = resharding.compile_move(planned.traced, trained, sampling, build=program)
    return made


def of_merge(planned: Plan, mesh: mesh_lib.AnyMesh) -> Program | None:
    """What merges an adapter into the blocks that sample; None where there is no adapter."""
    adapter = planned.cfg.lora
    if not adapter.rank:
        return None
    made: Any = setup_adapter.compile_merge(planned.traced, adapter, mesh, build=program)
    return made


def rows(planned: Plan) -> int:
    """Rows of a slot while samples are drawn."""
    if planned.cfg.environment.name:
        return 1
    samples = planned.phase.samples_per_prompt
    return min(planned.cfg.rollout.rows or samples, samples)


def batch_of(made: Program) -> types.TrainBatch:
    """The microbatch, or the stack of them, that a program takes."""
    return next(one for one in made.arguments if isinstance(one, types.TrainBatch))


def cut(spec: specs.ModelSpec, layers: int) -> specs.ModelSpec:
    """The model with its first layers only; 0: all."""
    layers = min(layers or spec.layers, spec.layers)
    return dataclasses.replace(spec, layers=layers, sliding=spec.sliding[:layers])


def given(made: Any) -> tuple[types.Tree, ...]:
    """Shapes of the arguments of a program that `program` made."""
    return made.arguments


def only(programs: Mapping[Any, Any]) -> Program:
    """The one program of a mapping by shapes."""
    (one,) = programs.values()
    return one
