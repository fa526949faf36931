"""A phase ready to run: its programs compiled, its reference model at hand."""

import dataclasses
import pathlib

import jax

from dapo_jax import config, setup, setup_adapter, setup_phases, types
from dapo_jax.learner import features, train_states, update
from dapo_jax.models import hf
from dapo_jax.rollout import collect, engine
from dapo_jax.runtime import loading, tree_store


@dataclasses.dataclass(frozen=True)
class PhaseRun:
    """A phase with its programs compiled; `source` only where it samples, `reference` only where
    its loss compares with one."""

    phase: setup_phases.Phase
    programs: update.Programs
    source: collect.Source | None
    reference: types.Tree | None
    base: types.Tree | None  # under an adapter
    states: features.Programs | None = None  # where a selection reads hidden states


def ready(
    parts: setup.Parts, phase: setup_phases.Phase, judge: collect.Judge, state: types.RunState, *,
    workdir: str, base: setup_adapter.Base | None = None,
) -> PhaseRun:
    """Compile all that the phase's steps call, and make or restore its reference model.

    `state` is that before the next step, which may be the phase's first or a later one; `base` the
    model under its adapter.
    """
    settings = setup_phases.update_settings(phase.name, phase.cfg, phase.algorithm, cfg=parts.cfg,
                                            spec=parts.spec)
    programs = update.compile_programs(parts.spec, settings, phase.optimizer, parts.mesh,
                                       pack=phase.pack)
    source = _source(parts, phase, judge) if phase.algorithm.samples == "rollout" else None
    under = base and base.params
    reference = _reference(parts, phase, state, workdir=workdir, base=under)
    return PhaseRun(phase, programs, source, reference, under, _features(parts, phase))


def _features(parts: setup.Parts, phase: setup_phases.Phase) -> features.Programs | None:
    """Compiled for groups as they were sampled, in slots of as many rows as the sampler's."""
    cfg = parts.cfg
    if not any(one.reads_states for one in phase.intake.strategies):
        return None
    samples = phase.cfg.samples_per_prompt
    pack = features.pack_shape(
        phase.pack, prompts=cfg.prompts.buckets, rows=min(cfg.rollout.rows or samples, samples),
        completions=config.completion_buckets(phase.cfg, cfg.rollout))
    return features.compile_programs(parts.spec, cfg.lora, parts.mesh, pack=pack)


def _source(parts: setup.Parts, phase: setup_phases.Phase, judge: collect.Judge
            ) -> collect.Source:
    cfg = parts.cfg
    sampler = engine.compile_engine(
        parts.spec, setup.sampling(parts), parts.mesh,
        **setup.engine_shape(parts, phase.cfg.samples_per_prompt))
    size = collect.settings(cfg, phase.cfg, filter_enabled=phase.algorithm.filter)
    return collect.Source(sampler, setup.key(parts, setup.ROLLOUT), parts.train_table,
                          parts.tokenizer, judge, cfg.overlong, size, parts.stop_texts,
                          cfg.processes.late_seconds)


def _reference(
    parts: setup.Parts, phase: setup_phases.Phase, state: types.RunState, *, workdir: str,
    base: types.Tree | None,
) -> types.Tree | None:
    """The model that the KL term compares with, None if there is no such term.

    Under an adapter it is the base itself, unless another is asked for: no copy is held or kept.
    Else it is made at the phase's start and kept in DIR/reference, before there is a checkpoint of
    the phase: a run that goes on has the same one, whatever became of what it was made from.
    """
    if not phase.algorithm.kl_coef:
        return None
    if base is not None and not phase.cfg.reference:
        return base
    kept = pathlib.Path(workdir) / "reference" / phase.name
    structs = train_states.reference_structs(parts.spec, parts.mesh, parts.cfg.lora)
    if int(state.step) >= phase.first_step:
        return tree_store.restore(kept, structs)
    path = phase.cfg.reference
    if not path:
        reference = _copy(parts, state.train.params, structs)
    elif (pathlib.Path(path) / "checkpoints").is_dir():
        _, reference = tree_store.params_of_run(path, structs)
    else:
        reference = loading.fill(structs, hf.pieces(hf.open(pathlib.Path(path)), parts.spec))
    tree_store.save(kept, reference)
    return reference


def _copy(parts: setup.Parts, params: types.Tree, structs: types.Tree) -> types.Tree:
    copy = jax.jit(lambda tree: train_states.reference_params(parts.spec, tree),
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, structs))
    return copy(params)
