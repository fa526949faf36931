"""What is written, transformers loads, and reading it again gives what was written."""

import json
import os

import gguf_files
import hf_models
import jax
import numpy as np
import pytest
import tiny
import vocabularies

from dapo_jax import config, config_checks, export, setup, types
from dapo_jax.models import hf
from dapo_jax.runtime import checkpoint
from dapo_jax.runtime import mesh as mesh_lib

TOKENS = np.random.default_rng(3).integers(0, 19, (2, 12)).astype(np.int32)


def settings(**fields):
    values = config.default()
    values.task.train_size, values.eval.prompts = 20, 4
    values.rl.prompts_per_step = 4
    for name, value in fields.items():
        section, field = name.split("__")
        values[section][field] = value
    return config_checks.from_dict(values)


def small(**fields):
    return settings(model__layers=2, model__d_model=16, model__heads=2, model__kv_heads=1,
                    model__head_size=8, model__ff=24, **fields)


def run(cfg, seed=0):
    """Parts of a run, and parameters that are none it would start from."""
    parts = setup.prepare(cfg)
    params = setup.initial_params(parts)
    rng = np.random.default_rng(seed)
    noise = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype) / 8, params)
    return parts, mesh_lib.fetch(jax.jit(lambda a, b: jax.tree.map(lambda x, y: x + y, a, b))(
        params, noise))


def load(folder):
    return hf_models.library().AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager").eval()


def same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def read(folder):
    source = hf.open(folder)
    spec = hf.spec(source)
    return spec, tiny.gathered(spec, hf.pieces(source, spec))


# ------------------------------------------------------------------------------- from scratch


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_scratch_is_a_llama_that_transformers_loads(tmp_path, tied):
    parts, params = run(small(model__tied=tied))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    theirs = load(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    np.testing.assert_allclose(tiny.full_logits(parts.spec, params, TOKENS),
                               hf_models.logits(theirs, TOKENS), atol=1e-4)
    assert theirs.generation_config.eos_token_id == list(parts.stop_ids)
    spec, again = read(tmp_path / "out")
    assert spec == parts.spec
    same(again, params)


@pytest.mark.parametrize(("kind", "text"), [
    ("characters", "12+(3*4)=\n 7"), ("bytes", "12+3= Zoë \U0001f600\n\x00\t")])
def test_its_tokenizer_is_one_of_transformers_with_the_same_ids(tmp_path, kind, text):
    parts, params = run(small(tokenizer__kind=kind))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    theirs = hf_models.library().AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(theirs) == parts.tokenizer.vocab_size
    assert theirs.eos_token_id == parts.tokenizer.stop_ids[0]
    ids = parts.tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
    assert theirs.decode([*ids, theirs.eos_token_id], skip_special_tokens=True) == text


def test_the_letters_of_all_bytes_are_those_of_the_library():
    letters, _ = export._bytes()
    for byte in range(128):
        assert letters.encode(chr(byte)).ids == [byte]
    assert letters.encode("ÿ\U0010ffff").ids == list("ÿ\U0010ffff".encode())


# --------------------------------------------------------------------------------- from a folder


@pytest.fixture(scope="module", params=hf_models.NAMES)
def folder(request, tmp_path_factory):
    made = hf_models.model(request.param, num_hidden_layers=3)
    made.generation_config.temperature = 0.6
    made.generation_config.do_sample = True
    path = hf_models.save(made, tmp_path_factory.mktemp(request.param) / "source")
    (path / "LICENSE").write_text("terms")
    return path, made


def test_in_and_out_and_in_again_is_identical(folder, tmp_path):
    path, made = folder
    parts = setup.prepare(settings(model__source="folder", model__path=str(path)))
    params = mesh_lib.fetch(setup.initial_params(parts))
    export.write(tmp_path / "out", params, parts, dtype="float32", largest=20_000)
    spec, first = read(path)
    again, second = read(tmp_path / "out")
    assert again == spec
    same(second, first)
    same(second, params)
    theirs = load(tmp_path / "out")
    np.testing.assert_array_equal(hf_models.logits(theirs, TOKENS), hf_models.logits(made, TOKENS))
    for name, value in made.state_dict().items():
        np.testing.assert_array_equal(theirs.state_dict()[name].numpy(), value.numpy())
    assert theirs.generation_config.temperature == 0.6
    assert hf.json_file(tmp_path / "out" / "config.json") == hf.json_file(path / "config.json")


def test_a_trained_folder_gives_transformers_the_trained_logits(folder, tmp_path):
    path, made = folder
    parts, params = run(settings(model__source="folder", model__path=str(path)))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    got = hf_models.logits(load(tmp_path / "out"), TOKENS)
    np.testing.assert_allclose(tiny.full_logits(parts.spec, params, TOKENS), got, atol=1e-4)
    assert np.abs(got - hf_models.logits(made, TOKENS)).max() > 0.1


@pytest.mark.parametrize(("fields", "dtype"), [({}, "float32"),
                                               ({"model__param_dtype": "bfloat16"}, "bfloat16")])
def test_the_type_of_the_weights_is_the_source_s_or_else_the_run_s(tmp_path, fields, dtype):
    parts, params = run(small(**fields))
    assert export._dtype(parts) == dtype
    export.write(tmp_path / "half", params, parts, dtype="float16")
    from_half = settings(model__source="folder", model__path=str(tmp_path / "half"), **fields)
    assert export._dtype(setup.prepare(from_half)) == "float16"


def test_files_of_the_source_s_tokenizer_are_copied(tmp_path):
    source = hf_models.save(hf_models.model("llama"), tmp_path / "source")
    plain, params = run(small())
    export.write(tmp_path / "tokenizer", params, plain, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).rename(source / name)
    (source / "LICENSE").write_text("terms")
    parts, params = run(settings(model__source="folder", model__path=str(source),
                                 tokenizer__kind="folder"))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


# ---------------------------------------------------------------------- from other tokenizer files


def test_a_gguf_file_s_tokenizer_and_weights_become_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_JAX_CACHE", str(tmp_path / "cache"))
    tokenizer = vocabularies.metadata("llama-bpe")
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in tokenizer.items()}
    rng = np.random.default_rng(0)
    tensors = gguf_files.source() | {
        f"{name}.weight": rng.normal(size=(len(keys["tokens"]), 32)).astype(np.float32)
        for name in ("token_embd", "output")}
    path = gguf_files.write(tmp_path / "model.gguf", tensors, tokenizer=keys)
    parts, params = run(settings(model__source="gguf", model__path=str(path),
                                 tokenizer__kind="gguf"))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    ids = parts.tokenizer.encode("he 12+3=")
    theirs = hf_models.library().AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("he 12+3=")["input_ids"] == ids
    np.testing.assert_allclose(tiny.full_logits(parts.spec, params, np.array([ids], np.int32)),
                               hf_models.logits(load(tmp_path / "out"), [ids]), atol=1e-4)


