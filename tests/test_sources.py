"""JSON Lines files with every fault named, and held-out rows."""

import dataclasses
import json

import pytest

from dapo_jax import config
from dapo_jax.data import sources

GOOD = '{"prompt": "1+1=", "answer": "2"}'


@pytest.fixture
def write(tmp_path):
    def write(content, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)
    return write


def read(path, on_bad="error", **changes):
    """All records of a file that need no training file beside them, and the counts."""
    task = config.Task(train_path=path, eval_path=path, bad_records=on_bad,
                       **{"name": "jsonl", "train_size": 0, **changes})
    return sources.load(config.Config(task=task), "train")


def message(path, **changes):
    with pytest.raises(config.ConfigError) as caught:
        read(path, **changes)
    return str(caught.value)


FAULTY = "\n".join([GOOD, GOOD.replace("2", "3"), '{"prompt": ', '{"prompt": "3+3="}',
                    '{"prompt": "", "answer": "1"}'])


def test_bad_records_are_named_by_file_line_and_key(write):  # B61
    path = write(FAULTY)
    lines = message(path).splitlines()
    assert lines[0] == "3 bad lines:"
    assert [line.split(":")[0] for line in lines[1:4]] == [f"{path}, line {n}" for n in (3, 4, 5)]
    assert "JSON" in lines[1]
    assert "'answer'" in lines[2] and "'prompt'" not in lines[2]
    assert "'prompt' is empty" in lines[3]


def test_bad_records_are_skipped_and_still_named_if_asked(write, caplog):  # B61
    path = write(FAULTY)
    records, counts = read(path, on_bad="skip")
    assert [record["answer"] for record in records] == ["2", "3"]
    assert counts["bad"] == 3
    (told,) = (record.getMessage() for record in caplog.records)
    assert [line.split(":")[0] for line in told.splitlines()[1:]] == [
        f"{path}, line {n}" for n in (3, 4, 5)]


@pytest.mark.parametrize("line, words", [
    ("[1]", "list, not an object: a line is one record"), ("3", "int, not an object"),
    ('{"prompt": 3, "answer": "1"}', "'prompt' is a int"),
    ('{"prompt": null, "answer": "1"}', "'prompt' is a NoneType"),
    ('{"prompt": "  ", "answer": "1"}', "'prompt' is empty"),
    ('{"prompt": [], "answer": "1"}', "'prompt' holds no message of the user"),
    ('{"prompt": [{"role": "user", "content": "p"}, {"role": "user"}], "answer": "1"}',
     "message 2 of 'prompt' is no object with the texts 'role' and 'content'"),
    ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}', "message 1"),
    ('{"prompt": "p", "answer": ["1"]}', "'answer' is a list"),
    ('{"prompt": "p", "answer": true}', "'answer' is a bool"),
    ('{"prompt": "p", "answer": null}', "'answer' is a NoneType"),
    ('{"prompt": "p", "answer": ""}', "'answer' is empty"),
    ('{"prompt": "p", "answer": NaN}', "NaN"),
    ('{"prompt": "p", "answer": 1e999}', "'answer' is inf"),
    ('{"other": 1}', "'prompt' and no 'answer'"),
    ('{"prompt": "p", "answer": "1", "demonstration": 1}', "'demonstration' is a int"),
    ('{"prompt": "\\ud800", "answer": "1"}', "surrogates"),
    ("[" * 100_000, "JSON"), ('{"prompt": "p", "answer": ' + "1" * 5000 + "}", "JSON"),
])
def test_each_kind_of_bad_line_is_explained(write, line, words):
    found = message(write(f"{GOOD}\n{line}\n"))
    assert "line 2: " in found and words in found


UNUSABLE = "\n".join([GOOD, '{"prompt": "p", "answer": "1/0"}', '{"prompt": "q", "answer": "?"}',
                      '{"prompt": "r", "answer": "work \\\\boxed{ }"}'])


@pytest.mark.parametrize("name", ["math", "jsonl"])
def test_a_right_answer_that_cannot_be_used_is_a_bad_line(write, name, caplog):
    path = write(UNUSABLE)
    lines = message(path, name=name).splitlines()
    assert [line.split(":")[0] for line in lines[1:4]] == [f"{path}, line {n}" for n in (2, 3, 4)]
    assert all(words in line for words, line in zip(("by zero", "empty", "box"), lines[1:4]))
    records, counts = read(path, on_bad="skip", name=name)
    assert [record["answer"] for record in records] == ["2"] and counts["bad"] == 3
    assert f"{path}, line 2" in caplog.text


def test_what_another_reward_makes_of_answers_is_for_it_to_say(write):
    records, counts = read(write(UNUSABLE), name="math", reward="my:own")
    assert len(records) == 4 and counts["bad"] == 0


def test_held_out_files_can_be_read_without_a_training_file(write):
    task = config.Task(name="jsonl", eval_path=write(GOOD))
    assert len(sources.load(config.Config(task=task), "eval")[0]) == 1
    with pytest.raises(config.ConfigError, match="train_path is empty"):
        sources.load(config.Config(task=task), "train")


def test_a_line_that_is_not_utf8_is_named(write):
    assert "line 2: it is not UTF-8" in message(write(GOOD.encode() + b"\n\xff\xfe\n"))
    assert "no usable record" in message(write(GOOD.encode("utf-16")), on_bad="skip")


def test_twenty_bad_lines_are_listed_and_the_rest_counted(write):
    lines = message(write("\n".join(["x"] * 33))).splitlines()
    assert lines[0] == "33 bad lines:"
    assert sum(", line " in line for line in lines) == 20
    assert "and 13 more" in lines


