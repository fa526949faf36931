"""From a configuration to everything a run is made of; all refusals happen here, before the
first compile."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax import config, types
from dapo_jax.data import prompts, sources
from dapo_jax.dynamic_sampling import controller, order
from dapo_jax.envs import base
from dapo_jax.learner import algorithms, optim, packing, update
from dapo_jax.models import gguf, hf, presets, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw
from dapo_jax.runtime import loading
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.text import chat as chats
from dapo_jax.text import load
from dapo_jax.text import tokenizer as tokenizers

# What each derived key is for; never reorder.
PARAMETERS, ROLLOUT, EVALUATION = range(3)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of the run, its algorithm resolved."""

    name: str  # "sft" or "rl"
    cfg: config.Phase
    algorithm: algorithms.Algorithm
    first_step: int
    steps: int
    optimizer: update.Optimizer
    pack: packing.PackShape

    @property
    def last_step(self) -> int:
        """The step after which the phase is over; steps count from 1."""
        return self.first_step + self.steps - 1


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of before anything is compiled."""

    cfg: config.Config
    spec: specs.ModelSpec
    weights: gguf.File | hf.Folder | None  # None: random
    tokenizer: tokenizers.Tokenizer
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]  # found after generating
    reward: str  # module:function
    train_table: types.PromptTable
    eval_table: types.PromptTable
    counts: Mapping[str, int]  # of records left out, by reason
    mesh: Mesh
    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return sum(phase.steps for phase in self.phases)


def prepare(cfg: config.Config) -> Parts:
    """Read data and model headers and check them against the configuration."""
    weights = _open_weights(cfg.model)
    mesh = mesh_lib.make(cfg.mesh)
    tokenizer = load.tokenizer(
        cfg.tokenizer, metadata=weights.metadata if isinstance(weights, gguf.File) else None,
        model_folder=cfg.model.path if cfg.model.source == "folder" else "")
    spec = _spec(cfg, weights, tokenizer)
    tokenizer = tokenizers.padded(tokenizer, spec.vocab)
    single, stop_texts = tokenizers.stops(tokenizer, cfg.rollout.stop)
    stop_ids = tuple(dict.fromkeys((*single, *tokenizer.stop_ids)))
    chat = chats.configured(cfg.tokenizer, tokenizer)
    tables, counts = {}, {}
    for split in ("train", "eval"):
        records, left_out = sources.load(cfg, split)
        records = prompts.in_chat(records, chat, wrap=cfg.task.chat)
        tables[split], more = prompts.table(records, tokenizer, cfg.prompts, stop_id=stop_ids[0])
        counts |= {f"{split}: {name}": count for name, count in (left_out | more).items()}
    _check_context(cfg, tables)
    phases = _phases(cfg, tables["train"], mesh)
    reward = cfg.task.reward or sources.task(cfg.task.name).reward
    base.resolve_reward(reward)
    return Parts(cfg, spec, weights, tokenizer, stop_ids, stop_texts, reward, tables["train"],
                 tables["eval"], counts, mesh, phases)


def _open_weights(model: config.Model) -> gguf.File | hf.Folder | None:
    if model.source == "gguf":
        return gguf.open(gguf.find(model))
    return hf.open(pathlib.Path(model.path)) if model.source == "folder" else None


def _spec(
    cfg: config.Config, weights: gguf.File | hf.Folder | None, tokenizer: tokenizers.Tokenizer
) -> specs.ModelSpec:
    model = cfg.model
    compute = model.compute_dtype
    if compute == "auto":
        compute = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    chosen = {"compute_dtype": compute, "param_dtype": model.param_dtype, "remat": model.remat}
    if model.source == "scratch":
        return specs.from_scratch(model, tokenizer.vocab_size, **chosen)
    if model.source == "preset":
        spec, name = presets.spec(model.preset, **chosen), model.preset
    else:
        spec, name = _format(weights).spec(weights, **chosen), weights.path
    if tokenizer.vocab_size > spec.vocab:
        raise config.ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding of {name} only "
            f"{spec.vocab}; set config.tokenizer to the model's own")
    return spec


def _format(weights: gguf.File | hf.Folder) -> ModuleType:
    """The module that reads weights of this kind."""
    return gguf if isinstance(weights, gguf.File) else hf


def _check_context(cfg: config.Config, tables: Mapping[str, types.PromptTable]) -> None:
    limit = cfg.rollout.max_context
    longest = max(len(tokens) for table in tables.values() for tokens in table.tokens)
    if limit and longest >= limit:
        raise config.ConfigError(
            f"config.rollout.max_context = {limit} tokens leaves no room after a prompt of "
            f"{longest} tokens; raise it, or lower config.prompts.buckets")


def _phases(
    cfg: config.Config, table: types.PromptTable, mesh: Mesh
) -> tuple[Phase, ...]:
    mesh_lib.check_divides(mesh, cfg.rollout.slots, "rollout.slots")
    phases, first = [], 1
    for name, phase in (("sft", cfg.sft), ("rl", cfg.rl)):
        steps = _steps(phase, len(table))
        if not steps:
            continue
        algorithm = _with_choices(algorithms.resolve(phase.algorithm, where=f"{name}.algorithm"),
                                  cfg)
        _check_phase(name, phase, algorithm, table=table, rollout=cfg.rollout, mesh=mesh)
        width = config.completion_buckets(phase, cfg.rollout)
        phases.append(Phase(
            name, phase, algorithm, first, steps, _optimizer(phase, steps),
            packing.PackShape(phase.microbatch_slots, phase.samples_per_prompt,
                              cfg.prompts.buckets, width)))
        first += steps
    return tuple(phases)


def _with_choices(algorithm: algorithms.Algorithm, cfg: config.Config) -> algorithms.Algorithm:
    """What the configuration says outside the preset, where it says anything."""
    if algorithm.samples != "rollout":
        return algorithm
    if cfg.filter.enable is not None:
        algorithm = dataclasses.replace(algorithm, filter=cfg.filter.enable)
    if cfg.overlong.mask is not None:
        algorithm = dataclasses.replace(algorithm, mask_overlong=cfg.overlong.mask)
    return algorithm


def _steps(phase: config.Phase, prompts_in_table: int) -> int:
    """The phase's steps; epochs give the most they can fill, which is with no group filtered."""
    if not phase.epochs:
        return phase.steps
    most = math.ceil(prompts_in_table * phase.epochs / phase.prompts_per_step)
    return min(phase.steps or most, most)


