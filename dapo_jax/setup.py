"""From a configuration to everything a run is made of; all refusals happen here, before the
first compile."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax import config, setup_adapter, setup_environment, setup_phases, types
from dapo_jax.buffer import replay
from dapo_jax.data import sources, store
from dapo_jax.data import tables as prompt_tables
from dapo_jax.dynamic_sampling import budget, controller, order
from dapo_jax.envs import parts as rewards
from dapo_jax.learner import train_states
from dapo_jax.models import attention, gguf, hf, presets, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw, programs
from dapo_jax.runtime import checkpoint, checkpoint_files, loading
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.text import chat as chats
from dapo_jax.text import load
from dapo_jax.text import tokenizer as tokenizers

# What each derived key is for; never reorder.
PARAMETERS, ROLLOUT, EVALUATION, ADAPTER = range(4)


@dataclasses.dataclass(frozen=True)
class Model:
    """What generating needs, before anything is compiled."""

    cfg: config.Config
    spec: specs.ModelSpec
    weights: gguf.File | hf.Folder | None  # None: random
    tokenizer: tokenizers.Tokenizer
    recipe: load.Recipe  # what the tokenizer is made of, for other processes
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]  # found after generating
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Parts(Model):
    """What a run is made of before anything is compiled."""

    reward: str  # module:function
    train_table: types.PromptTable
    eval_table: types.PromptTable
    counts: Mapping[str, int]  # of records left out, by reason
    phases: tuple[setup_phases.Phase, ...]

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return sum(phase.steps for phase in self.phases)


def open_model(cfg: config.Config) -> Model:
    """Read the model's header and its tokenizer and check them against the configuration."""
    weights = _open_weights(cfg.model)
    mesh = mesh_lib.make(cfg.mesh)
    recipe = load.Recipe(
        cfg.tokenizer, weights.metadata if isinstance(weights, gguf.File) else None,
        cfg.model.path if cfg.model.source == "folder" else "")
    tokenizer = load.made(recipe)
    spec = _spec(cfg, weights, tokenizer)
    tokenizer = tokenizers.padded(tokenizer, spec.vocab)
    single, stop_texts = tokenizers.stops(tokenizer, cfg.rollout.stop)
    stop_ids = tuple(dict.fromkeys((*single, *tokenizer.stop_ids)))
    mesh_lib.check_divides(mesh_lib.resplit(mesh, cfg.rollout.mesh), cfg.rollout.slots,
                           "rollout.slots")
    return Model(cfg, spec, weights, tokenizer, recipe, stop_ids, stop_texts, mesh)


def prepare(cfg: config.Config, *, only: str = "") -> Parts:
    """Open the model and read the data; check all of it against the configuration.

    `only` "train" or "eval": the prompts of that split alone and no phases, for what neither trains
    nor restores a run.
    """
    model = open_model(cfg)
    setup_environment.check(cfg, model.tokenizer)
    chat = chats.configured(cfg.tokenizer, model.tokenizer)
    tables = dict.fromkeys(sources.SPLITS, types.PromptTable((), (), ()))
    counts: dict[str, int] = {}
    for split in (only,) if only else sources.SPLITS:
        tables[split], left_out = prompt_tables.load(
            cfg, split, tokenizer=model.tokenizer, recipe=model.recipe, chat=chat,
            stop_id=model.stop_ids[0])
        counts |= {f"{split}: {name}": count for name, count in left_out.items()}
    _check_context(cfg, tables.values())
    phases = () if only else setup_phases.phases(cfg, tables["train"], model.mesh, model.spec)
    reward = cfg.task.reward or sources.task(cfg.task.name).reward
    if not cfg.environment.name:
        rewards.scorer(reward, rewards.weights(cfg.task.reward_weights))
    return Parts(**vars(model), reward=reward, train_table=tables["train"],
                 eval_table=tables["eval"], counts=counts, phases=phases)


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
    chosen: dict[str, Any] = {
        "compute_dtype": compute, "param_dtype": model.param_dtype, "remat": model.remat,
        "attention": attention.resolve(model.attention, jax.default_backend())}
    if model.source == "scratch":
        return specs.from_scratch(model, tokenizer.vocab_size, **chosen)
    if model.source == "preset":
        spec, name = presets.spec(model.preset, **chosen), model.preset
    else:
        assert weights is not None  # model.source is a file or a folder
        spec, name = _format(weights).spec(weights, **chosen), str(weights.path)
    if tokenizer.vocab_size > spec.vocab:
        raise config.ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding of {name} only "
            f"{spec.vocab}; set config.tokenizer to the model's own")
    return spec


def _format(weights: gguf.File | hf.Folder) -> ModuleType:
    """The module that reads weights of this kind."""
    return gguf if isinstance(weights, gguf.File) else hf


def _check_context(cfg: config.Config, tables: Iterable[types.PromptTable]) -> None:
    limit = cfg.rollout.max_context
    longest = max(_longest(table.tokens) for table in tables)
    if limit and longest >= limit:
        raise config.ConfigError(
            f"config.rollout.max_context = {limit} tokens leaves no room after a prompt of "
            f"{longest} tokens; raise it, or lower config.prompts.buckets")


def _longest(tokens: Sequence[np.ndarray]) -> int:
    if isinstance(tokens, store.Arrays):  # mapped from files: its pages need not be read
        return int(tokens.lengths.max())
    return max(map(len, tokens), default=0)


def key(parts: Model, purpose: int) -> jax.Array:
    """The key of one purpose, on every device of the mesh."""
    make = jax.jit(lambda: jax.random.fold_in(jax.random.key(parts.cfg.seed), purpose),
                   out_shardings=mesh_lib.replicated(parts.mesh))
    return make()


