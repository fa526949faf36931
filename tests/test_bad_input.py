"""Bad input is refused before the first compile, with one message that names what is at fault."""

import json
import subprocess
import sys

import pytest
import runs
from conftest import ROOT

from dapo_jax import command_line, config, config_file, evaluate, report, train
from dapo_jax.runtime import checkpoint, metrics

TINY = "tests/tiny_config.py"
LINE = (ROOT / TINY).read_text().splitlines().index("    c.rl.steps = 6") + 1
GOOD = '{"prompt": "1+1=", "answer": "2"}'
BAD = [GOOD, GOOD.replace("1+1", "1+2"), '{"prompt": ', '{"prompt": "3="}',
       '{"prompt": " ", "answer": "1"}']
JSONL = ("--config.task.name=jsonl", "--config.sft.steps=0", "--config.eval.prompts=1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with the files that the cases name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = (ROOT / TINY).read_text()
    files = {
        "tiny.py": tiny, "broken.py": tiny.replace("c.rl.steps = 6", "c.rl.steps = = 6"),
        "unknown.py": tiny.replace("c.rl.steps", "c.rl.stepz"),
        "wrong_type.py": tiny.replace("c.rl.steps = 6", 'c.rl.steps = "six"'),
        "raises.py": tiny.replace("c.rl.steps = 6", "c.rl.steps = 1 // 0"),
        "none.py": "x = 1\n", "other.py": "def get_config():\n    return {}\n", "text.txt": tiny,
        "config.json": "{}",
        "bad.jsonl": "\n".join(BAD), "empty.jsonl": "",
        "good.jsonl": "\n".join(GOOD.replace("1+1", f"{i}+1") for i in range(9)),
        "long.jsonl": "\n".join(GOOD.replace("1+1", f"{i}+1") for i in range(8, 12)),
        "one.gguf": "no gguf at all", "leaves.py": "import sys\nsys.exit(3)\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xe9", "answer": "1"}')
    return tmp_path


def _refused(main, arguments):
    """The one message of a refusal, which compiled nothing."""
    metrics.count_compiles()
    compiled = metrics.compile_count()
    with pytest.raises(config.ConfigError) as refusal:
        main(arguments)
    assert metrics.compile_count() == compiled
    assert str(refusal.value).strip()
    return str(refusal.value)


def _assert_says(message, words):
    for word in words if isinstance(words, tuple) else (words,):
        assert word in message


FILES = [
    ("missing.py", "--config=missing.py: there is no such file"),
    ("tyni.py", "--config=tyni.py: there is no such file; did you mean tiny.py"),
    (".", "--config=.: there is no such file"),
    ("text.txt", "--config=text.txt: not a .py file"),
    ("config.json", "not a .py file: it holds what a run was made of; name the .py file"),
    ("broken.py", (f"broken.py, line {LINE}", "SyntaxError")),
    ("unknown.py", f"unknown.py, line {LINE}: unknown field stepz; did you mean steps"),
    ("wrong_type.py", (f"wrong_type.py, line {LINE}", "six")),
    ("raises.py", (f"raises.py, line {LINE}", "ZeroDivisionError")),
    ("none.py", ("none.py", "get_config")),
    ("other.py", ("other.py", "get_config() must return a ConfigDict", "dict")),
]


@pytest.mark.parametrize("path, words", FILES)
def test_bad_configuration_files_are_refused(folder, path, words):
    _assert_says(_refused(train.main, [f"--config={path}", "--workdir=run"]), words)
    assert not (folder / "run").exists()


COMMANDS = [
    ("--config.rl.stepz=3", ("unknown field config.rl.stepz", "rl.steps")),
    ("--config.rl=3", "config.rl"),
    ("--config.rl.steps=three", ("rl.steps", "three")),
    ("--config.rl.steps=1.5", ("rl.steps", "1.5")),
    ("--config.rollout.temperature=0", ("config.rollout.temperature", "0.001")),
    ("--config.rollout.temperature=1e-300", ("config.rollout.temperature", "0.001")),
    ("--config.eval.temperature=inf", ("config.eval.temperature", "1000")),
    ("--config.seed=99999999999999999999", "config.seed"),
    ("--config.task.levels=3", "config.task.levels"),
    ("--config.task.levels=(1,2)", "config.task.levels"),
    ("--config.task.levels=((1,'x'),)", "config.task.levels"),
    ("--config.rollout.stop=(1,)", ("config.rollout.stop", "texts")),
    ("--config.scoring.failure_reward=nan", "config.scoring.failure_reward"),
    ("--config.scoring.timeout=1e300", "config.scoring.timeout"),
    ("--config.processes.late_seconds=1e300", ("config.processes.late_seconds", "1e+06")),
    ("--config.processes.late_seconds=0", "config.processes.late_seconds"),
    ("--config.dynamic_sampling.predictor.alpha=nan", "config.dynamic_sampling.predictor.alpha"),
    ("--config.task.digits=1000000", "config.task.digits"),
    ("--wrkdir=x", ("unknown flag --wrkdir; did you mean --workdir", "train --help")),
    ("--zzzz=x", ("unknown flag --zzzz (", "train --help")),
    ("surplus", "unexpected argument 'surplus'"),
    ("--config.model.source=hf", ("config.model.source", "hf", "scratch", "gguf")),
    ("--config.rl.algorithm.preset=dappo", ("config.rl.algorithm.preset", "dappo", "dapo")),
    ("--config.rl.algorithm.preset=sft", ("config.rl.algorithm.preset", "'sft'", "rollout")),
    ("--config.rl.algorithm.advantage=gae", ("config.rl.algorithm.advantage", "gae")),
    ("--config.rl.prompts_per_step=32 --config.rl.updates_per_step=5", ("32", "5", "6.4")),
    ("--config.rl.prompts_per_step=61", ("config.rl.prompts_per_step = 61", "only 60 prompts")),
    ("--config.rl.samples_per_prompt=1 --config.rl.algorithm.preset=grpo",
     ("rl.algorithm.advantage", "samples_per_prompt is 1")),
    ("--config.rl.samples_per_prompt=1", "samples_per_prompt is 1"),
    ("--config.sft.samples_per_prompt=2", ("config.sft.samples_per_prompt", "1")),
    ("--config.rl.steps=0 --config.sft.steps=0", ("config.sft", "config.rl", "all 0")),
    ("--config.rl.optimizer.schedule=linear --config.rl.optimizer.warmup_updates=6",
     ("warmup_updates is 6", "linear", "6 updates")),
    ("--config.rl.completion_buckets=(2,)", ("config.rl.completion_buckets", "4")),
    ("--config.lora.rank=-1", ("config.lora.rank", "-1", "at least 0")),
    ("--config.lora.alpha=1e300", ("config.lora.alpha", "1e+30")),
    ("--config.rl.optimizer.learning_rate=1e300", ("config.rl.optimizer.learning_rate", "1e+06")),
    ("--config.sft.optimizer.eps=1e-300", ("config.sft.optimizer.eps", "1e-30")),
    ("--config.rl.optimizer.weight_decay=-1", ("config.rl.optimizer.weight_decay", "from 0")),
    ("--config.select.strategies=(('length_strata',5),)",
     ("config.select.strategies", "5 samples", "'length_strata'", "at most 4")),
    ("--config.lora.patterns=()", ("config.lora.patterns", "tuple of texts")),
    ("--config.lora.rank=4 --config.lora.patterns=('mlp.upp',)",
     ("config.lora.patterns", "'mlp.upp'", "mlp.up, mlp.down")),
    ("--config.lora.rank=4 --config.rl.optimizer.freeze=('embedding',)",
     ("config.rl.optimizer.freeze", "'embedding'", "blocks.attention.key.a")),
    ("--config.rl.reference=nowhere --config.rl.algorithm.kl_coef=0.1",
     ("config.rl.reference = 'nowhere'", "no such folder", "work directory")),
    ("--config.mesh.data=5", ("config.mesh", "5 x 1 x 1", "4 are here")),
    ("--config.mesh.data=4 --config.mesh.fsdp=2", ("config.mesh", "4 x 2 x 1", "4 are here")),
    ("--config.mesh.tensor=0", ("config.mesh.tensor", "at least 1")),
    ("--config.mesh.fsdp=4 --config.rollout.slots=(2,6)", ("config.rollout.slots", "2, 6", "4")),
    ("--config.mesh.fsdp=4 --config.rl.microbatch_slots=6",
     ("config.rl.microbatch_slots", "6", "4")),
    ("--config.model.kv_heads=3", ("config.model.kv_heads", "3", "model.heads = 4")),
    ("--config.model.head_size=7", ("config.model.head_size", "even")),
    ("--config.rollout.stop=('x',)", ("config.rollout.stop", "'x'")),
    ("--config.task.template={prompt}?", ("'?'", "config.tokenizer.alphabet")),
    ("--config.tokenizer.alphabet=0012", ("config.tokenizer.alphabet", "'0'")),
    ("--config.overlong.cache=5", ("config.overlong.cache", "5", "max_new_tokens = 4")),
    ("--config.overlong.cache=-1", ("config.overlong.cache", "-1")),
    ("--config.overlong.factor=-1", ("config.overlong.factor", "-1")),
    ("--config.rollout.max_context=4", ("config.rollout.max_context = 4", "prompt")),
    ("--config.rollout.max_new_tokens=2 --config.sft.steps=1",
     ("demonstration", "3 tokens", "max_new_tokens")),
    ("--config.task.levels=((2,1.0),)", ("prompt of record 0", "6 tokens", "prompts.buckets")),
    ("--config.task.levels=()", "config.task.levels"),
    ("--config.task.train_size=0", "config.task.train_size"),
    ("--config.task.reward=no_such_module:f", ("no_such_module", "cannot import")),
    ("--config.task.reward=tests.run_rewards:od", ("run_rewards", "'od'", "odd")),
    ("--config.task.reward=odd", "module:function"),
    ("--config.task.reward=leaves:f", ("cannot import module 'leaves'", "SystemExit")),
    ("--config.task.train_path=good.jsonl", ("config.task.train_path", "jsonl", "arithmetic")),
    ("--config.task.options=(('max_terms',2),)", ("config.task.options", "reasoning_gym")),
    ("--config.task.name=jsonl --config.task.train_path=good.jsonl --config.task.shots=2",
     ("config.task.shots", "'jsonl' does not read")),
    ("--config.checkpoint.keep=0", ("checkpoint.keep", "at least 1")),
    ("--config.scoring.timeout=0", ("config.scoring.timeout", "0.001")),
    ("--config.eval.every=-1", ("config.eval.every", "-1")),
    ("--config.checkpoint.every=-2", ("config.checkpoint.every", "-2")),
    ("--config.task.name=jsonl", "config.task.train_path"),
    ("--config.model.source=gguf", ("config.model.path", "config.model.package")),
    ("--config.model.source=gguf --config.model.path=no.gguf", "no.gguf"),
    ("--config.model.source=gguf --config.model.path=one.gguf", ("one.gguf", "GGUF")),
    ("--config.model.source=gguf --config.model.package=no_such_package", "no_such_package"),
]


@pytest.mark.parametrize("flags, words", COMMANDS, ids=[flags for flags, _ in COMMANDS])
def test_bad_values_are_refused(folder, flags, words):
    arguments = ["--config=tiny.py", "--workdir=run", *flags.split()]
    _assert_says(_refused(train.main, arguments), words)
    assert not (folder / "run").exists()


DATA = [
    ("missing.jsonl", (), ("missing.jsonl", "No such file")),
    (".", (), ("'.'", "directory")),
    ("empty.jsonl", (), "empty.jsonl holds no usable record"),
    ("latin.jsonl", (), ("latin.jsonl, line 2", "UTF-8")),
    ("bad.jsonl", (), ("bad.jsonl, line 3: it is not valid JSON", "line 4: it has no 'answer'",
                       "line 5: 'prompt' is empty", "config.task.bad_records")),
    ("long.jsonl", (), ("'10+1='", "5 tokens, more than 4", "config.prompts.too_long")),
    ("long.jsonl", ("--config.prompts.buckets=(2,)", "--config.prompts.too_long=drop"),
     ("no prompt is left", "too_long")),
    ("good.jsonl", ("--config.task.eval_path=missing.jsonl",), ("missing.jsonl", "No such file")),
    ("good.jsonl", ("--config.eval.prompts=9",), ("good.jsonl", "9 different prompts")),
    ("good.jsonl", ("--config.sft.steps=2",), ("config.sft", "demonstration")),
]


@pytest.mark.parametrize("path, flags, words", DATA, ids=[f"{d[0]} {d[1]}" for d in DATA])
def test_bad_data_are_refused(folder, path, flags, words):
    arguments = ["--config=tiny.py", "--workdir=run", *JSONL, f"--config.task.train_path={path}"]
    _assert_says(_refused(train.main, [*arguments, *flags]), words)
    assert not (folder / "run").exists()


# --------------------------------------------------------------------------------- work directories


def test_a_directory_of_another_configuration_is_refused_and_left_alone(folder):
    run = folder / "run"
    run.mkdir()
    text = json.dumps(config.to_json(runs.configure({"seed": 3, "rl.optimizer.b1": 0.5})))
    (run / "config.json").write_text(text)
    message = _refused(train.main, ["--config=tiny.py", "--workdir=run"])
    _assert_says(message, ("run belongs to another configuration", "seed: 3 there, 0 now",
                           "rl.optimizer.b1: 0.5 there, 0.9 now"))
    assert message.count("there,") == 2
    assert [path.name for path in run.iterdir()] == ["config.json"]
    assert (run / "config.json").read_text() == text


@pytest.mark.parametrize("name, folder_there", [
    ("config.json", True), ("metrics.jsonl", True), ("checkpoints", False), ("samples", False)])
def test_a_directory_with_a_file_for_a_folder_or_the_reverse_is_refused(
        folder, name, folder_there):
    run = folder / "odd"
    run.mkdir()
    (run / name).mkdir() if folder_there else (run / name).write_text("")
    message = _refused(train.main, ["--config=tiny.py", "--workdir=odd"])
    _assert_says(message, (name, "folder"))


def test_checkpoints_without_their_configuration_are_refused(folder):
    (folder / "lost/checkpoints/4").mkdir(parents=True)
    message = _refused(train.main, ["--config=tiny.py", "--workdir=lost"])
    _assert_says(message, ("lost", "no config.json"))


def test_a_directory_in_use_is_refused(folder):
    (folder / "busy").mkdir()
    with checkpoint.sole_use(folder / "busy"):
        message = _refused(train.main, ["--config=tiny.py", "--workdir=busy"])
    _assert_says(message, ("busy", "another process"))


def test_a_directory_with_a_broken_configuration_is_refused(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text('{"seed": ')
    message = _refused(train.main, ["--config=tiny.py", "--workdir=run"])
    _assert_says(message, ("run/config.json is no JSON object", "remove it"))


@pytest.mark.parametrize("main, words", [
    (train.main, "cannot be written"), (evaluate.main, "no complete checkpoint")])
@pytest.mark.parametrize("workdir", ["text.txt", "text.txt/run"])
def test_a_file_as_work_directory_is_refused(folder, main, words, workdir):
    message = _refused(main, ["--config=tiny.py", f"--workdir={workdir}"])
    _assert_says(message, (f"--workdir={workdir}", words))


def test_a_work_directory_must_be_named(folder):
    _assert_says(_refused(train.main, ["--config=tiny.py"]), "--workdir is missing")
    _assert_says(_refused(train.main, ["--workdir=run"]), "--config=FILE is missing")


def test_evaluation_needs_a_checkpoint(folder):
    arguments = ["--config=tiny.py", "--workdir=run"]
    _assert_says(_refused(evaluate.main, arguments), ("run", "no complete checkpoint"))
    message = _refused(evaluate.main, [*arguments, "--checkpoint=7"])
    _assert_says(message, ("run", "no complete checkpoint"))
    assert not (folder / "run").exists()


def test_a_report_needs_metrics(folder, capsys):
    assert report.main(["nowhere"]) == command_line.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("error: nowhere/metrics.jsonl does not exist")
    assert not captured.out


# -------------------------------------------------------------------------------------- the process


@pytest.mark.parametrize("entry, flags, words", [
    ("train", ["--config.rl.stepz=3"], "unknown field config.rl.stepz"),
    ("evaluate", [], "no complete checkpoint")])
def test_a_refusal_is_one_message_and_exit_status_2(tmp_path, entry, flags, words):
    result = subprocess.run(
        [sys.executable, "-m", f"dapo_jax.{entry}", f"--config={TINY}",
         f"--workdir={tmp_path / 'run'}", *flags], cwd=ROOT, capture_output=True, text=True,
        timeout=400)
    assert result.returncode == command_line.BAD_INPUT
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert not result.stdout and not (tmp_path / "run").exists()


def test_help_names_every_field_and_leaves_with_0(capsys):
    with pytest.raises(SystemExit) as leaving:
        train.main(["--help"])
    assert leaving.value.code == command_line.DONE
    text = capsys.readouterr().out
    assert all(f"  {name} = " in text for name in config_file.field_names())
