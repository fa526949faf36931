"""The configured tokenizer, and what a run is prepared with from it."""

import json

import pytest
import vocabularies

from dapo_jax import config, setup
from dapo_jax.text import load

SPOKEN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_configuration_chooses_the_kind(tmp_path):
    path = str(vocabularies.folder(tmp_path, "sentencepiece"))
    model = path + "/tokenizer.model"
    size = load.tokenizer(config.Tokenizer(kind="sentencepiece", path=model)).vocab_size
    assert load.tokenizer(config.Tokenizer(alphabet="xy")).vocab_size == 3
    assert load.tokenizer(config.Tokenizer(kind="bytes")).vocab_size == 257
    assert load.tokenizer(config.Tokenizer(kind="gguf"),
                          metadata=vocabularies.metadata()).vocab_size == 262
    assert load.tokenizer(config.Tokenizer(kind="folder", path=path)).vocab_size == size
    assert load.tokenizer(config.Tokenizer(kind="folder"), model_folder=path).vocab_size == size


def test_what_is_not_there_is_refused_by_field(tmp_path):
    for kind, named in (("gguf", "model.source"), ("folder", "tokenizer.path"),
                        ("sentencepiece", "cannot read the tokenizer ''")):
        with pytest.raises(config.ConfigError, match=named):
            load.tokenizer(config.Tokenizer(kind=kind))
    with pytest.raises(config.ConfigError, match="chat_template: cannot read .*none.jinja"):
        load.tokenizer(config.Tokenizer(chat_template=str(tmp_path / "none.jinja")))


def test_the_configurations_template_comes_before_the_folders(tmp_path):
    path = str(vocabularies.folder(tmp_path, "bytes", chat_template="theirs"))
    (tmp_path / "mine.jinja").write_text("from a file")
    for given, used in (("", "theirs"), (SPOKEN, SPOKEN),
                        (str(tmp_path / "mine.jinja"), "from a file")):
        cfg = config.Tokenizer(kind="folder", path=path, chat_template=given)
        assert load.tokenizer(cfg).chat_template == used


def test_a_run_is_prepared_with_chats_stops_and_a_vocabulary_as_large_as_the_model(tmp_path):
    path = str(vocabularies.folder(tmp_path, "metaspace", chat_template=(
        "{{ bos_token }}<|im_start|>{{ messages[0].content }}<|im_end|>"
        "<|im_start|>{% if messages[1] %}{{ messages[1].content + eos_token }}{% endif %}")))
    lines = [json.dumps({"prompt": f"{n}+1", "answer": "2", "demonstration": "this is 2"})
             for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    parts = setup.prepare(config.Config(
        model=config.Model(source="preset", preset="qwen2.5-0.5b"),
        tokenizer=config.Tokenizer(kind="folder", path=path),
        task=config.Task(name="jsonl", train_path=str(tmp_path / "data.jsonl"), chat=True),
        rollout=config.Rollout(stop=("<|im_end|>", "\t", " is a"), max_new_tokens=16),
        prompts=config.PromptLimits(buckets=(32,)), eval=config.Evaluation(prompts=2),
        rl=config.Phase(steps=1, prompts_per_step=2)))
    kind, table = parts.tokenizer, parts.train_table
    assert kind.vocab_size == parts.spec.vocab > 150_000
    assert parts.stop_ids == (4, kind.spelled.index(b"\t"), 2)
    assert parts.stop_texts == ("\t", " is a")
    for tokens, record in zip(table.tokens, table.records):
        assert tokens[:2].tolist() == [1, 3] and tokens[-2:].tolist() == [4, 3]
        assert kind.decode(tokens) == record["prompt"][15:-22]
    for tokens in table.demonstrations:
        assert kind.decode(tokens) == "this is 2" and tokens[-1] == 2
    assert len(table) == 4 and len(parts.eval_table) == 2
