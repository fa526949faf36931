"""Whole runs: what a step trains on, what is logged, and what ends a run."""

import json
import logging
import math

import jax
import numpy as np
import pytest
import runs

from dapo_jax import command_line, setup

# No greedy evaluation, which has an engine of its own to compile; `usual` has one.
RL = {"sft.steps": 0, "eval.every": 0, "eval.greedy": False, "checkpoint.every": 0}
# Without a filter; its clips are DAPO's, so that one compile of the update does for both.
GRPO = {"rl.algorithm.preset": "grpo", "rl.algorithm.kl_coef": 0.0, "rl.algorithm.clip_high": 0.28,
        "rl.algorithm.dual_clip": 10.0}


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    runs.reuse_programs(monkeypatch)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The work directory of a run as configured."""
    workdir = tmp_path_factory.mktemp("usual")
    with pytest.MonkeyPatch.context() as patch:
        runs.reuse_programs(patch)
        assert runs.run(workdir) == command_line.DONE
    return workdir


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """Rows of the first RL step of a run without SFT, by (prompt, visit, sample)."""
    workdir = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        runs.reuse_programs(patch)
        assert runs.run(workdir, RL | {"rl.steps": 1}) == command_line.DONE
    return _by_identity(workdir)


def _by_identity(workdir):
    return {(row["prompt_id"], row["visit"], row["sample"]): (row["completion"], row["length"])
            for row in runs.rollouts(workdir, 1)}


def _with_prompts(folder, *, keep, of):
    """Changes for a file of prompts of which those in `keep` always give informative groups."""
    for name, count in (("train", of), ("eval", 2)):
        rows = [{"prompt": f"{i}=", "answer": "1", "keep": i in keep} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RL | {
        "task.name": "jsonl", "task.train_path": str(folder / "train.jsonl"),
        "task.eval_path": str(folder / "eval.jsonl"), "task.train_size": 0, "eval.prompts": 2,
        "task.reward": "tests.run_rewards:by_record", "dynamic_sampling.max_rounds": 50}


def _updates(workdir, changes):
    return int(runs.state(workdir, changes).train.updates)


# --------------------------------------------------------------------------------- steps and epochs


def test_steps_count_updates_and_the_schedule_ends_with_them(tmp_path):  # B16
    changes = _with_prompts(tmp_path, keep=set(range(0, 100, 2)), of=100) | {
        "rl.steps": 8, "rl.prompts_per_step": 10, "rl.optimizer.learning_rate": 1e-3,
        "rl.optimizer.schedule": "linear", "rl.optimizer.warmup_updates": 0}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    lines = runs.steps(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert _updates(tmp_path / "run", changes) == 8
    wanted = [1e-3 * (1 - t / 8) for t in range(8)]
    np.testing.assert_allclose([line["policy/lr"] for line in lines], wanted, rtol=1e-6)
    assert all(line["groups/kept"] == 10 for line in lines)
    informative = sum(line["groups/informative"] for line in lines)
    assert informative == 80 + lines[-1]["groups/carried"] + sum(
        line["groups/expired"] for line in lines)
    asked = sum(line["sampling/asked"] for line in lines)
    assert abs(asked - 2 * informative) <= 10  # half of each pass is kept; the last is not whole
    assert 150 <= asked <= 200


def test_a_run_by_epochs_ends_when_their_prompts_are_used_up(tmp_path):
    changes = _with_prompts(tmp_path, keep=set(range(0, 100, 2)), of=100) | {
        "rl.steps": 0, "rl.epochs": 1, "rl.prompts_per_step": 10,
        "dynamic_sampling.carry_steps": 9}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    lines = runs.steps(tmp_path / "run")
    assert sum(line["sampling/asked"] for line in lines) == 100
    assert sum(line["groups/kept"] for line in lines) == 50
    assert _updates(tmp_path / "run", changes) == 5
    assert "eval/avg@4" in lines[-1] and len(lines) < 10  # as many as no filter would fill
    before = runs.lines(tmp_path / "run")
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    assert runs.lines(tmp_path / "run") == before  # nothing was left to do


def test_an_exhausted_epoch_trains_on_what_it_has(tmp_path):  # B05
    changes = _with_prompts(tmp_path, keep={0, 2}, of=3) | {
        "rl.steps": 5, "rl.epochs": 1, "rl.prompts_per_step": 3,
        "dynamic_sampling.at_limit": "error"}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    (line,) = runs.steps(tmp_path / "run")
    assert (line["groups/kept"], line["groups/all_one"]) == (2, 1)
    assert {row["prompt_id"] for row in runs.rollouts(tmp_path / "run", 1) if row["kept"]} == {0, 2}
    assert _updates(tmp_path / "run", changes) == 1


def test_without_a_filter_each_prompt_is_sampled_once_per_epoch(tmp_path):  # B55
    changes = _with_prompts(tmp_path, keep=set(), of=9) | GRPO | {
        "rl.steps": 0, "rl.epochs": 1, "rl.prompts_per_step": 3}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    lines = runs.steps(tmp_path / "run")
    assert [line["sampling/asked"] for line in lines] == [3, 3, 3]
    assert _updates(tmp_path / "run", changes) == 3
    drawn = [row["prompt_id"] for step in (1, 2, 3)
             for row in runs.rollouts(tmp_path / "run", step)]
    assert sorted(drawn) == sorted(4 * list(range(9)))


@pytest.mark.slow
def test_constant_weights_do_not_know_buckets_and_packed_rows(tmp_path):  # B30
    norms = []
    for number, changes in enumerate((
            {}, {"rl.completion_buckets": (16,)},
            {"rl.completion_buckets": (16,), "rl.packed_prompts": 8, "rl.packed_rows": 2})):
        folder = tmp_path / str(number)
        assert runs.run(folder, RL | changes | {
            "rl.steps": 1, "rl.algorithm.preset": "dr_grpo"}) == command_line.DONE
        norms.append(runs.steps(folder)[0]["policy/grad_norm"])
    assert norms[0] > 0.01
    np.testing.assert_allclose(norms, norms[0], rtol=1e-4)


# ------------------------------------------------------------------------------------------- limits


def test_a_limit_ends_the_run_with_its_reason_and_nothing_trained(tmp_path, caplog):  # B03
    changes = RL | {"task.reward": "tests.run_rewards:one", "dynamic_sampling.at_limit": "error",
                    "dynamic_sampling.predictor.max_multiplier": 2.0}
    assert runs.run(tmp_path, changes) == command_line.LIMIT
    for words in ("max_rounds = 3", "keep rate 0.0", "all one 100.0%", "all zero 0.0%"):
        assert words in caplog.text
    assert [line["step"] for line in runs.lines(tmp_path)] == [0]
    assert {row["round"] for row in runs.rollouts(tmp_path, 1)} == {1, 2, 3}
    assert {row["kept"] for row in runs.rollouts(tmp_path, 1)} == {None}
    state = runs.state(tmp_path, changes)
    assert int(state.train.updates) == int(state.step) == 0
    fresh = setup.initial_state(setup.prepare(runs.configure(changes)))
    runs.assert_same_state(state.train, jax.device_get(fresh.train))
    assert runs.run(tmp_path, changes) == command_line.LIMIT  # again, and not for ever


def test_empty_steps_are_logged_and_bounded(tmp_path, caplog):  # B04
    changes = RL | {"task.reward": "tests.run_rewards:one", "dynamic_sampling.at_limit": "skip"}
    assert runs.run(tmp_path, changes) == command_line.LIMIT
    assert "max_empty_steps = 3 steps in a row" in caplog.text
    lines = runs.steps(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["policy/updates"] == line["groups/kept"] == 0
        assert line["groups/all_one"] == line["sampling/asked"] > 0
        assert not {"policy/loss", "policy/lr", "policy/grad_norm"} & set(line)
    state = runs.state(tmp_path, changes)
    assert (int(state.train.updates), int(state.step)) == (0, 2)


# --------------------------------------------------------------------------------------- randomness


def test_visits_and_seeds_draw_differently_and_runs_repeat(tmp_path):  # B57
    changes = _with_prompts(tmp_path, keep=set(), of=4) | GRPO | {
        "rl.steps": 2, "rl.optimizer.learning_rate": 1e-12}
    found = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert runs.run(tmp_path / name, changes | {"seed": seed}) == command_line.DONE
        rows = runs.rollouts(tmp_path / name, 1) + runs.rollouts(tmp_path / name, 2)
        assert len(rows) == 32
        found[name] = {(row["prompt_id"], row["visit"], row["sample"]): row["completion"]
                       for row in rows}
    assert found["a"] == found["b"] != found["c"]
    for prompt in range(4):
        first, second = ([found["a"][prompt, visit, k] for k in range(4)] for visit in (0, 1))
        assert first != second and len(set(first)) > 1


@pytest.mark.parametrize("changes", [
    {"rollout.slots": (4,), "rl.microbatch_slots": 2}, {"rollout.slots": (12, 20)},
    {"mesh.data": 2, "mesh.tensor": 2}, {"mesh.fsdp": 4}])
def test_a_sample_depends_on_no_shape_and_no_device(tmp_path, first_step, changes):
    assert runs.run(tmp_path, RL | {"rl.steps": 1} | changes) == command_line.DONE
    found = _by_identity(tmp_path)
    shared = found.keys() & first_step.keys()
    assert len(shared) >= 16
    assert {key: found[key] for key in shared} == {key: first_step[key] for key in shared}
    (line,) = runs.steps(tmp_path)
    assert line["compiles"] == 0 and line["mismatch/max"] < 1e-5


# ------------------------------------------------------------------------------------------ metrics


def test_on_policy_samples_have_ratio_one(usual):
    line = runs.steps(usual)[0]
    assert line["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert line["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert line["policy/clip_low"] == line["policy/clip_high"] == 0
    assert abs(line["policy/kl"]) < 1e-9
    assert line["policy/grad_norm"] > 1e-3
    assert 0 <= line["mismatch/mean"] <= line["mismatch/max"] < 1e-5


def test_the_second_update_of_a_step_is_off_policy(tmp_path):
    changes = RL | {"rl.steps": 1, "rl.updates_per_step": 2, "rl.optimizer.learning_rate": 1e-2}
    assert runs.run(tmp_path, changes) == command_line.DONE
    (line,) = runs.steps(tmp_path)
    assert line["policy/updates"] == 2 == _updates(tmp_path, changes)
    assert line["policy/ratio_max"] > 1.01
    assert line["mismatch/max"] < 1e-5  # measured on the first update only


def test_every_line_has_its_names(usual):
    every = {"step", "phase", "compiles"}
    step = {"policy/loss", "policy/entropy", "policy/grad_norm", "policy/lr", "policy/updates",
            "time/pack", "time/processor", "time/update", "time/step", "update/padding",
            "tokens_per_second/update"}
    sampled = {f"{head}/{tail}" for head, tails in {
        "reward": "mean std kept_mean shaped_mean",
        "groups": "all_zero all_one informative kept carried expired in_flight",
        "sampling": "asked skipped needed predicted rounds prompts samples tokens waste "
                    "oracle_ratio",
        "length": "mean max truncated", "policy": "ratio_mean ratio_max clip_low clip_high kl",
        "mismatch": "mean max", "repetition": "mean share", "format": "valid stopped",
        "history": "unseen rate_0 rate_9", "buffer": "groups age",
        "invalid": "reward_error reward_timeout",
        "time": "rollout reward", "tokens_per_second": "rollout"}.items() for tail in tails.split()}
    evaluated = {"eval/avg@4", "eval/maj@4", "eval/pass@2", "eval/pass@4",
                 "eval/greedy", "eval/level_1", "time/eval"}
    lines = runs.lines(usual)
    assert [line["step"] for line in lines] == list(range(11))
    assert every | evaluated <= set(lines[0])
    for line in runs.steps(usual, "sft"):
        assert every | step <= set(line)
        assert not {name for name in sampled & set(line) if name.startswith(("reward", "groups"))}
    for line in runs.steps(usual):
        missing = (every | step | sampled) - set(line)
        assert not missing or line["sampling/rounds"] == 0  # all groups were carried ones
    assert any(line["sampling/rounds"] for line in runs.steps(usual))
    assert [line["step"] for line in lines if evaluated <= set(line)] == [0, 3, 4, 6, 9, 10]
    assert [line["step"] for line in lines if "time/checkpoint" in line] == [3, 7, 9]


def test_nothing_compiles_after_the_warm_up_whatever_the_shapes(tmp_path):
    changes = {"rollout.slots": (4, 12), "prompts.buckets": (4, 6), "task.levels": (
        (1, 1.0), (2, 1.0)), "rl.completion_buckets": (2, 4), "rl.microbatch_slots": 2,
        "rl.updates_per_step": 2, "eval.greedy": False}
    assert runs.run(tmp_path, changes) == command_line.DONE
    assert [line["compiles"] for line in runs.lines(tmp_path)] == [0] * 11


def test_invalid_samples_are_counted_and_left_out(tmp_path):  # B71
    changes = RL | {"task.reward": "tests.run_rewards:fails", "rl.steps": 4}
    assert runs.run(tmp_path, changes) == command_line.DONE
    total = 0
    for line in runs.steps(tmp_path):
        rows = runs.rollouts(tmp_path, line["step"])
        failed = [row for row in rows if row["completion"][:1] in tuple("012345")]
        assert line["invalid/reward_error"] == len(failed) == sum(not row["valid"] for row in rows)
        assert all(row["reward"] == 0 for row in failed)
        total += len(failed)
        assert all(math.isfinite(line[name]) for name in ("policy/loss", "policy/grad_norm"))
    assert total > 10
    state = runs.state(tmp_path, changes)
    assert state.buffer.valid.all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.train.params))


def test_the_overlong_penalty_shapes_the_reward_of_truncated_samples(tmp_path):
    changes = RL | {"rl.steps": 1, "overlong.cache": 2, "overlong.factor": 0.5}
    assert runs.run(tmp_path, changes) == command_line.DONE
    (line,) = runs.steps(tmp_path)
    assert line["length/truncated"] > 0
    assert line["reward/shaped_mean"] < line["reward/kept_mean"]
    for row in runs.rollouts(tmp_path, 1):
        penalty = {4: 0.5, 3: 0.25}.get(row["length"], 0)
        assert row["shaped"] == pytest.approx(row["reward"] - penalty)


# ------------------------------------------------------------------------------------------- phases


def test_each_phase_begins_with_a_fresh_optimizer(usual):
    rates = {phase: [line["policy/lr"] for line in runs.steps(usual, phase)]
             for phase in ("sft", "rl")}
    np.testing.assert_allclose(rates["sft"], [2e-3, 4e-3, 6e-3, 8e-3], rtol=1e-6)
    np.testing.assert_allclose(rates["rl"], [1.5e-3] + [3e-3] * 5, rtol=1e-6)
    assert int(runs.state(usual).train.updates) == 6


def test_demonstrations_alone_make_a_run(tmp_path):
    changes = {"rl.steps": 0, "sft.steps": 0, "sft.epochs": 1, "task.train_size": 20}
    assert runs.run(tmp_path, changes) == command_line.DONE
    assert [line["phase"] for line in runs.lines(tmp_path)] == ["start", "sft", "sft", "sft"]
    assert _updates(tmp_path, changes) == 3
    losses = [line["policy/loss"] for line in runs.steps(tmp_path, "sft")]
    assert losses[-1] < losses[0]


def test_records_left_out_are_named_at_the_start(tmp_path, caplog):
    changes = {"rl.steps": 0, "sft.steps": 1, "task.train_size": 5000,
               "task.levels": ((1, 1.0), (2, 1.0)), "prompts.too_long": "drop"}
    with caplog.at_level(logging.WARNING):
        assert runs.run(tmp_path, changes) == command_line.DONE
    (message,) = [record.getMessage() for record in caplog.records
                  if "left out" in record.getMessage()]
    assert "train: too_long" in message and "eval: duplicates" not in message