def test_a_sentencepiece_file_is_copied_with_what_transformers_needs_beside_it(tmp_path):
    (tmp_path / "any.model").write_bytes(vocabularies.sentencepiece_model())
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    parts, params = run(small(
        tokenizer__kind="sentencepiece", tokenizer__path=str(tmp_path / "any.model"),
        tokenizer__chat_template=template))
    export.write(tmp_path / "out", params, parts, dtype="float32")
    theirs = hf_models.library().AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("Hello  world 12+3=")["input_ids"] == parts.tokenizer.encode("Hello  world 12+3=")
    assert theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"


# ----------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    cfg = small()
    parts, params = run(cfg)
    state = setup.initial_state(parts)
    placed = mesh_lib.put(params, mesh_lib.param_shardings(parts.mesh, parts.spec))
    train = types.TrainState(placed, state.train.opt_state, state.train.updates)
    manager = checkpoint.open_manager(path, keep=2)
    for step in (1, 2):
        # Only the later step holds what is looked for.
        chosen = train if step == 2 else state.train
        checkpoint.save(manager, types.RunState(chosen, state.controller, state.demonstrations,
                                                state.buffer, np.asarray(step, np.int32)))
    checkpoint.close(manager)
    (path / "config.py").write_text(
        "from dapo_jax import config\n\n\ndef get_config():\n    c = config.default()\n"
        "    c.task.train_size, c.eval.prompts, c.rl.prompts_per_step = 20, 4, 4\n"
        "    c.model.layers, c.model.d_model, c.model.heads, c.model.kv_heads = 2, 16, 2, 1\n"
        "    c.model.head_size, c.model.ff = 8, 24\n    return c\n")
    return path, params


def command(workdir, out, *more):
    return export.main([f"--config={workdir / 'config.py'}", f"--workdir={workdir}",
                        f"--out={out}", *more])


def test_the_command_writes_the_newest_checkpoint_or_the_one_asked_for(workdir, tmp_path, capsys):
    path, params = workdir
    assert command(path, tmp_path / "new") == 0
    assert f"{tmp_path / 'new'}: step 2, float32" in capsys.readouterr().out
    same(read(tmp_path / "new")[1], params)
    command(path, tmp_path / "old", "--checkpoint=1")
    assert (read(tmp_path / "old")[1]["embedding"] != params["embedding"]).any()
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]  # nothing partial


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_command_rounds_when_asked(workdir, tmp_path, dtype):
    path, params = workdir
    command(path, tmp_path / "half", f"--dtype={dtype}")
    kind = export.hf_out.DTYPES[dtype]
    same(read(tmp_path / "half")[1],
         jax.tree.map(lambda leaf: leaf.astype(kind).astype(np.float32), params))
    values = json.loads((tmp_path / "half" / "config.json").read_text())
    assert values["torch_dtype"] == dtype


@pytest.mark.parametrize(("more", "match"), [
    (["--dtype=int8"], "--dtype=int8; allowed: auto, float32"),
    (["--checkpoint=7"], "no complete checkpoint of step 7"),
    (["--out="], "--out is missing")])
def test_what_cannot_be_written_is_refused(workdir, tmp_path, more, match):
    with pytest.raises(config.ConfigError, match=match):
        command(workdir[0], tmp_path / "out", *more)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(workdir, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(config.ConfigError, match="exists; name a new folder"):
        command(workdir[0], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_directory_without_a_checkpoint_is_refused(workdir, tmp_path):
    with pytest.raises(config.ConfigError, match="holds no complete checkpoint"):
        export.main([f"--config={workdir[0] / 'config.py'}", f"--workdir={tmp_path}",
                     f"--out={tmp_path / 'out'}"])