def sampling(parts: Model, **changes: Any) -> draw.Sampling:
    """How completions are drawn in training; `changes` for evaluation."""
    rollout = parts.cfg.rollout
    drawn = draw.Sampling(max_new_tokens=rollout.max_new_tokens, stop_ids=parts.stop_ids,
                         temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
                         min_p=rollout.min_p)
    return dataclasses.replace(drawn, **changes)


def engine_shape(parts: Model, samples: int) -> dict[str, Any]:
    """What engine.compile_engine is told of shapes, for groups of so many samples."""
    rollout = parts.cfg.rollout
    environment = parts.cfg.environment
    room = programs.Room(environment.parked, environment.parked_host) if environment.name else None
    return {"rows": 1 if room else min(rollout.rows or samples, samples), "share": samples,
            "room": room,
            "slots": rollout.slots, "chunk": rollout.chunk, "gather": rollout.gather,
            "buckets": parts.cfg.prompts.buckets, "max_context": rollout.max_context,
            "split": rollout.mesh}


def most_samples(cfg: config.Config) -> int:
    """Samples that one step, or one evaluation, can ask for, by its bounds."""
    dynamic, rl = cfg.dynamic_sampling, cfg.rl
    prompts = dynamic.max_prompts or 20 * rl.prompts_per_step
    samples = max(2 * rl.samples_per_prompt, budget.most(dynamic.budget, rl.samples_per_prompt))
    return max(prompts * samples, cfg.eval.prompts * cfg.eval.samples)


def parameter_count(parts: Parts) -> int:
    """Numbers that are trained."""
    structs = mesh_lib.trained_structs(parts.mesh, parts.spec, parts.cfg.lora)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structs))


def initial_params(parts: Model) -> types.Tree:
    """Random or loaded parameters, made straight into their shards."""
    if parts.weights is None:
        make = jax.jit(lambda root: transformer.init(parts.spec, root),
                       out_shardings=mesh_lib.param_shardings(parts.mesh, parts.spec))
        return make(key(parts, PARAMETERS))
    return loading.fill(mesh_lib.model_structs(parts.mesh, parts.spec),
                        _format(parts.weights).pieces(parts.weights, parts.spec))


def open_base(parts: Model) -> setup_adapter.Base | None:
    """The model under the adapter; None where all parameters are trained."""
    if not parts.cfg.lora.rank:
        return None
    return setup_adapter.opened(parts.spec, parts.cfg.lora, parts.mesh, initial_params(parts))


def initial_state(parts: Parts, base: setup_adapter.Base | None = None) -> types.RunState:
    """The run before its first step; `base`: that of `open_base`, if it is at hand."""
    base = base or open_base(parts)
    train = fresh_train_state(parts, parts.phases[0], initial_trained(parts))
    return types.RunState(train=train, base=base.mark if base else None, **_host_state(parts))


def initial_trained(parts: Model) -> types.Tree:
    """What is trained, before the first update: all parameters, or an adapter."""
    if not parts.cfg.lora.rank:
        return initial_params(parts)
    return setup_adapter.new(parts.spec, parts.cfg.lora, parts.mesh, key(parts, ADAPTER))


def first_state(
    parts: Parts, manager: checkpoint.ocp.CheckpointManager
) -> tuple[types.RunState, setup_adapter.Base | None, bool]:
    """The newest checkpoint's state and true, or a new one and false; between them `open_base`'s.
    """
    base = open_base(parts)
    if checkpoint.latest(manager) is None:
        checkpoint_files.check_none_was_there(manager)
        return initial_state(parts, base), base, False
    state = checkpoint.restore(manager, functools.partial(like_state, parts))
    if base is not None:
        setup_adapter.check(base, cast(np.ndarray, state.base), where=str(manager.directory))
    return state, base, True


def like_state(parts: Parts, step: int) -> types.RunState:
    """Shapes and shardings of the state after `step` steps, to restore a checkpoint into."""
    phase = next((phase for phase in parts.phases if step <= phase.last_step), parts.phases[-1])
    lora = parts.cfg.lora
    return types.RunState(
        train=train_states.state_structs(parts.spec, phase.optimizer, parts.mesh, lora),
        base=np.zeros(0, np.uint32) if lora.rank else None, **_host_state(parts))


def _host_state(parts: Parts) -> dict[str, Any]:
    cfg, size = parts.cfg, len(parts.train_table)
    width, turns = cfg.rollout.max_new_tokens, setup_environment.turns_credited(cfg.environment)
    return {
        "controller": controller.init(size, seed=cfg.seed, cfg=cfg.dynamic_sampling),
        "demonstrations": order.init(size, cfg.seed),
        "buffer": types.no_samples(width, turns=turns),
        "replay": replay.nothing(width, turns=turns) if cfg.buffer.capacity else None,
        "step": np.asarray(0, np.int32)}


def fresh_train_state(
    parts: Parts, phase: setup_phases.Phase, params: types.Tree
) -> types.TrainState:
    """Parameters with the optimizer of `phase` before its first update."""
    structs = train_states.state_structs(parts.spec, phase.optimizer, parts.mesh, parts.cfg.lora)
    placed = jax.tree.map(lambda leaf: leaf.sharding, structs)
    make = jax.jit(phase.optimizer.transform.init, out_shardings=placed.opt_state)
    updates = mesh_lib.put(np.int32(0), placed.updates)
    return types.TrainState(params, make(params), updates)
