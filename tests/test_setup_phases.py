import pytest
import runs
import tiny

from dapo_jax import setup, setup_phases


def test_schedules_reckon_with_every_update_of_every_epoch():
    phase = runs.configure({
        "rl.updates_per_step": 2, "rl.epochs_per_batch": 3, "rl.optimizer.warmup_updates": 0,
        "rl.optimizer.schedule": "linear"}).rl
    schedule = setup_phases.optimizer(phase, 5).schedule
    rate = phase.optimizer.learning_rate
    found = [float(schedule(count)) / rate for count in (0, 15, 29, 30)]
    assert found == pytest.approx([1, 1 / 2, 1 / 30, 0], abs=1e-6)


@pytest.mark.parametrize("changes, stack", [
    ({}, 1), ({"rl.microbatch_slots": 1}, 4), ({"rl.microbatch_slots": 3}, 2),
    ({"rl.microbatch_slots": 1, "rl.updates_per_step": 2}, 2),
    ({"rl.microbatch_slots": 1, "rl.prompts_per_step": 400}, 32)])
def test_microbatches_are_stacked_up_to_as_many_as_an_update_has(changes, stack):
    cfg = runs.configure(changes)
    assert setup_phases.pack_shape("rl", cfg.rl, cfg, tiny.mesh()).stack == stack


@pytest.mark.parametrize("changes", [
    {}, {"rl.completion_buckets": (4, 16)},
    {"rl.packed_prompts": 8, "rl.completion_buckets": (16,)}])
def test_the_length_that_constant_weights_divide_by_is_the_sampler_s_limit(changes):
    """Not that of a bucket or of a row of several samples, which would scale the loss. (B30)"""
    sft, rl = setup.prepare(runs.configure(changes | {"sft.completion_buckets": (8,)})).phases
    assert (sft.max_length, rl.max_length) == (8, 4)
