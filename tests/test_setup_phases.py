import pytest
import runs

from dapo_jax import setup_phases


def test_schedules_reckon_with_every_update_of_every_epoch():
    phase = runs.configure({
        "rl.updates_per_step": 2, "rl.epochs_per_batch": 3, "rl.optimizer.warmup_updates": 0,
        "rl.optimizer.schedule": "linear"}).rl
    schedule = setup_phases.optimizer(phase, 5).schedule
    rate = phase.optimizer.learning_rate
    found = [float(schedule(count)) / rate for count in (0, 15, 29, 30)]
    assert found == pytest.approx([1, 1 / 2, 1 / 30, 0], abs=1e-6)
