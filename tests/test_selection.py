"""Which rows are used, against counting by hand; files of pass rates."""

import collections
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import config, config_checks
from dapo_jax.data import identity, selection, sources


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(path, prefix, count):
    return write(path, [{"prompt": f"{prefix}{n}", "answer": n, "level": n % 3}
                        for n in range(count)])


def settings(seed=0, **task):
    return config.Config(seed=seed, task=config.Task(name="math", **{"train_size": 0, **task}),
                         eval=config.Evaluation(prompts=4))


def texts(cfg, split="train"):
    return [record["prompt"] for record in sources.load(cfg, split)[0]]


@given(st.lists(st.sampled_from("abcde"), max_size=30))
def test_the_first_of_each_is_kept_in_order(items):
    digests = [identity.digest(item) for item in items]
    found = identity.first_of_each(identity.numbers(digests))
    assert [items[at] for at in found] == list(dict.fromkeys(items))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.data(), st.integers(0, 60))
def test_shares_hold_to_within_a_row_and_use_as_many_rows_as_there_can_be(sizes, data, limit):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    counts = selection.shares(np.array(sizes), weights, limit=limit)
    most = min(size * sum(weights) / weight for size, weight in zip(sizes, weights))
    total = min(most, limit) if limit else most
    assert abs(int(counts.sum()) - total) < 1 + 1e-6
    for count, size, weight in zip(counts, sizes, weights):
        assert 0 <= count <= size
        assert abs(count - total * weight / sum(weights)) <= 1 + 1e-6


def test_a_mixture_has_the_shares_of_its_weights_and_mixes_its_sources(tmp_path):
    several = tuple({"path": problems(tmp_path / f"{name}.jsonl", name, 60), "weight": weight}
                    for name, weight in (("a", 3.0), ("b", 1.0)))
    cfg = settings(train_sources=several, train_size=40, eval_path=several[0]["path"])
    found = texts(cfg)
    assert collections.Counter(text[0] for text in found) == {"a": 30, "b": 10}
    assert len(set(found)) == 40
    assert sum(x[0] != y[0] for x, y in zip(found, found[1:])) > 2  # not one after the other
    assert found == texts(cfg)
    other = texts(settings(seed=1, train_sources=several, train_size=40,
                           eval_path=several[0]["path"]))
    assert found != other and set(found) != set(other)


def test_a_mixture_without_weights_is_all_of_its_sources_each_with_fields_of_its_own(tmp_path):
    own = write(tmp_path / "own.jsonl", [{"q": f"q{n}", "sol": f"#### {n}"} for n in range(5)])
    cfg = settings(train_sources=(
        {"path": problems(tmp_path / "a.jsonl", "a", 7)},
        {"path": own, "name": "mine", "prompt_field": "q", "answer_field": "sol",
         "answer_rule": "hashes"}), eval_path=own, prompt_field="prompt|q",
        answer_field="answer|sol")
    records, _ = sources.load(cfg, "train")
    assert sorted((r["dataset"], r["prompt"], r["answer"]) for r in records) == sorted(
        [("a", f"a{n}", f"{n}") for n in range(7)] + [("mine", f"q{n}", f"{n}") for n in range(5)])


def test_held_out_prompts_of_a_mixture_come_from_all_of_it(tmp_path):
    cfg = settings(train_sources=tuple(
        {"path": problems(tmp_path / f"{name}.jsonl", name, 20)} for name in "ab"))
    train, held_out = texts(cfg), texts(cfg, "eval")
    assert len(held_out) == 4 and len(train) == 36 and not {*train} & {*held_out}


@pytest.mark.parametrize("source, words", [
    ({"weight": 1.0}, "a dict with a 'path'"), ({"path": "a", "fomat": "x"}, "mean format"),
    ({"path": "a", "format": "gsm"}, "allowed: fields, gsm8k"), ({"path": "a", "weight": -1}, "-1"),
    ({"path": "a.jsonl", "weight": float("nan")}, "nan"), ("a", "a dict with a 'path'"),
    ({"path": "a.jsonl", "prompt_field": 5}, "prompt_field is 5, not a text"),
    ({"path": "a.jsonl", "split": None}, "split is None, not a text")])
def test_a_bad_source_is_named_by_its_place(tmp_path, source, words):
    good = {"path": problems(tmp_path / "a.jsonl", "a", 3)}
    with pytest.raises(config.ConfigError) as caught:
        texts(settings(train_sources=(good, source)))
    assert "config.task.train_sources[1]" in str(caught.value) and words in str(caught.value)


def test_weights_of_some_sources_only_and_two_ways_to_name_files_are_refused(tmp_path):
    good = {"path": problems(tmp_path / "a.jsonl", "a", 3)}
    with pytest.raises(config.ConfigError, match="some have a weight"):
        texts(settings(train_sources=(good, {**good, "weight": 1.0})))
    with pytest.raises(config.ConfigError, match="both given"):
        texts(settings(train_sources=(good,), train_path=good["path"]))


