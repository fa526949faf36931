"""Published layouts: hand-made files in them give the problems and answers a person reads there."""

import json

import pytest
from conftest import ROOT

from dapo_jax import config
from dapo_jax.data import formats, sources

CASES = ROOT / "tests" / "cases"


def load(name, path=None, **changes):
    path = str(path or CASES / f"{name}.jsonl")
    task = config.Task(name="math", format=name, train_path=path, eval_path=path,
                       **{"train_size": 0, **changes})
    return sources.load(config.Config(task=task), "train")


@pytest.mark.parametrize("name, answers", [
    ("gsm8k", ["31", "62,400", "-7", "2.25"]), ("math", ["7", "\\frac{7}{12}", "8"]),
    ("math500", ["\\{-2, 2\\}", "4"]), ("aime", ["401", "10", "032"])])
def test_published_layouts_give_question_and_final_answer(name, answers):
    records, counts = load(name)
    rows = [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text().splitlines()]
    texts = [next(row[key] for key in ("question", "problem", "Problem") if key in row)
             for row in rows]
    assert [record["answer"] for record in records] == answers
    assert [record["prompt"] for record in records] == texts
    assert all(record["dataset"] == name for record in records)
    assert not any(counts.values())


def test_the_published_dapo_file_repeats_its_rows_and_each_is_used_once():
    records, counts = load("dapo", CASES / "dapo.parquet")
    assert [record["answer"] for record in records] == ["7", "8", "100"]
    assert [record["extra_info"]["index"] for record in records] == ["a-1", "a-2", "a-3"]
    assert all(record["prompt"][0]["role"] == "user" for record in records)
    assert "What is its side?" in records[0]["prompt"][0]["content"]
    assert counts["duplicates"] == 6


def test_a_solution_that_the_answer_is_taken_from_is_kept_and_may_be_the_demonstration():
    records, _ = load("gsm8k", demonstration_field="answer")
    assert records[0]["solution"] == records[0]["demonstration"]
    assert records[0]["solution"].endswith("#### 31")
    assert "demonstration" not in load("gsm8k")[0][0]


@pytest.mark.parametrize("text, answer", [
    ("so #### 5", "5"), ("#### 1\n#### $2,000", "$2,000"), ("a ####", None), ("a", None),
    ("#### ", None)])
def test_an_answer_after_hashes_is_what_follows_the_last(text, answer):
    assert formats.RULES["hashes"](text) == answer


@pytest.mark.parametrize("text, answer", [
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\boxed{5}. Wait, \\boxed{7}", "7"),
    ("\\fbox{ a b }", "a b"), ("\\boxed{1} then \\boxed{2", "1"), ("\\boxed{\\{1\\}}", "\\{1\\}"),
    ("\\boxed{\\}}", "\\}"), ("thus $\\boxed 9$.", "9"), ("\\boxed{}", None), ("none", None),
    ("\\boxed{a\\\\}", "a\\\\")])
def test_an_answer_in_a_box_is_in_the_last_balanced_one(text, answer):  # B73
    assert formats.RULES["boxed"](text) == answer


def test_a_long_solution_of_open_boxes_takes_no_long_time():
    assert formats.RULES["boxed"]("\\boxed{" * 20_000) is None


ROW = {"a": {"b": {"c": "deep"}, "n": 3}, "a.n": "flat", "x": None}


@pytest.mark.parametrize("path, value", [
    ("a.b.c", "deep"), ("a.n", "flat"), ("no|a.b.c", "deep"), ("no|x", None),
    ("a.b.c.d", formats.ABSENT), ("no|a.no", formats.ABSENT), ("x.y", formats.ABSENT)])
def test_fields_are_found_by_path_and_by_choice(path, value):
    assert formats.find(ROW, path) is value or formats.find(ROW, path) == value


def test_rows_lacking_a_field_of_the_layout_name_it_by_its_path(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "p", "reward_model": {"style": "rule"}}\n'
                    '{"prompt": "p", "reward_model": {"ground_truth": null}}\n'
                    '{"reward_model": {"ground_truth": "1"}}')
    with pytest.raises(config.ConfigError) as caught:
        load("dapo", path)
    lines = str(caught.value).splitlines()
    assert f"{path}, line 1: it has no 'reward_model.ground_truth'" == lines[1]
    assert "line 2: 'reward_model.ground_truth' is a NoneType" in lines[2]
    assert "line 3: it has no 'prompt'" in lines[3]


def test_a_solution_without_its_mark_is_a_bad_row(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "q", "answer": "no mark"}\n')
    with pytest.raises(config.ConfigError, match="line 1: 'answer' does not end in an answer"):
        load("gsm8k", path)


def test_a_parquet_file_of_another_layout_is_refused_once_with_its_columns():
    with pytest.raises(config.ConfigError, match="no column 'question'; it has: data_source, pro"):
        load("gsm8k", CASES / "dapo.parquet")


def test_parquet_numbers_that_are_nan_are_no_answers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["a", "b"], "answer": [1.5, float("nan")]}), path)
    with pytest.raises(config.ConfigError, match="row 2: 'answer' is nan"):
        load("fields", path)
