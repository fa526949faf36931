"""Every configuration names the slice that it is planned for, or it stands here why it names none.
tests/test_planning_tpu.py compiles those that do."""

import re

import pytest
from conftest import ROOT

from dapo_jax import config_file
from dapo_jax.planning import chips

CPU = "a model of 0.33M or 135M parameters, made to be trained on a CPU"
NONE = {
    "calculator": CPU, "expert_iteration": CPU, "quickstart": CPU, "rejection_sampling": CPU,
    "reasoning_gym_chain_sum": CPU, "smollm2_addition": CPU, "smollm2_calculator": CPU,
    "jsonl": CPU, "studies/ablation": CPU, "studies/baselines": CPU,
    "studies/dynamic_batching": CPU, "studies/token_loss": CPU, "sweeps/quickstart_lr": CPU,
    "evaluate_math": "it evaluates a model that the caller names, so it has no shape to plan",
    "sweeps/dapo_ladder_32b": "it is dapo_qwen2_5_32b, whose slice is named there"}


def known():
    """Name -> file of every configuration."""
    return {path.relative_to(ROOT / "configs").with_suffix("").as_posix(): path
            for path in sorted((ROOT / "configs").rglob("*.py"))}


def named():
    """(name, flags) of configurations whose docstring gives the command that plans them."""
    for name, path in known().items():
        if command := re.search(r"dapo_jax\.plan --config=\S+((?:[ \\\n]+--\S+)*)",
                                path.read_text()):
            yield name, dict(re.findall(r"--(\w+)=(\S+)", command[1]))


def test_each_configuration_names_a_slice_or_a_reason_why_it_does_not():
    plans = dict(named())
    assert set(plans) | set(NONE) == set(known()) and not set(plans) & set(NONE)
    assert set(plans) >= {"dapo_qwen2_5_32b", "bench_qwen2_5_1_5b"}
    for name, flags in plans.items():
        assert chips.find(flags["chip"]).slices, name


def test_what_is_said_to_be_another_configuration_is_it():
    ladder, base = (config_file.load(str(known()[name])) for name in (
        "sweeps/dapo_ladder_32b", "dapo_qwen2_5_32b"))
    assert ladder.to_dict() == base.to_dict()


@pytest.mark.parametrize("name", sorted(name for name, why in NONE.items() if why == CPU))
def test_configurations_for_a_cpu_say_nothing_of_accelerators(name):
    said = known()[name].read_text().split('"""')[1].lower()
    assert not re.search(r"accelerator|\btpu|\bgpu|v5p|v5e|v6e|h100", said)
