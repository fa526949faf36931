"""The phases of a run: their algorithms resolved, and what in them contradicts data or devices."""

import dataclasses
import math
import pathlib

import jax
from jax.sharding import Mesh

from dapo_jax import config, types
from dapo_jax.buffer import replay, select
from dapo_jax.dynamic_sampling import budget
from dapo_jax.learner import algorithms, optim, packing, update
from dapo_jax.models import head, hf
from dapo_jax.models import lora as adapters
from dapo_jax.models import spec as specs
from dapo_jax.runtime import mesh as mesh_lib
from dapo_jax.runtime import tree_store


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of the run, its algorithm resolved."""

    name: str  # "sft" or "rl"
    cfg: config.Phase
    algorithm: algorithms.Algorithm
    first_step: int
    steps: int
    optimizer: optim.Optimizer
    pack: packing.PackShape
    intake: replay.Intake
    max_length: int  # tokens of a completion; not those of a bucket or a packed row

    @property
    def last_step(self) -> int:
        """The step after which the phase is over; steps count from 1."""
        return self.first_step + self.steps - 1


def phases(
    cfg: config.Config, table: types.PromptTable, mesh: Mesh, spec: specs.ModelSpec
) -> tuple[Phase, ...]:
    """The phases that have steps; ConfigError for what cannot be trained."""
    result, first = [], 1
    intakes = _intakes(cfg)
    _check_counts(cfg, intakes["rl"])
    for name, phase in (("sft", cfg.sft), ("rl", cfg.rl)):
        steps = _steps(phase, len(table))
        if not steps:
            continue
        intake = intakes[name]
        algorithm = _on_rollouts(name, algorithms.resolve(
            phase.algorithm, where=f"{name}.algorithm"), intake)
        algorithm = _with_choices(algorithm, cfg)
        if name == "rl":
            _check_fresh(phase, algorithm, cfg.dynamic_sampling)
        _check_phase(name, phase, algorithm, table=table, rollout=cfg.rollout, mesh=mesh)
        _check_learning(name, phase, algorithm, spec=spec, mesh=mesh, lora=cfg.lora)
        result.append(Phase(
            name, phase, algorithm, first, steps, optimizer(phase, steps),
            pack_shape(name, phase, cfg, mesh), intake, _max_length(name, phase, cfg)))
        first += steps
    return tuple(result)


def _intakes(cfg: config.Config) -> dict[str, replay.Intake]:
    """What each phase learns from of its batches: demonstrations are not selected among."""
    return {"sft": replay.Intake((), config.Buffer(), cfg.seed),
            "rl": replay.Intake(select.strategies(cfg), cfg.buffer, cfg.seed)}


def _check_counts(cfg: config.Config, intake: replay.Intake) -> None:
    """Refuse to keep more samples of a group than any group has."""
    largest = budget.most(cfg.dynamic_sampling.budget, cfg.rl.samples_per_prompt)
    for one in intake.strategies:
        if one.most > largest:
            raise config.ConfigError(
                f"config.select.strategies keeps {one.most} samples of a group by {one.name!r}, "
                f"but a group has at most {largest} (config.rl.samples_per_prompt, or what "
                "config.dynamic_sampling.budget makes of it); use a smaller number")


def _on_rollouts(
    name: str, algorithm: algorithms.Algorithm, intake: replay.Intake
) -> algorithms.Algorithm:
    """The algorithm as the phase `rl` runs it: also what is made for demonstrations learns from
    rollouts there, where some are selected."""
    if name != "rl":
        return algorithm
    if algorithm.samples == "demonstrations" and not intake.strategies:
        raise config.ConfigError(
            f"config.rl.algorithm.preset = {algorithm.name!r} learns from demonstrations, or from "
            "rollouts that are selected: set config.select.strategies, such as "
            "(('reject_wrong', 0.5),), or a preset that learns from rewards")
    stale = algorithm.ratio == "none" and algorithm.old_logprobs == "sampler"
    if intake.buffer.replay and stale and algorithm.advantage != "ones":
        raise config.ConfigError(
            f"config.buffer.replay = {intake.buffer.replay} brings back samples of other "
            f"parameters, which {algorithm.name!r} does not correct for: set "
            "config.rl.algorithm.old_logprobs to 'recomputed', or leave config.buffer out")
    return dataclasses.replace(algorithm, samples="rollout")


def _check_fresh(
    phase: config.Phase, algorithm: algorithms.Algorithm, dynamic: config.DynamicSampling
) -> None:
    """Refuse samples of other parameters where no ratio corrects for them. What learns with
    advantage 1, from samples that were selected, takes them as they are."""
    if algorithm.ratio != "none" or algorithm.advantage == "ones":
        return
    for field in ("updates_per_step", "epochs_per_batch"):
        if getattr(phase, field) > 1:
            raise config.ConfigError(
                f"config.rl.{field} = {getattr(phase, field)}, but {algorithm.name!r} has ratio "
                "'none', so that nothing corrects for the updates before the last: set "
                f"config.rl.algorithm.ratio to 'token' or 'sequence', or config.rl.{field} to 1")
    if algorithm.filter and dynamic.carry_steps and algorithm.old_logprobs == "sampler":
        raise config.ConfigError(
            f"config.dynamic_sampling.carry_steps = {dynamic.carry_steps} lets groups of other "
            f"parameters wait, but {algorithm.name!r} has ratio 'none' and does not correct for "
            "them: set config.rl.algorithm.ratio to 'token', or old_logprobs to 'recomputed', or "
            "carry_steps to 0")


def pack_shape(name: str, phase: config.Phase, cfg: config.Config, mesh: mesh_lib.AnyMesh
               ) -> packing.PackShape:
    """The shapes of the phase's microbatches; ConfigError where they hold too little."""
    prompts, completions = cfg.prompts.buckets, config.completion_buckets(phase, cfg.rollout)
    rows = select.most(_intakes(cfg)[name].strategies, phase.samples_per_prompt)
    if phase.packed_prompts:
        if phase.packed_prompts < prompts[-1]:
            raise config.ConfigError(
                f"config.{name}.packed_prompts = {phase.packed_prompts} holds no prompt of "
                f"{prompts[-1]} tokens, the limit of config.prompts.buckets; raise it")
        prompts, completions, rows = (phase.packed_prompts,), completions[-1:], phase.packed_rows
    shape = packing.PackShape(
        phase.microbatch_slots, rows, prompts, completions, tokens=phase.microbatch_tokens,
        parts=mesh_lib.batch_parts(mesh), packed=bool(phase.packed_prompts),
        own=mesh_lib.own_parts(mesh))
    try:
        slots = packing.slots_of(shape, prompts[-1], completions[-1])
    except config.ConfigError as error:
        raise config.ConfigError(f"config.{name}.{error}") from error
    # As many as an update has of the longest; where it has one there is nothing to stack.
    groups = -(-phase.prompts_per_step // phase.updates_per_step)
    microbatches = -(-groups * -(-phase.samples_per_prompt // rows) // slots)
    return dataclasses.replace(shape, stack=min(packing.MOST_STACKED, microbatches))


def _max_length(name: str, phase: config.Phase, cfg: config.Config) -> int:
    """Completions are sampled up to a limit; demonstrations have none but the last bucket's."""
    if name == "rl":
        return cfg.rollout.max_new_tokens
    return config.completion_buckets(phase, cfg.rollout)[-1]


def update_settings(
    name: str, phase: config.Phase, algorithm: algorithms.Algorithm, *, cfg: config.Config,
    spec: specs.ModelSpec,
) -> update.Settings:
    """What is static in the phase's updates. Demonstrations were not drawn at any temperature."""
    temperature = cfg.rollout.temperature if name == "rl" else 1.0
    return update.Settings(
        algorithms.loss_settings(algorithm), temperature,
        cfg.model.head_chunk or head.chunk_size(spec.vocab), phase.optimizer.freeze, cfg.lora)


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


def optimizer(phase: config.Phase, steps: int) -> optim.Optimizer:
    """The phase's optimizer; its schedule reckons with the updates of `steps` steps."""
    horizon = steps * phase.updates_per_step * phase.epochs_per_batch
    return optim.optimizer(phase.optimizer, horizon)


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
    if name == "sft" and algorithm.samples != "demonstrations":
        raise config.ConfigError(
            f"config.sft.algorithm.preset = {algorithm.name!r} learns from {algorithm.samples}; "
            "config.sft needs one that learns from demonstrations")
    if phase.prompts_per_step > len(table):
        raise config.ConfigError(
            f"config.{name}.prompts_per_step = {phase.prompts_per_step}, but the training set has "
            f"only {len(table)} prompts and none is sampled twice in a step")
    if name == "sft":
        _check_demonstrations(table, config.completion_buckets(phase, rollout)[-1])
    if not phase.microbatch_tokens:
        mesh_lib.check_divides(mesh, (phase.microbatch_slots,), f"{name}.microbatch_slots")


def _check_learning(
    name: str, phase: config.Phase, algorithm: algorithms.Algorithm, *, spec: specs.ModelSpec,
    mesh: Mesh, lora: config.Lora,
) -> None:
    """Refuse patterns of no parameter that is trained (with an adapter: of no part of it), and a
    reference that is not needed or not there."""
    if lora.rank:
        adapters.check_rank(spec, lora)
    shapes = mesh_lib.trained_structs(mesh, spec, lora)
    for field in ("no_decay", "freeze"):
        optim.check_patterns(shapes, getattr(phase.optimizer, field),
                             where=f"{name}.optimizer.{field}")
    if all(jax.tree.leaves(optim.matches(shapes, phase.optimizer.freeze))):
        raise config.ConfigError(f"config.{name}.optimizer.freeze leaves no parameter to train")
    if phase.reference and not algorithm.kl_coef:
        raise config.ConfigError(
            f"config.{name}.reference has no effect with kl_coef 0; leave it out, or set "
            f"config.{name}.algorithm.kl_coef")
    if phase.reference:
        _check_reference(name, pathlib.Path(phase.reference), spec,
                         mesh_lib.model_structs(mesh, spec))


def _check_reference(
    name: str, path: pathlib.Path, spec: specs.ModelSpec, shapes: types.Tree
) -> None:
    """Refuse a reference that is not there, or of another shape than the model."""
    if not path.is_dir():
        raise config.ConfigError(
            f"config.{name}.reference = {str(path)!r}: there is no such folder; give a folder of "
            "safetensors or the work directory of a run")
    if (path / "checkpoints").is_dir():
        tree_store.check_run(path, shapes, where=f"config.{name}.reference")
        return
    same = ("param_dtype", "compute_dtype", "remat", "attention")
    found = hf.spec(hf.open(path), **{field: getattr(spec, field) for field in same})
    differ = [field.name for field in dataclasses.fields(spec)
              if getattr(found, field.name) != getattr(spec, field.name)]
    if differ:
        raise config.ConfigError(f"config.{name}.reference = {str(path)!r} is of another shape "
                                 f"than the model: they differ in {', '.join(differ)}")


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
