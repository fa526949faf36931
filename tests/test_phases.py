"""Runs with a reference model, recomputed log-probs and several updates per batch."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import runs

from dapo_jax import command_line, config, export, setup, train
from dapo_jax.learner import train_states
from dapo_jax.runtime import tree_store

# An SFT step, so that the reference is not what a new run would begin with.
ALL = {"sft.steps": 1, "rl.steps": 2, "eval.every": 0, "eval.greedy": False,
       "checkpoint.every": 1, "checkpoint.keep": 9,
       "rl.algorithm.kl_coef": 0.1, "rl.algorithm.old_logprobs": "recomputed",
       "rl.epochs_per_batch": 2, "rl.updates_per_step": 2,
       "rl.optimizer.learning_rate": 3e-3, "rl.optimizer.warmup_updates": 0}


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    runs.reuse_programs(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        runs.reuse_programs(patch)
        assert runs.run(workdir, ALL) == command_line.DONE
    return workdir


def test_every_step_takes_each_mini_batch_in_each_epoch(whole):
    for line in runs.steps(whole):
        assert line["policy/updates"] == 4 and line["policy/skipped"] == 0
        assert line["compiles"] == 0
    assert int(runs.state(whole, ALL).train.updates) == 8


def test_the_policy_leaves_its_reference_and_the_second_epoch_is_off_policy(whole):
    first = runs.steps(whole)[0]
    assert all(line["policy/kl_reference"] > 1e-4 for line in runs.steps(whole))
    assert first["policy/ratio_max"] > 1.001 and first["policy/kl"] > 0
    assert first["policy/importance_mean"] == pytest.approx(1, abs=1e-5)
    assert first["policy/ess"] == pytest.approx(1, abs=1e-5)
    assert first["mismatch/max"] < 1e-5  # of the first update alone


def test_the_reference_is_the_policy_at_the_phase_s_start(whole):
    parts = setup.prepare(runs.configure(ALL))
    kept = tree_store.restore(whole / "reference" / "rl",
                              train_states.reference_structs(parts.spec, parts.mesh))
    runs.assert_same_state(jax.tree.map(np.asarray, kept),
                           runs.state(whole, ALL, step=1).train.params)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_goes_on_has_the_same_reference_and_numbers(tmp_path, whole, step):
    shutil.copytree(whole, tmp_path / "copy")
    for later in range(step + 1, 4):
        shutil.rmtree(tmp_path / "copy" / "checkpoints" / str(later))
    if step == 1:  # killed before the reference was written whole
        shutil.rmtree(tmp_path / "copy" / "reference")
    assert runs.run(tmp_path / "copy", ALL) == command_line.DONE
    assert runs.exact(tmp_path / "copy") == runs.exact(whole)
    runs.assert_same_state(runs.state(tmp_path / "copy", ALL), runs.state(whole, ALL))


def test_without_its_reference_a_run_does_not_go_on(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "reference")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "3")
    with pytest.raises(config.ConfigError, match="reference/rl is missing"):
        runs.run(tmp_path / "copy", ALL)


def test_another_run_s_checkpoint_may_be_the_reference(whole):
    parts = setup.prepare(runs.configure(ALL | {"rl.reference": str(whole)}))
    _, params = tree_store.params_of_run(
        whole, train_states.reference_structs(parts.spec, parts.mesh))
    runs.assert_same_state(jax.tree.map(np.asarray, params), runs.state(whole, ALL).train.params)
    half = dataclasses.replace(parts.spec, compute_dtype="bfloat16")
    _, params = tree_store.params_of_run(whole, train_states.reference_structs(half, parts.mesh))
    assert params["embedding"].dtype == "bfloat16" and params["norm"].dtype == np.float32


@pytest.mark.slow
def test_a_run_is_held_near_the_checkpoint_it_is_given(tmp_path, whole):
    changes = runs.RL_ONLY | {"rl.steps": 2, "eval.every": 0, "rl.algorithm.kl_coef": 0.1,
                              "rl.reference": str(whole)}
    assert runs.run(tmp_path, changes) == command_line.DONE
    assert runs.steps(tmp_path)[0]["policy/kl_reference"] > 0.01


def test_a_folder_of_safetensors_may_be_the_reference(whole, tmp_path):
    folder, workdir = tmp_path / "folder", tmp_path / "run"
    parts, params = setup.prepare(runs.configure(ALL)), runs.state(whole, ALL).train.params
    export.write(folder, params, parts, dtype="float32")
    changes = ALL | {"rl.reference": str(folder)}
    assert runs.run(workdir, changes | {"rl.steps": 1}) == command_line.DONE
    kept = tree_store.restore(workdir / "reference" / "rl",
                              train_states.reference_structs(parts.spec, parts.mesh))
    runs.assert_same_state(jax.tree.map(np.asarray, kept), params)
    (first,) = runs.steps(workdir)
    own = runs.steps(whole)[0]["policy/kl_reference"]  # against the policy it began with
    assert first["policy/kl_reference"] > 1.5 * own and np.isfinite(first["policy/loss"])
    shutil.move(folder, tmp_path / "elsewhere")
    with pytest.raises(config.ConfigError, match="there is no such folder"):
        setup.prepare(runs.configure(changes))


def test_a_reference_of_another_shape_is_refused_by_name(whole):
    changes = ALL | {"model.ff": 32, "rl.reference": str(whole)}
    with pytest.raises(config.ConfigError, match=r"train\.params\.blocks\.mlp.* of another model"):
        setup.prepare(runs.configure(changes))


@pytest.mark.parametrize("changes, parts", [
    ({"rl.reference": "."}, "rl.reference has no effect with kl_coef 0"),
    ({"rl.reference": "no/such/folder", "rl.algorithm.kl_coef": 0.1}, "no/such/folder"),
    ({"rl.optimizer.freeze": ("blocks.*", "*nrom")}, r"rl\.optimizer\.freeze holds '\*nrom'"),
    ({"sft.optimizer.no_decay": ("bias",), "sft.optimizer.weight_decay": 0.1},
     r"sft\.optimizer\.no_decay .* embedding"),
    ({"rl.optimizer.freeze": ("*",)}, "leaves no parameter to train"),
    ({"rl.optimizer.name": "adafactor", "rl.optimizer.moment_dtype": "bfloat16"},
     "moment_dtype"),
])
def test_what_would_have_no_effect_is_refused_before_anything_is_compiled(changes, parts):
    with pytest.raises(config.ConfigError, match=parts):
        setup.prepare(runs.configure(changes))


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_counted_and_kept(tmp_path, monkeypatch, caplog):
    prepare = train.learner.prepare

    def broken(*arguments, step, **options):
        work = prepare(*arguments, step=step, **options)
        if step == 2:
            work[1].batches[0].advantages[:] = np.nan
        return work

    monkeypatch.setattr(train.learner, "prepare", broken)
    assert runs.run(tmp_path, ALL) == command_line.DONE
    bad, after = runs.steps(tmp_path)
    assert [line["policy/skipped"] for line in (bad, after)] == [2, 0]
    assert np.isfinite([bad["policy/loss"], bad["policy/grad_norm"]]).all()
    assert int(runs.state(tmp_path, ALL).train.updates) == 6
    names = sorted(path.name for path in (tmp_path / "failed_updates").iterdir())
    assert names == ["step_000002_update_2.npz", "step_000002_update_4.npz"]
    assert names[0] in caplog.text
    with np.load(tmp_path / "failed_updates" / names[0]) as kept:
        assert np.isnan(kept["0.advantages"]).any() and kept["0.tokens"].dtype == np.int32
        assert np.isfinite(kept["0.old"]).all() and np.isfinite(kept["0.reference"]).all()
