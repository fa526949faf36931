"""What a plan holds of runs that sample on another mesh, read hidden states, train an adapter or
talk with an environment: bytes against what is allocated, programs against those of a run."""

import math
import types

import jax
import numpy as np
import pytest
from test_planning import allocated, small

from dapo_jax import config, phases, setup_adapter
from dapo_jax.buffer import select
from dapo_jax.learner import features
from dapo_jax.planning import (
    chips,
    estimate,
    fit,
    memory,
    moves,
    page,
    programs,
    sources,
    whole,
)
from dapo_jax.rollout import programs as sampler
from dapo_jax.rollout import resharding
from dapo_jax.runtime import mesh as mesh_lib

HIDDEN = {"select.strategies": (("diverse", 2),), "select.features": "hidden"}
TALK = {"environment.name": "calculator", "environment.parked": 6, "environment.turns": 3,
        "rollout.slots": (4, 8)}


def both(plan, trained, sampling=None):
    """The plan's programs over devices, and over their numbers alone."""
    on = mesh_lib.make(config.Mesh(*trained))
    there = mesh_lib.resplit(on, sampling or ())
    abstract = [chips.shape_only(config.Mesh(*sizes)) for sizes in (trained, sampling or trained)]
    return sources.of(plan, on, there), sources.of(plan, *abstract)


def placed(structs):
    """Arrays of these shapes where these shapes lie; nothing is compiled."""
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype),
                                                    leaf.sharding), structs)


@pytest.fixture(scope="module")
def split():
    """Trained over fsdp 4, sampled over data 2 x tensor 2."""
    plan = programs.plan(small(**{"rollout.mesh": (2, 1, 2)}), backend="cpu", parts=4, sampling=2)
    return plan, *both(plan, (1, 4, 1), (2, 1, 2))


def test_parameters_on_the_sampler_s_mesh_take_the_bytes_that_are_allocated(split):
    plan, real, abstract = split
    held = memory.held(plan, abstract)
    here = placed(real.move.arguments[0])
    moved = resharding.compile_move(plan.spec, real.trained, real.sampling)(here)
    weights, slots, *_ = sources.one(real, "decode").arguments
    assert held.parameters == allocated(here)
    assert held.moved == allocated(moved) != held.parameters
    assert held.weights == allocated(placed(weights))
    assert held.sample_cache == allocated(placed(slots.own))


@pytest.mark.parametrize(("trained", "sampling"), [
    ((1, 2, 2), (1, 1, 4)), ((4, 1, 1), (1, 1, 4)), ((1, 1, 4), (2, 2, 1))])
def test_what_a_move_sends_is_what_its_devices_lack(split, trained, sampling):
    """As resharding counts it, from where JAX says that the parts lie."""
    spec = split[0].spec
    here = mesh_lib.make(config.Mesh(*trained))
    there = mesh_lib.resplit(here, sampling)
    weights = sampler.weight_places(spec, there, gather=True)
    expected = resharding.moved_bytes(spec, here, there, weights) - resharding.moved_bytes(
        spec, there, there, weights)
    shapes = [mesh_lib.model_structs(chips.shape_only(config.Mesh(*sizes)), spec)
              for sizes in (trained, sampling)]
    found = moves.received(*shapes)
    assert sum(found) == expected and len(found) == here.size
    assert (expected > 0) == (trained != (4, 1, 1))  # whoever has all needs nothing


def test_microbatches_for_hidden_states_are_those_that_a_run_compiles(monkeypatch):
    cfg = small(**HIDDEN, **{"prompts.buckets": (4, 8)})
    plan = programs.plan(cfg, backend="cpu")
    real, abstract = both(plan, (2, 2, 1))
    compiled = []
    monkeypatch.setattr(features, "compile_programs",
                        lambda *args, pack, **_: compiled.append(pack))
    phases._features(
        types.SimpleNamespace(cfg=cfg, spec=plan.spec, mesh=real.trained),
        types.SimpleNamespace(intake=types.SimpleNamespace(strategies=select.strategies(cfg)),
                              cfg=cfg.rl, pack=programs.pack(plan, real.trained)))
    (run,), planned = compiled, abstract.states.pack
    assert planned.prompt_buckets == run.prompt_buckets[-1:] == (8,)
    assert (planned.rows, planned.tokens, planned.completion_buckets[-1]) == (
        run.rows, run.tokens, run.completion_buckets[-1])


@pytest.mark.slow
def test_hidden_states_take_the_bytes_that_are_planned():
    plan = programs.plan(small(**HIDDEN), backend="cpu")
    real, abstract = both(plan, (2, 2, 1))
    program = sources.one(real, "states")
    found = mesh_lib.compiled(program.function, real.trained, *program.arguments)
    assert found.memory_analysis().argument_size_in_bytes == sum(
        map(memory.on_device, sources.one(abstract, "states").arguments))
    assert "states" in sources.names(abstract)
    assert "states" not in sources.names(both(programs.plan(small(), backend="cpu"), (1, 1, 1))[1])


