import dataclasses
import types as plain

import numpy as np
import pytest
import runs

from dapo_jax import calibration, command_line, config
from dapo_jax.dynamic_sampling import predictor
from dapo_jax.rollout import engine

COSTS = config.Predictor(kind="cost_optimal")


@pytest.fixture
def source(monkeypatch):
    """A machine on which a call takes 2 seconds and half a second a prompt; the first one more."""
    clock, calls = [0.0], []

    def sample(_engine, _params, plan, **_):
        calls.append(plan)
        clock[0] += 2 + 0.5 * len(plan.prompt) + (5 if len(calls) == 1 else 0)

    monkeypatch.setattr(engine, "sample", sample)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    return plain.SimpleNamespace(
        engine=plain.SimpleNamespace(slots=(4, 16)), table=range(100), root=None, calls=calls,
        size=plain.SimpleNamespace(samples_per_prompt=3), late_seconds=1.0)


@dataclasses.dataclass(frozen=True)
class Node:
    """Stands for the parts of a run's state that are looked at."""

    controller: object = None
    predictor: object = None
    params: object = None
    train: object = None


def state_with(cfg):
    return Node(controller=Node(predictor=predictor.init(cfg)), train=Node())


def test_costs_are_those_of_a_line_through_a_small_and_a_large_call(source):
    assert calibration.measure(source, None) == pytest.approx((2, 0.5))
    assert {len(plan.prompt) for plan in source.calls} == {1, 16}
    assert all((plan.size == 3).all() for plan in source.calls)
    source.table = range(5)
    assert calibration.measure(source, None) == pytest.approx((2, 0.5))


def test_costs_are_above_0_whatever_was_measured(source, monkeypatch):
    for seconds in ({1: 3.0, 16: 2.0}, {1: 1e-9, 16: 5.0}):
        monkeypatch.setattr(calibration, "_seconds", lambda s, p, count, t=seconds: t[count])
        predictor.calibrated(predictor.init(COSTS), **dict(zip(
            ("round_cost", "prompt_cost"), calibration.measure(source, None), strict=True)))
    source.table = range(1)
    monkeypatch.setattr(calibration, "_seconds", lambda s, p, count: 2.0)
    assert min(calibration.measure(source, None)) > 0


def test_only_a_state_that_lacks_costs_it_needs_is_measured(source):
    def using(cfg):
        source.size.dynamic = config.DynamicSampling(predictor=cfg)
        return source

    once = calibration.calibrated(state_with(COSTS), using(COSTS))
    assert float(once.controller.predictor.round_cost) == 2
    calls = len(source.calls)
    given = dataclasses.replace(COSTS, round_cost=9.0, prompt_cost=1.0)
    for state, where in ((once, using(COSTS)), (state_with(given), using(given)),
                         (state_with(COSTS), None)):
        assert calibration.calibrated(state, where) is state
    other = state_with(config.Predictor())
    assert calibration.calibrated(other, using(config.Predictor())) is other
    assert len(source.calls) == calls


@pytest.mark.slow
def test_the_first_checkpoint_holds_the_costs_and_a_run_that_goes_on_keeps_them(
        tmp_path, monkeypatch):
    runs.reuse_programs(monkeypatch)
    changes = {"sft.steps": 0, "rl.steps": 2, "eval.every": 0, "checkpoint.every": 1,
               "dynamic_sampling.predictor.kind": "cost_optimal"}
    assert runs.run(tmp_path, changes) == command_line.DONE
    seen = runs.state(tmp_path, changes, step=1).controller.predictor
    assert seen.round_cost > 0 and seen.prompt_cost > 0
    monkeypatch.setattr(calibration, "measure", None)
    assert runs.run(tmp_path, changes | {"rl.steps": 3}) == command_line.DONE
    after = runs.state(tmp_path, changes).controller.predictor
    np.testing.assert_array_equal([after.round_cost, after.prompt_cost],
                                  [seen.round_cost, seen.prompt_cost])
