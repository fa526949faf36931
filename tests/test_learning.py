import json

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.studies import learning


def record(workdir, *, steps=20, every=5, gain=0.02, seconds=2.0, start=0.3, sft=2,
           rollout=1.5, kept=0.5):
    """A run as files: accuracy rises by `gain` a step, a step takes `seconds` and its evaluation
    100 more."""
    workdir.mkdir(parents=True)
    lines = [{"step": 0, "phase": "start", "eval/avg@8": 0.1}]
    lines += [{"step": step, "phase": "sft", "time/step": 50.0} for step in range(1, sft + 1)]
    lines[-1]["eval/avg@8"] = start
    for step in range(1, steps + 1):
        line = {"step": sft + step, "phase": "rl", "time/step": seconds, "time/rollout": rollout,
                "time/processor": 2 * seconds, "sampling/samples": 96 * step,
                "reward/mean": 0.2, "reward/kept_mean": kept}
        if step % every == 0:
            line |= {"eval/avg@8": start + gain * step, "eval/avg@8/low": 0.0,
                     "time/eval": 100.0, "time/step": seconds + 100.0}
        lines.append(line)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "config.json").write_text(json.dumps(
        {"sft": {"steps": sft}, "rl": {"steps": steps, "prompts_per_step": 8}}))
    return workdir


@pytest.fixture
def curve(tmp_path):
    return learning.curve(record(tmp_path / "run"))


def test_evaluations_cost_no_time_and_the_warm_start_is_where_it_begins(curve):
    assert curve.seconds[-1] == 40 and curve.processor[-1] == 80
    assert curve.at.tolist() == [0, 5, 10, 15, 20]
    assert curve.accuracy == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])


@pytest.mark.parametrize("wanted, steps", [(0.3, 0), (0.35, 2.5), (0.5, 10), (0.69, 19.5)])
def test_time_to_an_accuracy_lies_on_the_line_between_evaluations(curve, wanted, steps):
    assert learning.time_to(curve, wanted, "seconds") == pytest.approx(2 * steps)
    assert learning.time_to(curve, wanted, "processor") == pytest.approx(4 * steps)


def test_an_accuracy_never_reached_has_no_time_and_takes_the_interval_with_it(curve, tmp_path):
    assert np.isnan(learning.time_to(curve, 0.71, "seconds"))
    runs = {0: curve, 1: learning.curve(record(tmp_path / "better", gain=0.03))}
    value = learning.over_seeds(runs, lambda one: learning.time_to(one, 0.71, "seconds"))
    assert np.isnan(value.mean)


def test_savings_are_paired_by_seed(tmp_path):
    base = {seed: learning.curve(record(tmp_path / f"base{seed}", seconds=pace, rollout=pace))
            for seed, pace in enumerate((2.0, 4.0, 8.0))}
    faster = {seed: learning.curve(record(tmp_path / f"fast{seed}", seconds=pace, rollout=pace))
              for seed, pace in enumerate((1.0, 2.0, 4.0))}
    value = learning.saved(faster, base, lambda one: one.seconds[-1])
    # Halved in every pair: no spread, though the seeds differ by a factor of four.
    assert (value.mean, value.low, value.high) == pytest.approx((50, 50, 50))
    assert learning.saved(base, base, lambda one: one.seconds[-1]).mean == 0


def test_accuracy_at_a_time_is_that_of_the_line(curve):
    assert learning.accuracy_at(curve, 15.0) == pytest.approx(0.45)
    assert learning.accuracy_at(curve, 1e6) == pytest.approx(0.7)


def test_shares_and_selection(curve):
    assert learning.sampling_share(curve) == pytest.approx(75)
    assert learning.selection(curve) == pytest.approx(0.3)


def test_a_run_is_finished_with_its_last_step_only(tmp_path):
    workdir = record(tmp_path / "run")
    assert learning.finished(workdir)
    text = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").write_text(text[:-5])  # a torn last line is none
    assert not learning.finished(workdir)
    assert not learning.finished(tmp_path / "none")


def test_a_run_without_rl_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "phase": "start", "eval/avg@8": 0.1}\n')
    with pytest.raises(config.ConfigError, match="no step of RL"):
        learning.curve(tmp_path)