def test_numbers_are_answers_and_other_fields_are_kept(write):
    path = write('{"q": "p", "a": 3, "tests": [1]}\n{"q": "r", "a": 0.5}\n')
    found = [{key: value for key, value in record.items() if key != "prompt_key"}
             for record in read(path, prompt_field="q", answer_field="a")[0]]
    assert found == [
        {"q": "p", "a": 3, "tests": [1], "prompt": "p", "answer": "3", "dataset": "data"},
        {"q": "r", "a": 0.5, "prompt": "r", "answer": "0.5", "dataset": "data"}]


def test_windows_line_ends_blank_lines_a_bom_and_odd_separators_are_read(write):
    odd = '{"prompt": "a\u2028b", "answer": "1"}'
    content = b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \n{odd}\r\nx".encode()
    records, counts = read(write(content), on_bad="skip")
    assert [record["prompt"] for record in records] == ["1+1=", "a\u2028b"]
    assert counts["bad"] == 1
    assert "line 5: " in message(write(content))


def test_the_limit_counts_good_lines_that_differ(write):
    path = write("x\n" + rows([1, 1, 2]) + "y\n" + rows([3]))
    records, counts = read(path, on_bad="skip", train_size=2)
    assert [record["answer"] for record in records] == ["1", "2"]
    assert counts == {"bad": 2, "outside where": 0, "duplicates": 1, "beyond limit or share": 1}


def test_files_that_cannot_be_used_are_named(write, tmp_path):
    for path in (str(tmp_path / "none.jsonl"), str(tmp_path), write(""), write("\n \n")):
        assert path in message(path)
    assert "line 1" in message(write("x"), on_bad="skip")


def settings(train, held_out="", **changes):
    return config.Config(
        task=config.Task(name="jsonl", train_path=train, eval_path=held_out,
                         **{"template": "Q{prompt}", **changes}),
        eval=config.Evaluation(prompts=4))


def rows(numbers):
    return "".join(json.dumps({"prompt": f"p{n}", "answer": n}) + "\n" for n in numbers)


def prompts(cfg, split):
    return [record["prompt"] for record in sources.load(cfg, split)[0]]


def test_held_out_rows_are_never_trained_on_and_do_not_move_with_the_order(write):
    cfg = settings(write(rows([*range(20), *range(20)])))
    train, held_out = prompts(cfg, "train"), prompts(cfg, "eval")
    assert len(held_out) == len(set(held_out)) == 4
    assert len(train) == 16
    assert {*train, *held_out} == {f"Qp{n}" for n in range(20)}
    assert not {*train} & {*held_out}
    shuffled = settings(write(rows([*range(19, -1, -1)]), "other.jsonl"), template="{prompt}")
    assert {f"Q{text}" for text in prompts(shuffled, "eval")} == {*held_out}


def test_a_held_out_prompt_with_two_answers_is_asked_once(write):
    cfg = settings(write(rows(range(20)) + rows(range(20)).replace('r": ', 'r": 1')))
    assert len(prompts(cfg, "eval")) == len(set(prompts(cfg, "eval"))) == 4
    assert len(prompts(cfg, "train")) == 32


def test_prompts_may_hold_messages_the_users_last_of_which_gets_the_template(write):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines = [json.dumps({"chat": [*talk[:-1], {**talk[-1], "content": str(n)}, talk[2]],
                         "answer": n}) for n in range(9)]
    cfg = settings(write("\n".join(lines)), prompt_field="chat")
    train, held_out = prompts(cfg, "train"), prompts(cfg, "eval")
    assert (len(train), len(held_out)) == (5, 4)
    assert sorted(p[3]["content"] for p in train + held_out) == [f"Q{n}" for n in range(9)]
    assert all(p[:3] == talk[:3] and p[4:] == talk[2:3] for p in train + held_out)


def test_the_training_limit_does_not_change_what_is_held_out(write):
    path = write(rows(range(20)))
    short = settings(path, train_size=3)
    assert prompts(short, "eval") == prompts(settings(path), "eval")
    assert prompts(short, "train") == prompts(settings(path), "train")[:3]


def test_too_few_rows_to_hold_out_are_refused_with_the_numbers(write):
    with pytest.raises(config.ConfigError, match=r"4 different prompts.*eval.prompts = 4"):
        sources.load(settings(write(rows([0, 1, 2, 3, 3]))), "train")


def test_files_of_their_own_give_each_split_its_rows(write):
    cfg = settings(write(rows(range(3))), write(rows(range(10, 20)), "eval.jsonl"))
    assert prompts(cfg, "train") == ["Qp0", "Qp1", "Qp2"]
    assert prompts(cfg, "eval") == ["Qp10", "Qp11", "Qp12", "Qp13"]


def test_skipped_lines_are_counted_and_told(write, caplog):
    cfg = settings(write(rows(range(9)) + "x\n"), bad_records="skip")
    assert sources.load(cfg, "train")[1]["bad"] == 1
    assert "line 10" in caplog.text


def test_arithmetic_is_loaded_by_name_and_an_unknown_task_is_refused():
    cfg = config.Config(task=config.Task(train_size=7))
    assert len(sources.load(cfg, "train")[0]) == 7
    assert len(sources.load(cfg, "eval")[0]) == cfg.eval.prompts
    unknown = dataclasses.replace(cfg, task=config.Task(name="chess"))
    with pytest.raises(config.ConfigError, match="chess.*arithmetic, .*jsonl"):
        sources.load(unknown, "train")
    with pytest.raises(config.ConfigError, match="train_path"):
        sources.load(settings(""), "eval")
    with pytest.raises(ValueError, match="test"):
        sources.load(cfg, "test")
