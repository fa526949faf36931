import pytest
import runs
import tiny

from dapo_jax import setup_phases


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
