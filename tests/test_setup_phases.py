import pytest
import runs
import tiny

from dapo_jax import config, setup, setup_phases


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


STALE = {"rl.algorithm.preset": "rloo"}
CARRIED = STALE | {"filter.enable": True}


@pytest.mark.parametrize("changes, words", [
    (STALE | {"rl.updates_per_step": 2}, "rl.updates_per_step = 2.*ratio to 'token'"),
    (STALE | {"rl.epochs_per_batch": 3}, "rl.epochs_per_batch = 3.*rl.epochs_per_batch to 1"),
    ({"rl.algorithm.ratio": "none", "rl.updates_per_step": 4}, "'dapo' has ratio 'none'"),
    (CARRIED, "carry_steps = 1.*old_logprobs to 'recomputed'"),
    ({"lora.rank": 33}, "lora.rank = 33 is more than the 32 "),
    ({"lora.rank": 17, "lora.patterns": ("attention.value",)},
     "lora.rank = 17 is more than the 16")])
def test_what_no_ratio_corrects_and_ranks_above_the_full_one_are_refused(changes, words):
    with pytest.raises(config.ConfigError, match=words):
        setup.prepare(runs.configure(changes))


@pytest.mark.parametrize("changes", [
    STALE, STALE | {"rl.updates_per_step": 2, "rl.algorithm.ratio": "token"},
    CARRIED | {"rl.algorithm.old_logprobs": "recomputed"},
    CARRIED | {"dynamic_sampling.carry_steps": 0}, {"lora.rank": 32}])
def test_with_what_the_message_says_they_are_accepted(changes):
    assert setup.prepare(runs.configure(changes)).phases