def test_an_adapter_its_base_and_the_merged_blocks_take_the_bytes_that_are_allocated():
    plan = programs.plan(small(**{"lora.rank": 2}), backend="cpu")
    real, abstract = both(plan, (2, 2, 1))
    base, adapter = real.merge.arguments
    blocks = setup_adapter.compile_merge(plan.spec, plan.cfg.lora, real.trained)(
        placed(base), placed(adapter))
    held = memory.held(plan, abstract)
    assert held.merged == allocated(blocks)
    assert held.base == allocated(placed(base)) > held.merged
    assert held.parameters == allocated(placed(adapter)) < held.base / 4
    assert held.in_rollout == held.parameters + held.optimizer + held.base + held.merged + (
        held.weights + held.prompt_cache + held.sample_cache)


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_its_base_unless_another_is_named():
    changes = {"lora.rank": 2, "rl.algorithm.kl_coef": 0.1}
    for more, other in (({}, False), ({"rl.reference": "some/run"}, True)):
        plan = programs.plan(small(**changes, **more), backend="cpu")
        held = memory.held(plan, both(plan, (1, 1, 1))[1])
        assert held.reference == (held.base if other else 0)


def test_contexts_that_wait_take_the_bytes_that_are_allocated():
    plan = programs.plan(small(**TALK), backend="cpu")
    real, abstract = both(plan, (2, 1, 2))
    program = sources.one(real, "store")
    pool, contexts = (placed(program.arguments[i]) for i in (0, 2))
    held = memory.held(plan, abstract)
    assert held.parked == allocated(pool) > 0 and pool.keys.shape[1] == 6 + 2
    assert estimate.contexts(abstract) == allocated(contexts)
    assert programs.rows(plan) == 1
    # A context is a line of keys and one of values in every layer.
    length = plan.cfg.prompts.buckets[-1] + plan.cfg.rollout.max_new_tokens
    one = 2 * plan.spec.layers * plan.spec.kv_heads * plan.spec.head_size * length * 4
    most = plan.cfg.environment.parked_host
    assert whole._host(plan, abstract) == {"contexts": most, "bytes": most * one}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines", "store", "extend", "seat"])
def test_programs_for_contexts_take_the_bytes_that_are_planned(name):
    plan = programs.plan(small(**TALK), backend="cpu")
    real, abstract = both(plan, (2, 1, 2))
    program = sources.one(real, name)
    found = mesh_lib.compiled(program.function, real.sampling, *program.arguments)
    read = found.memory_analysis().argument_size_in_bytes
    planned = sum(map(memory.on_device, sources.one(abstract, name).arguments))
    # What a program does not read is no argument of it: taking contexts out leaves the seats.
    assert 0.9 * planned < read <= planned


def test_weights_are_made_one_after_another_before_there_are_caches():
    held = memory.Held(1, 2, 4, 8, 16, 32, 64, parked=128, base=256, merged=512, moved=1024)
    work = {name: estimate.Estimate(0.5, 0, 0) for name in sources.ROLLOUT + sources.UPDATE}
    always = 1 + 2 + 8 + 256
    found = fit.in_rollout(held, work)
    assert found["merge"] == always + 512 + 0.5
    assert found["move"] == found["merge"] + 1024 and found["weights"] == found["move"] + 16
    assert {found[name] for name in sources.ROLLOUT[3:]} == {
        always + 512 + 1024 + 16 + 32 + 64 + 128 + 0.5}
    found = fit.in_update(held, work)
    assert found["update"] == found["apply"] == always + 4 + 0.5
    assert found["states"] == found["log-probs, old"] == always + 0.5


def test_episodes_are_planned_with_a_slot_for_each_sample_and_with_their_turns():
    figures = whole.planned(small(**TALK), chips.find("v5e"), config.Mesh(data=2, tensor=2),
                            by_compiler=False)
    # 16 prompts x 4 samples in 8 slots, an admission of 2: groups stream whole through a slot.
    prompts, samples = small().rl.prompts_per_step, small().rl.samples_per_prompt
    runs = {name: part["runs"] for name, part in figures["time"]["rollout"]["parts"].items()}
    assert runs["admit"] == runs["prefill"] == math.ceil(prompts / 2)
    assert runs["seat"] == runs["extend"] == math.ceil(prompts * samples * 2 / 2)
    assert runs["decode"] == math.ceil(prompts * samples * small().rollout.max_new_tokens / 8)
    text = page.text(figures)
    assert "contexts of samples that wait" in text and "with all of their 3 turns" in text


def test_a_sampler_s_mesh_selection_and_adapter_stand_on_the_page():
    cfg = small(**HIDDEN, **{"rollout.mesh": (1, 1, 2), "lora.rank": 2, "rl.microbatch_slots": 9})
    figures = whole.planned(cfg, chips.find("h100"), config.Mesh(data=2), by_compiler=False)
    text = " ".join(page.text(figures).split())
    assert "data 2, fsdp 1, tensor 1 (while samples are drawn: data 1, fsdp 1, tensor 2)" in text
    for said in ("parameters under the adapter", "blocks with the adapter in them",
                 "adapter merged", "hidden states of completions",
                 "parameters on the sampler's mesh"):
        assert said in text, said
    assert [note.split(" does")[0] for note in figures["notes"]] == [
        "config.rl.microbatch_slots = 9"]
    assert figures["rollout"]["slots"] == 8 and figures["minutes"] is None
