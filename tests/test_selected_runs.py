"""Whole runs that learn from what is selected: rejection sampling, expert iteration, replay."""

import shutil

import numpy as np
import pytest
import runs
import test_pods
from conftest import ROOT

from dapo_jax import command_line, config, config_checks, config_file, setup
from dapo_jax.learner import features

REJECT = {"rl.algorithm.preset": "sft", "sft.steps": 0, "rl.steps": 2, "eval.every": 0,
          "eval.greedy": False,
          "select.strategies": (("reject_wrong", 0.5), ("diverse", 2)),
          "checkpoint.every": 1, "checkpoint.keep": 9}
EXPERT = REJECT | {"rl.steps": 3, "rl.epochs_per_batch": 2, "rl.updates_per_step": 2,
                   "buffer.capacity": 5, "buffer.replay": 3, "buffer.max_age": 2}


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    runs.reuse_programs(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An expert iteration of three rounds."""
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        runs.reuse_programs(patch)
        assert runs.run(workdir, EXPERT) == command_line.DONE
    return workdir


def test_rounds_learn_several_epochs_from_right_samples_and_from_earlier_rounds(whole):
    lines = runs.steps(whole)
    assert [line["policy/updates"] for line in lines] == [4, 4, 4]
    assert [line["compiles"] for line in lines] == [0, 0, 0]
    assert all(line["select/reward_mean"] == 1 and line["select/skipped"] == 0 for line in lines)
    assert all(line["reward/kept_mean"] < 1 for line in lines)  # of what was selected from
    assert [line["replay/groups"] for line in lines][0] == 0
    assert all(line["replay/age"] >= 1 and line["replay/groups"] == 3 for line in lines[1:])
    kept = runs.state(whole, EXPERT).replay
    assert (kept.samples.reward[kept.chosen] >= 0.5).all() and kept.chosen.any()
    assert len(np.unique(kept.samples.group)) == lines[-1]["replay/kept"] <= 5
    sizes = np.unique(kept.samples.group[kept.chosen], return_counts=True)[1]
    assert sizes.max() <= 2 and (kept.samples.logprobs[kept.samples.loss_mask] < 0).all()


def test_an_expert_iteration_that_goes_on_is_the_same_run(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    for later in (2, 3):
        shutil.rmtree(tmp_path / "copy" / "checkpoints" / str(later))
    assert runs.run(tmp_path / "copy", EXPERT) == command_line.DONE
    assert runs.exact(tmp_path / "copy") == runs.exact(whole)
    runs.assert_same_state(runs.state(tmp_path / "copy", EXPERT), runs.state(whole, EXPERT))


def test_a_step_of_rejection_sampling_without_a_right_answer_is_skipped(tmp_path):
    changes = EXPERT | {"select.strategies": (("reject_wrong", 2.0), ("diverse", 2))}
    assert runs.run(tmp_path, changes) == command_line.DONE
    lines = runs.steps(tmp_path)
    assert [line["select/skipped"] for line in lines] == [1, 1, 1]
    assert [line["policy/updates"] for line in lines] == [0, 0, 0]
    last = runs.state(tmp_path, changes)
    assert int(last.train.updates) == 0 and int(last.controller.next_group) == 12
    assert len(last.replay.samples) == 0


HIDDEN = REJECT | {"rl.steps": 2, "select.features": "hidden"}


def recorded(monkeypatch):
    """What features were asked for, and what they were."""
    calls, of = [], features.of

    def watched(programs, params, samples, **options):
        calls.append((samples, of(programs, params, samples, **options)))
        return calls[-1][1]
    monkeypatch.setattr(features, "of", watched)
    return calls


def test_a_run_selects_by_the_policy_s_hidden_states(tmp_path, monkeypatch):
    calls = recorded(monkeypatch)
    assert runs.run(tmp_path, HIDDEN) == command_line.DONE
    lines = runs.steps(tmp_path)
    assert [line["compiles"] for line in lines] == [0, 0] and len(calls) == 2
    for line, (samples, found) in zip(lines, calls):
        assert (samples.reward >= 0.5).all() and line["select/samples"] <= len(samples)
        assert line["policy/updates"] == 1
        # Of one prompt's samples, equal completions have equal states and others do not.
        for row in range(1, len(samples)):
            same = np.array_equal(samples.tokens[row], samples.tokens[row - 1])
            if samples.prompt[row] == samples.prompt[row - 1]:
                assert (np.abs(found[row] - found[row - 1]).max() < 1e-5) == same
    before, after = (found for _, found in calls)
    assert np.isfinite(before).all() and np.isfinite(after).all()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"lora.rank": 3, "lora.alpha": 6.0}, {"rollout.mode": "streaming"},
    {"mesh.data": 2, "mesh.fsdp": 2}])
def test_hidden_states_are_read_under_an_adapter_and_on_several_devices(tmp_path, changes):
    assert runs.run(tmp_path, HIDDEN | changes) == command_line.DONE
    for line in runs.steps(tmp_path):
        assert line["compiles"] == 0 and line["select/reward_mean"] == 1


@pytest.mark.slow
def test_two_processes_select_by_hidden_states_as_one_does(tmp_path):
    changes = ("select.features=hidden", "select.strategies=(('reject_wrong',0.5),('diverse',2))",
               "rl.algorithm.preset=sft", "rl.steps=2", "checkpoint.every=0", "eval.every=0")
    one, two = (test_pods.run(tmp_path / str(count), count, *changes) for count in (1, 2))
    test_pods.assert_same(two, one)
    assert all(0 < line["select/share"] <= 0.5 for line in two if line["phase"] == "rl")


@pytest.mark.slow
def test_the_best_and_the_worst_of_each_group_train_a_policy(tmp_path):
    changes = runs.RL_ONLY | {"rl.steps": 2, "eval.every": 0,
                              "select.strategies": (("max_variance", 2),)}
    assert runs.run(tmp_path, changes) == command_line.DONE
    for line in runs.steps(tmp_path):
        assert line["select/share"] == 0.5 and line["select/reward_mean"] == 0.5
        assert line["policy/grad_norm"] > 0 and line["policy/updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, short", [
    ("rejection_sampling", {"rl.epochs": 0, "rl.steps": 2}),
    ("expert_iteration", {"rl.steps": 2, "rl.prompts_per_step": 64, "rl.updates_per_step": 2,
                          "buffer.replay": 16})])
def test_the_configurations_run_shortened(tmp_path, name, short):
    values = config_file.load(str(ROOT / "configs" / f"{name}.py"))
    values.update_from_flattened_dict(short | {"sft.steps": 60, "eval.prompts": 8,
                                               "eval.samples": 2, "log.tensorboard": False})
    cfg = config_checks.from_dict(values)
    assert runs.train.train(cfg, str(tmp_path)) == command_line.DONE
    for line in runs.steps(tmp_path):
        assert line["select/reward_mean"] == 1 and line["policy/updates"] >= 1
        assert line["mismatch/max"] < 1e-4


def test_without_selection_a_checkpoint_holds_no_buffer_of_it():
    parts = setup.prepare(runs.configure())
    assert setup.like_state(parts, 1).replay is None
    assert [phase.pack.rows for phase in parts.phases] == [1, 4]
    assert [phase.pack.rows for phase in setup.prepare(runs.configure(REJECT)).phases] == [2]


@pytest.mark.parametrize("changes, words", [
    ({"rl.algorithm.preset": "sft"}, "set config.select.strategies"),
    ({"sft.algorithm.preset": "dapo", "sft.algorithm.advantage": "ones",
      "filter.enable": False}, "sft.*learns from rollout; config.sft needs one that learns from"),
    ({"buffer.capacity": 4}, "buffer.replay is 0.* above 0 exactly if"),
    ({"buffer.capacity": 4, "buffer.replay": 5}, "at most buffer.capacity = 4"),
    ({"buffer.capacity": 4, "buffer.replay": 2, "rl.algorithm.preset": "rloo"},
     "'rloo' does not correct for.*old_logprobs"),
    ({"select.strategies": (("best", 1),)}, "select.strategies.*'best'.* not known"),
    ({"select.ngram": 0}, "select.ngram"),
    ({"select.features": "mean"}, "select.features is 'mean'; allowed: ngram, hidden"),
    ({"select.features": "hidden"}, "features = 'hidden' has no effect"),
])
def test_what_cannot_be_selected_is_refused_before_anything_is_compiled(changes, words):
    with pytest.raises(config.ConfigError, match=words):
        setup.prepare(runs.configure(changes))
