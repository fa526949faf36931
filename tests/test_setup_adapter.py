"""Runs that train an adapter: SFT, then RL with a reference, and what is done with them later."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import runs
import test_update_adapter
import tiny
import torch_model

from dapo_jax import command_line, config, evaluate, export, setup, setup_adapter
from dapo_jax.models import hf, lora
from dapo_jax.runtime import mesh as mesh_lib

ALL = {"lora.rank": 3, "lora.alpha": 6.0, "sft.steps": 1, "rl.steps": 2, "eval.every": 0,
       "eval.greedy": False,
       "checkpoint.every": 1, "checkpoint.keep": 9, "rl.algorithm.kl_coef": 0.1,
       "rl.optimizer.warmup_updates": 0}
FLAGS = ["--config=tests/tiny_config.py", *(f"--config.{name}={value}"
                                            for name, value in ALL.items())]
TOKENS = np.random.default_rng(3).integers(0, 19, (2, 6)).astype(np.int32)


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


@pytest.fixture(scope="module")
def parts():
    return setup.prepare(runs.configure(ALL))


@pytest.fixture(scope="module")
def base(parts):
    return setup.open_base(parts)


def test_the_sampler_runs_what_the_learner_trains_and_the_reference_is_the_base(whole):
    for line in runs.steps(whole):
        assert line["compiles"] == 0 and line["policy/updates"] == 1
        assert line["mismatch/max"] < 1e-5
    first, second = runs.steps(whole)
    assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-5)  # later: carried groups too
    assert first["policy/kl_reference"] > 1e-4  # the SFT step has led away from the base
    assert second["policy/kl_reference"] != first["policy/kl_reference"]
    assert not (whole / "reference").exists()


def test_a_checkpoint_holds_the_adapter_and_the_mark_of_its_base(whole, base):
    before, after = (runs.state(whole, ALL, step=step) for step in (1, 3))
    names = {jax.tree_util.keystr(path, simple=True, separator=".")
             for path, _ in jax.tree_util.tree_leaves_with_path(after.train.params)}
    assert names == {f"blocks.{one}.{side}" for side in "ab" for one in (
        "attention.query", "attention.key", "attention.value", "attention.out",
        "mlp.gate", "mlp.up", "mlp.down")}
    jax.tree.map(lambda a, b: np.testing.assert_raises(
        AssertionError, np.testing.assert_array_equal, a, b),
        before.train.params, after.train.params)
    np.testing.assert_array_equal(after.base, base.mark)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(after.train))
    assert held < sum(leaf.nbytes for leaf in jax.tree.leaves(base.params))


def test_a_run_that_goes_on_has_the_same_numbers(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "copy" / "checkpoints" / str(step))
    assert runs.run(tmp_path / "copy", ALL) == command_line.DONE
    assert runs.exact(tmp_path / "copy") == runs.exact(whole)
    assert runs.sample_files(tmp_path / "copy") == runs.sample_files(whole)
    runs.assert_same_state(runs.state(tmp_path / "copy", ALL), runs.state(whole, ALL))


def test_an_adapter_is_not_taken_to_another_base(whole):
    other = setup.prepare(runs.configure(ALL | {"seed": 1}))
    told = r"another base model: blocks\.attention\.key, .* and 5 more are not the parameters"
    with pytest.raises(config.ConfigError, match=told):
        evaluate.checkpointed(other, str(whole), wanted=-1)
    manager = setup.checkpoint.open_manager(whole, keep=9)
    with pytest.raises(config.ConfigError, match=told):
        setup.first_state(other, manager)
    setup.checkpoint.close(manager)


def test_a_mark_changes_with_any_bit_and_not_with_how_parameters_are_split():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(8, 6)).astype("f4"), "b": np.ones(16, ml_dtypes.bfloat16)}
    marks = setup_adapter.fingerprint(tree)
    assert marks.dtype == np.uint32 and len(set(marks)) == 2

    def differ(**changed):
        return (setup_adapter.fingerprint(tree | changed) != marks).tolist()
    flipped = tree["a"].copy()
    flipped.view(np.uint32)[7, 5] ^= 1
    assert differ(a=flipped) == [True, False]
    swapped = tree["a"].copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    assert differ(a=swapped) == [True, False]
    assert differ(b=2 * tree["b"]) == [False, True]
    split = mesh_lib.put(tree, mesh_lib.batch_sharding(tiny.mesh(fsdp=4)))
    np.testing.assert_array_equal(setup_adapter.fingerprint(split), marks)


def test_what_is_exported_has_the_logits_of_what_was_trained(tmp_path, whole, parts, base):
    assert export.main([*FLAGS, f"--workdir={whole}", f"--out={tmp_path / 'out'}"]) == 0
    source = hf.open(tmp_path / "out")
    exported = tiny.gathered(parts.spec, hf.pieces(source, parts.spec))
    adapter = runs.state(whole, ALL).train.params
    wanted = test_update_adapter.plain_merged(mesh_lib.fetch(base.params), adapter)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), exported, wanted)
    _, evaluated = evaluate.checkpointed(parts, str(whole), wanted=-1)
    runs.assert_same_state(jax.tree.map(np.asarray, evaluated), exported)
    trained = tiny.full_logits(parts.spec, lora.attach(base.params, adapter, parts.cfg.lora),
                               TOKENS)
    np.testing.assert_allclose(tiny.full_logits(parts.spec, exported, TOKENS), trained, atol=1e-5)


def test_a_peft_folder_is_written_on_request_and_only_for_an_adapter(tmp_path, whole, capsys):
    out = tmp_path / "adapter"
    assert export.main([*FLAGS, f"--workdir={whole}", f"--out={out}", "--adapter=1",
                        "--checkpoint=2"]) == 0
    assert f"{out}: step 2, float32" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]
    told = json.loads((out / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (3, 6.0)
    with pytest.raises(config.ConfigError, match="--adapter=1: config.lora.rank is 0"):
        export.main([FLAGS[0], f"--workdir={whole}", f"--out={tmp_path / 'no'}", "--adapter=1"])


@pytest.mark.slow
def test_peft_computes_the_run_s_logits_from_the_folder(tmp_path, whole, parts, base):
    torch = torch_model.torch()
    peft = pytest.importorskip("peft", reason="peft is not installed")
    state = runs.state(whole, ALL)
    export.write_adapter(tmp_path / "adapter", state.train.params, parts, dtype="float32")
    model = peft.PeftModel.from_pretrained(
        torch_model.llama(parts.spec, mesh_lib.fetch(base.params)), tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    merged = setup_adapter.sampled(base, state.train.params)
    np.testing.assert_allclose(tiny.full_logits(parts.spec, merged, TOKENS), theirs, atol=1e-4)


@pytest.mark.slow
def test_frozen_parts_of_an_adapter_stay_and_a_reference_may_be_asked_for(tmp_path):
    plain = {"rl.steps": 0, "sft.steps": 1, "eval.every": 0}
    assert runs.run(tmp_path / "plain", plain) == command_line.DONE
    changes = ALL | {"sft.steps": 0, "rl.optimizer.freeze": ("*.a",),
                     "rl.optimizer.weight_decay": 0.1, "rl.optimizer.no_decay": ("*mlp*",),
                     "rl.reference": str(tmp_path / "plain"), "rollout.mode": "streaming"}
    assert runs.run(tmp_path / "run", changes) == command_line.DONE
    parts = setup.prepare(runs.configure(changes))
    before, after = setup.initial_trained(parts), runs.state(tmp_path / "run", changes).train.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        start = before
        for key in path:
            start = start[key.key]
        assert np.array_equal(leaf, start) == (path[-1].key == "a"), path
    assert runs.steps(tmp_path / "run")[0]["policy/kl_reference"] > 1e-4
    assert (tmp_path / "run" / "reference" / "rl").is_dir()


@pytest.mark.slow
def test_a_run_on_a_mesh_with_half_parameters_trains_its_adapter(tmp_path):
    changes = ALL | {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2,
                     "model.param_dtype": "bfloat16"}
    assert runs.run(tmp_path, changes) == command_line.DONE
    line = runs.steps(tmp_path)[-1]
    assert line["policy/grad_norm"] > 0 and line["compiles"] == 0
    parts = setup.prepare(runs.configure(changes))
    base = setup.open_base(parts)
    merged = setup_adapter.sampled(base, setup.initial_trained(parts))
    runs.assert_same_state(jax.tree.map(np.asarray, merged),
                           jax.tree.map(np.asarray, base.params))
    assert merged["blocks"]["mlp"]["up"].sharding == base.params["blocks"]["mlp"]["up"].sharding
