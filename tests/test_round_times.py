import json

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.studies import round_times


def calls(first, slope, *, noise=0.0, seed=0, repeats=3):
    """Rows of a machine whose rounds take first + slope n G seconds and noise."""
    rng = np.random.default_rng(seed)
    return [{"repeat": repeat, "prompts": count, "samples": size,
             "seconds": first + slope * count * size + noise * rng.normal(),
             "processor": 2 * (first + slope * count * size)}
            for repeat in range(repeats) for size in (8, 16, 32) for count in (16, 64, 256)]


def test_a_line_without_noise_is_found_exactly():
    found = round_times.fit_times(calls(0.5, 1e-3))
    assert found.round.mean == pytest.approx(0.5) and found.sample.mean == pytest.approx(1e-3)
    assert found.r_squared == pytest.approx(1) and found.r_squared_medians == pytest.approx(1)
    used = round_times.fit_times(calls(0.5, 1e-3), "processor")
    assert used.round.mean == pytest.approx(1) and used.sample.mean == pytest.approx(2e-3)


def test_the_intervals_hold_the_truth_as_often_as_they_say():
    inside = [[found.round.low <= 0.5 <= found.round.high,
               found.sample.low <= 1e-3 <= found.sample.high]
              for found in (round_times.fit_times(calls(0.5, 1e-3, noise=0.2, seed=seed))
                            for seed in range(400))]
    assert np.mean(inside, axis=0) == pytest.approx([0.95, 0.95], abs=0.035)  # 3 deviations


def test_what_is_explained_is_one_minus_the_rest():
    rows = calls(0.5, 1e-3, noise=1.0)
    found, total = round_times.fit_times(rows), [row["prompts"] * row["samples"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    # In simple regression it is the squared correlation, which says nothing of how it was fitted.
    assert found.r_squared == pytest.approx(np.corrcoef(total, seconds)[0, 1] ** 2)
    assert found.r_squared < found.r_squared_medians


@pytest.mark.parametrize("text", ["", "8,x", "0,8", "8,-1", "8,100"])
def test_sizes_that_cannot_be_are_refused(text):
    with pytest.raises(config.ConfigError, match="--prompts="):
        round_times._sizes("prompts", text, 50)


def test_rows_survive_json():
    rows = calls(0.1, 1e-3)
    assert round_times.fit_times(json.loads(json.dumps(rows))) == round_times.fit_times(rows)