def _optimizer(phase: config.Phase, steps: int) -> update.Optimizer:
    horizon = steps * phase.updates_per_step
    return update.Optimizer(optim.transform(phase.optimizer, horizon),
                            optim.schedule(phase.optimizer, horizon))


def _check_phase(
    name: str, phase: config.Phase, algorithm: algorithms.Algorithm, *, table: types.PromptTable,
    rollout: config.Rollout, mesh: Mesh,
) -> None:
    algorithms.check(algorithm, samples_per_prompt=phase.samples_per_prompt,
                     where=f"{name}.algorithm")
    if algorithm.filter and phase.samples_per_prompt < 2:
        raise config.ConfigError(
            f"config.{name}.samples_per_prompt = {phase.samples_per_prompt}: a filter of equal "
            "rewards drops every group of one; set config.filter.enable to False")
    source = {"sft": "demonstrations", "rl": "rollout"}[name]
    if algorithm.samples != source:
        raise config.ConfigError(
            f"config.{name}.algorithm.preset = {algorithm.name!r} learns from {algorithm.samples}; "
            f"config.{name} needs one that learns from {'a ' * (name == 'rl')}{source}")
    if phase.prompts_per_step > len(table):
        raise config.ConfigError(
            f"config.{name}.prompts_per_step = {phase.prompts_per_step}, but the training set has "
            f"only {len(table)} prompts and none is sampled twice in a step")
    if name == "sft":
        _check_demonstrations(table, config.completion_buckets(phase, rollout)[-1])
    mesh_lib.check_divides(mesh, (phase.microbatch_slots,), f"{name}.microbatch_slots")