def test_rows_are_filtered_by_values_of_a_field(tmp_path):
    path = problems(tmp_path / "a.jsonl", "a", 9)
    cfg = settings(train_path=path, eval_path=path, where=(("level", (0, 2)),))
    records, counts = sources.load(cfg, "train")
    assert [record["level"] for record in records] == [0, 2, 0, 2, 0, 2]
    assert counts["outside where"] == 3
    with pytest.raises(config.ConfigError, match="no usable record.*9 are left out.*where"):
        texts(settings(train_path=path, eval_path=path, where=(("level", (7,)),)))
    with pytest.raises(config.ConfigError, match="must hold pairs"):
        texts(settings(train_path=path, eval_path=path, where=(("level", 1),)))
    with pytest.raises(config.ConfigError, match="must hold pairs"):
        texts(settings(train_path=path, eval_path=path, where=(("level", ([3],)),)))


# -------------------------------------------------------------------------------------- pass rates


def rated(path, records, rate):
    return write(path, [{"prompt_key": sources.prompt_key(record), "pass_rate": rate(record)}
                        for record in records])


def test_prompts_outside_the_range_of_pass_rates_are_left_out_and_counted(tmp_path):
    path = problems(tmp_path / "a.jsonl", "a", 30)
    plain = settings(train_path=path, template="Q: {prompt}")
    records = sources.load(plain, "train")[0]
    rates = rated(tmp_path / "r.jsonl", records[:20], lambda record: int(record["answer"]) / 30)
    chosen = settings(train_path=path, pass_rates=rates, pass_rate_range=(0.2, 0.5),
                      template="{prompt} =")
    found, counts = sources.load(chosen, "train")
    wanted = [record["answer"] for record in records[:20] if 6 <= int(record["answer"]) <= 15]
    assert [record["answer"] for record in found] == wanted
    assert counts["without a pass rate"] == 6
    assert counts["outside pass_rate_range"] == 20 - len(wanted)
    assert texts(chosen, "eval") == [text.removeprefix("Q: ") + " ="
                                     for text in texts(plain, "eval")]


def test_problems_that_are_no_file_are_filtered_too(tmp_path):
    cfg = config.Config(task=config.Task(train_size=20))
    records = sources.load(cfg, "train")[0]
    rates = rated(tmp_path / "r.jsonl", records, lambda record: int(record["level"]) / 3)
    task = config.Task(train_size=20, pass_rates=rates, pass_rate_range=(0.5, 0.9))
    found = sources.load(config.Config(task=task), "train")[0]
    assert found == [record for record in records if record["level"] == "2"]


def test_several_rates_of_a_prompt_count_by_their_mean(tmp_path):
    key = sources.prompt_key({"prompt": "p"})
    path = write(tmp_path / "r.jsonl", [{"prompt_key": key, "pass_rate": rate} for rate in (0, 1)])
    prompts = identity.numbers([bytes.fromhex(key)])
    assert selection.by_pass_rate(prompts, path, (0.4, 0.6))[0].tolist() == [True]
    assert selection.by_pass_rate(prompts, path, (0.6, 1.0))[0].tolist() == [False]


@pytest.mark.parametrize("row, words", [
    ({"pass_rate": 0.5}, "'prompt_key' is null"), ({"prompt_key": "ab", "pass_rate": 1}, "\"ab\""),
    ({"prompt_key": "0" * 32}, "'pass_rate' is null"),
    ({"prompt_key": "0" * 32, "pass_rate": 1.5}, "1.5"),
    ({"prompt_key": "0" * 32, "pass_rate": True}, "true")])
def test_a_bad_row_of_pass_rates_is_named(tmp_path, row, words):
    path = write(tmp_path / "r.jsonl", [{"prompt_key": "1" * 32, "pass_rate": 0}, row])
    with pytest.raises(config.ConfigError) as caught:
        selection.read_pass_rates(path)
    assert f"{path}, line 2" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("bounds", [(0.5,), (0.6, 0.5), (-0.1, 1), (0, 1.1), ("a", 1)])
def test_a_range_that_is_none_is_refused(bounds):
    with pytest.raises(config.ConfigError, match="task.pass_rate_range"):
        config_checks.check(config.Config(task=config.Task(pass_rate_range=bounds)))


def test_a_filter_that_leaves_nothing_says_so(tmp_path):
    path = problems(tmp_path / "a.jsonl", "a", 9)
    rates = write(tmp_path / "r.jsonl", [{"prompt_key": "1" * 32, "pass_rate": 0.5}])
    with pytest.raises(config.ConfigError, match="no prompt is left.*9 without a pass rate"):
        texts(settings(train_path=path, eval_path=path, pass_rates=rates))


def test_the_key_of_a_prompt_is_of_its_content_and_survives_a_template():
    messages = [{"role": "user", "content": "p"}]
    keys = {sources.prompt_key({"prompt": prompt}) for prompt in ("p", "q", messages)}
    assert len(keys) == 3 and all(len(key) == 32 for key in keys)
    assert sources.prompt_key({"prompt": "p", "answer": "1"}) == sources.prompt_key({"prompt": "p"})
    kept = identity.keyed({"prompt": "p"}) | {"prompt": "a template around p"}
    assert sources.prompt_key(kept) == sources.prompt_key({"prompt": "p"})
