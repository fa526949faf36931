"""A field that is set where nothing reads it is refused; what it needs makes it accepted."""

import dataclasses

import pytest

from dapo_jax import config, config_checks, config_checks_effects, config_file

DYNAMIC = "dynamic_sampling"
FILES = {"task.name": "jsonl", "task.train_path": "x.jsonl"}
# What is set, and what has to be set with it to be read; {}: nothing, it is read by default.
TABLE = [
    *(({f"{phase}.optimizer.{name}": value}, {f"{phase}.optimizer.{other}": needed})
      for phase in ("sft", "rl") for name, value, other, needed in (
          ("end_factor", 0.1, "schedule", "linear"), ("end_factor", 0.1, "schedule", "cosine"),
          ("no_decay", ("*norm",), "weight_decay", 0.1))),
    *(({f"{phase}.packed_rows": 2}, {f"{phase}.packed_prompts": 64}) for phase in ("sft", "rl")),
    ({"rollout.in_flight": "drop"}, {"rollout.mode": "streaming"}),
    ({"rollout.reward_lag": 3}, {"rollout.mode": "streaming"}),
    ({"scoring.failure_reward": -1.0}, {"scoring.on_failure": "reward"}),
    ({"overlong.factor": 0.5}, {"overlong.cache": 4}),
    ({"lora.alpha": 8.0}, {"lora.rank": 4}),
    ({"lora.patterns": ("mlp.*",)}, {"lora.rank": 4}),
    ({"model.path": "folder"}, {"model.source": "folder"}),
    ({"model.preset": "qwen2.5-0.5b"}, {"model.source": "preset"}),
    ({"model.package": "some"}, {"model.source": "gguf"}),
    ({"tokenizer.path": "folder"}, {"tokenizer.kind": "folder"}),
    ({"tokenizer.path": "a.model"}, {"tokenizer.kind": "sentencepiece"}),
    ({"task.format": "gsm8k"}, FILES), ({"task.prompt_field": "question"}, FILES),
    ({"task.answer_field": "right"}, FILES), ({"task.answer_rule": "hashes"}, FILES),
    ({"task.demonstration_field": "solution"}, FILES), ({"task.eval_split": "dev"}, FILES),
    ({"task.train_split": "train[:5%]"}, FILES),
    ({"task.pass_rate_range": (0.1, 0.9)}, {"task.pass_rates": "rates.jsonl"}),
    ({"task.digits": 3}, {}), ({"task.spaced": True}, {}), ({f"{DYNAMIC}.carry_share": 0.25}, {}),
    *(({f"{phase}.optimizer.{name}": value}, {}) for phase in ("sft", "rl")
      for name, value in (("b1", 0.8), ("b2", 0.9), ("eps", 1e-6))),
    *(({f"{DYNAMIC}.predictor.{name}": value}, {}) for name, value in (
        ("eager", True), ("alpha", 2.0), ("gamma", 0.5), ("ratio1", 1.1), ("ratio2", 1.1),
        ("q", 1.2))),
    ({f"{DYNAMIC}.predictor.round_cost": 5.0, f"{DYNAMIC}.predictor.prompt_cost": 1.0},
     {f"{DYNAMIC}.predictor.kind": "cost_optimal"}),
    *(({f"{DYNAMIC}.budget.{name}": value}, {f"{DYNAMIC}.budget.kind": kind})
      for name, value, kinds in (
          ("tau", 0.8, ("hard_more",)), ("least", 5, ("hard_more", "allocate")),
          ("most", 20, ("hard_more", "successive", "allocate")),
          ("first", 3, ("screening", "successive")), ("stages", 2, ("screening",)),
          ("each", 3, ("successive",))) for kind in kinds),
    ({f"{DYNAMIC}.choice.skip_growth": 0.4}, {f"{DYNAMIC}.choice.kind": "skip"}),
    ({f"{DYNAMIC}.choice.skip_most": 0.4}, {f"{DYNAMIC}.choice.kind": "skip"}),
    ({f"{DYNAMIC}.choice.target": 0.4}, {f"{DYNAMIC}.choice.kind": "difficulty"}),
    ({f"{DYNAMIC}.choice.longest_gap": 9}, {f"{DYNAMIC}.choice.kind": "difficulty"}),
    ({"select.ngram": 2}, {"select.strategies": (("diverse", 2),)}),
    ({"select.strata": 2}, {"select.strategies": (("length_strata", 2),)}),
    ({"buffer.max_age": 2}, {"buffer.capacity": 8, "buffer.replay": 4}),
    ({"buffer.evict": "random"}, {"buffer.capacity": 8, "buffer.replay": 4}),
    ({"buffer.evict": "random"}, {"select.strategies": (("capacity", 2),)}),
]
# Read by default, and not with what is set beside them.
UNREAD = [
    *(({f"{phase}.optimizer.{name}": value}, {f"{phase}.optimizer.name": "adafactor"})
      for phase in ("sft", "rl") for name, value in (("b1", 0.8), ("b2", 0.9), ("eps", 1e-6))),
    *(({f"{DYNAMIC}.predictor.{name}": value}, {f"{DYNAMIC}.predictor.kind": kind})
      for kind in ("fixed", "cost_optimal") for name, value in (
          ("eager", True), ("alpha", 2.0), ("gamma", 0.5), ("ratio1", 1.1), ("ratio2", 1.1),
          ("q", 1.2))),
    ({f"{DYNAMIC}.carry_share": 0.25}, {f"{DYNAMIC}.carry_steps": 0}),
    ({"select.ngram": 2}, {"select.strategies": (("diverse", 2),), "select.features": "hidden"}),
    ({"task.digits": 3}, FILES), ({"task.spaced": True}, FILES),
]


def checked(*changes):
    values = config.default()
    for one in changes:
        values.update_from_flattened_dict(one)
    return config_checks.from_dict(values)


def names(rows):
    return [" ".join([*one, *other]) for one, other in rows]


@pytest.mark.parametrize("field, needed", TABLE, ids=names(TABLE))
def test_a_field_is_accepted_with_what_it_needs(field, needed):
    checked(field, needed)


@pytest.mark.parametrize("field, beside", [
    *((one, {}) for one, needed in TABLE if needed), *UNREAD], ids=names(
        [*((one, {}) for one, needed in TABLE if needed), *UNREAD]))
def test_a_field_that_nothing_reads_is_refused_with_what_to_set(field, beside):
    with pytest.raises(config.ConfigError, match="has no effect with config.* or leave") as error:
        checked(field, beside)
    assert f"config.{next(iter(field))} = " in str(error.value)


def test_every_rule_is_tried_here_and_names_fields_that_there_are():
    known = set(config_file.field_names())
    ruled = {name for need in config_checks_effects.NEEDS for name in (*need.fields, need.of)}
    assert ruled <= known
    tried = {name for one, _ in (*TABLE, *UNREAD) for name in one}
    assert {name for need in config_checks_effects.NEEDS for name in need.fields} == tried


def test_defaults_beside_any_setting_are_no_fault():
    for name, value in (("rl.optimizer.name", "adafactor"), ("rollout.mode", "streaming"),
                        (f"{DYNAMIC}.predictor.kind", "fixed"), (f"{DYNAMIC}.carry_steps", 0)):
        assert dataclasses.is_dataclass(checked({name: value}))