def _check_demonstrations(table: types.PromptTable, limit: int) -> None:
    if not table.demonstrations:
        raise config.ConfigError("config.sft has steps, but the task's records hold no "
                                 "'demonstration' to learn from; set config.sft.steps to 0")
    longest = max(len(tokens) for tokens in table.demonstrations)
    if longest > limit:
        raise config.ConfigError(
            f"the longest demonstration has {longest} tokens with its stop token, more than the "
            f"{limit} of config.rollout.max_new_tokens; raise that or set "
            "config.sft.completion_buckets")


def key(parts: Parts, purpose: int) -> jax.Array:
    """The key of one purpose, on every device of the mesh."""
    root = jax.random.fold_in(jax.random.key(parts.cfg.seed), purpose)
    return mesh_lib.put(root, mesh_lib.replicated(parts.mesh))


def sampling(parts: Parts, **changes: object) -> draw.Sampling:
    """How completions are drawn in training; `changes` for evaluation."""
    rollout = parts.cfg.rollout
    drawn = draw.Sampling(max_new_tokens=rollout.max_new_tokens, stop_ids=parts.stop_ids,
                         temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p)
    return dataclasses.replace(drawn, **changes)


def engine_shape(parts: Parts, samples: int) -> dict[str, Any]:
    """What engine.compile_engine is told of shapes, for groups of so many samples."""
    rollout = parts.cfg.rollout
    return {"rows": min(rollout.rows or samples, samples), "share": samples,
            "slots": rollout.slots, "chunk": rollout.chunk, "gather": rollout.gather,
            "buckets": parts.cfg.prompts.buckets, "max_context": rollout.max_context}


def update_settings(parts: Parts, phase: Phase) -> update.Settings:
    """What is static in the phase's updates. Demonstrations were not drawn at any temperature."""
    temperature = parts.cfg.rollout.temperature if phase.name == "rl" else 1.0
    return update.Settings(algorithms.loss_settings(phase.algorithm), temperature,
                           parts.cfg.model.head_chunk)


def parameter_count(spec: specs.ModelSpec) -> int:
    """Numbers that are trained."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def initial_params(parts: Parts) -> types.Tree:
    """Random or loaded parameters, made straight into their shards."""
    shardings = mesh_lib.param_shardings(parts.mesh, parts.spec)
    if parts.weights is None:
        make = jax.jit(lambda root: transformer.init(parts.spec, root), out_shardings=shardings)
        return make(key(parts, PARAMETERS))
    shapes = jax.eval_shape(lambda: transformer.init(parts.spec, jax.random.key(0)))
    return loading.fill(mesh_lib.structs(shapes, shardings),
                        _format(parts.weights).pieces(parts.weights, parts.spec))


def initial_state(parts: Parts) -> types.RunState:
    """The run before its first step."""
    return types.RunState(train=fresh_train_state(parts, parts.phases[0], initial_params(parts)),
                          **_host_state(parts))


def like_state(parts: Parts, step: int) -> types.RunState:
    """Shapes and shardings of the state after `step` steps, to restore a checkpoint into."""
    phase = next((phase for phase in parts.phases if step <= phase.last_step), parts.phases[-1])
    return types.RunState(train=update.state_structs(parts.spec, phase.optimizer, parts.mesh),
                          **_host_state(parts))


def _host_state(parts: Parts) -> dict[str, object]:
    cfg, size = parts.cfg, len(parts.train_table)
    return {
        "controller": controller.init(size, seed=cfg.seed, cfg=cfg.dynamic_sampling),
        "demonstrations": order.init(size, cfg.seed),
        "buffer": types.no_samples(cfg.rollout.max_new_tokens),
        "step": np.asarray(0, np.int32)}


def fresh_train_state(parts: Parts, phase: Phase, params: types.Tree) -> types.TrainState:
    """Parameters with the optimizer of `phase` before its first update."""
    structs = update.state_structs(parts.spec, phase.optimizer, parts.mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, structs)
    make = jax.jit(phase.optimizer.transform.init, out_shardings=placed.opt_state)
    updates = mesh_lib.put(jnp.int32(0), placed.updates)
    return types.TrainState(params, make(params), updates)
