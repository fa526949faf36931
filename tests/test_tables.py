"""Large data prepared by processes and kept is what small data is in memory."""

import dataclasses
import json
import logging
import os
import re
import shutil

import numpy as np
import pytest
import worker_functions
from conftest import ROOT

from dapo_jax import config
from dapo_jax.data import encoding, files, origins, sources, store, tables, workers
from dapo_jax.text import chat as chats
from dapo_jax.text import load

CASES = ROOT / "tests" / "cases"
CHAT = chats.Chat("{% for m in messages %}{{ m.role[0] + m.content + '. ' }}{% endfor %}"
                  "{% if add_generation_prompt %}a{% endif %}")
RECIPE = load.Recipe(config.Tokenizer(kind="bytes"), None, "")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


@pytest.fixture
def large(monkeypatch):
    """Every file counts as large, and is cut small; processes are replaced by calls."""
    monkeypatch.setattr(origins, "LARGE", 1)
    monkeypatch.setattr(files, "CHUNK_BYTES", 300)

    def ordered(function, jobs, *, prepare, given, title):
        ready = prepare(given)
        return (function(ready, job) for job in jobs)

    monkeypatch.setattr(workers, "ordered", ordered)


def settings(path, **task):
    return config.Config(
        task=config.Task(name="math", train_path=str(path), **{"train_size": 0, **task}),
        prompts=config.PromptLimits(buckets=(60,), too_long="drop"),
        eval=config.Evaluation(prompts=5))


def tabled(cfg, split="train", chat=None):
    return tables.load(cfg, split, tokenizer=load.made(RECIPE), recipe=RECIPE, chat=chat,
                       stop_id=0)


def plain(table):
    """All that a table holds, as plain values."""
    names = ("demonstration_segments",)
    return {"tokens": [row.tolist() for row in table.tokens],
            "shown": [row.tolist() for row in table.demonstrations],
            "masks": [row.tolist() for row in table.demonstration_masks],
            "records": [{key: value for key, value in record.items() if key not in names}
                        for record in table.records]}


def write(path, count=40, **fields):
    rows = [{"prompt": f"p{n % 30}" + "é" * (n % 35), "answer": n % 30, **{
        name: make(n) for name, make in fields.items()}} for n in range(count)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("chat, changes", [
    (None, {}), (CHAT, {"chat": True, "template": "Q {prompt}?"}),
    (None, {"demonstration_field": "worked"}),
    (CHAT, {"chat": True, "demonstration_field": "worked"}),
    (None, {"where": (("level", (1, 2)),), "train_size": 7})])
def test_a_large_table_equals_the_small_one(tmp_path, cache, request, split, chat, changes):
    path = write(tmp_path / "d.jsonl", worked=lambda n: f"so {n}", level=lambda n: n % 4)
    cfg = settings(path, **changes)
    small, counts = tabled(cfg, split, chat)
    request.getfixturevalue("large")
    made, made_counts = tabled(cfg, split, chat)
    kept, kept_counts = tabled(cfg, split, chat)
    assert plain(made) == plain(kept) == plain(small)
    assert len(made) == len(small) > 2
    assert made_counts == kept_counts
    assert {name: made_counts.get(name) for name in counts} == counts
    assert all(row.dtype == np.int32 for row in made.tokens)
    assert made.records[-1] == made.records[len(made) - 1]


def test_large_files_are_not_taken_for_episodes_that_nobody_plays(tmp_path, cache, large):
    cfg = settings(write(tmp_path / "d.jsonl", worked=str), demonstration_field="worked")
    for name, share, refused in [("calculator", 1.0, True), ("calculator", 0.0, False),
                                 ("talk_environments:FAULTY", 1.0, False)]:
        own = dataclasses.replace(cfg, sft=dataclasses.replace(cfg.sft, steps=1), environment=(
            config.Environment(name=name, demonstrated=share)))
        assert len(tabled(own, "eval", None)[0])
        if refused:
            with pytest.raises(config.ConfigError, match="set it to 0 to learn those of the files"):
                tabled(own, "train", None)
        else:
            assert len(tabled(own, "train", None)[0])


def test_a_large_mixture_keeps_the_drawn_order_without_the_prompts_that_are_too_long(
        tmp_path, cache, request):
    paths = [write(tmp_path / f"{name}.jsonl") for name in "ab"]
    paths[1].write_text(paths[1].read_text().replace(': "p', ': "other '))
    several = tuple({"path": str(path), "weight": 1.0} for path in paths)
    cfg = settings("", train_sources=several)
    small, counts = tabled(cfg)
    request.getfixturevalue("large")
    made, made_counts = tabled(cfg)
    assert plain(made) == plain(small)
    assert {name: made_counts.get(name) for name in counts} == counts
    assert made_counts["too_long"] > 2
    names = [record["dataset"] for record in made.records]
    assert names != sorted(names) and {*names} == {"a", "b"}


def test_the_second_start_reads_no_row_and_encodes_nothing(tmp_path, cache, large, monkeypatch):
    cfg = settings(write(tmp_path / "d.jsonl"))
    first = plain(tabled(cfg)[0])
    for module, name in ((sources, "select"), (encoding, "encode_chunk")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("made again"))
    assert plain(tabled(cfg)[0]) == first


def test_whatever_the_table_depends_on_makes_another(tmp_path, cache, large):
    path = write(tmp_path / "d.jsonl")
    rates = tmp_path / "r.jsonl"
    rates.write_text("".join(json.dumps({
        "prompt_key": record["prompt_key"], "pass_rate": 0.5}) + "\n"
        for record in tabled(settings(path))[0].records))
    cfg = settings(path, pass_rates=str(rates))
    made = [cfg, dataclasses.replace(cfg, eval=config.Evaluation(prompts=6)),
            dataclasses.replace(cfg, prompts=config.PromptLimits(buckets=(70,), too_long="drop")),
            settings(path, template="Q{prompt}", pass_rates=str(rates))]
    for one in made:
        tabled(one)
    count = len(list(cache.iterdir()))
    assert count == 1 + len(made)
    rates.write_text(rates.read_text().replace("0.5", "0.25"))
    tabled(cfg)
    before = path.stat()
    path.write_text(path.read_text().replace("p1", "p9"))
    os.utime(path, (before.st_atime, before.st_mtime + 5))
    cfg = settings(path)
    assert any(r["prompt"].startswith("p9") for r in tabled(cfg)[0].records)
    assert len(list(cache.iterdir())) == count + 2


def test_a_broken_kept_table_is_made_again(tmp_path, cache, large, caplog):
    cfg = settings(write(tmp_path / "d.jsonl"))
    first = plain(tabled(cfg)[0])
    (folder,) = cache.iterdir()
    for name in ("tokens", "records", "index.npz", "notes.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:len(content) // 2])
        caplog.clear()
        assert plain(tabled(cfg)[0]) == first
        assert "broken" in caplog.text, name


@pytest.mark.parametrize("where", ["", "/dev/null/cache"])
def test_without_a_place_to_keep_it_the_table_is_the_same(
        tmp_path, large, monkeypatch, where, caplog):
    monkeypatch.setenv("DAPO_JAX_CACHE", where)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    table, _ = tabled(settings(write(tmp_path / "d.jsonl")))
    assert not list((tmp_path / "temporary").iterdir())
    assert table.records[3]["prompt"].encode() == bytes(table.tokens[3].tolist())
    assert ("not kept" in caplog.text) == bool(where)


def test_faults_of_a_large_file_are_named_by_line(tmp_path, cache, large):
    path = write(tmp_path / "d.jsonl")
    cfg = settings(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:17], '{"prompt": ', *lines[17:]]))
    with pytest.raises(config.ConfigError, match="d.jsonl, line 18: it is not valid JSON"):
        tabled(cfg)
    write(path)
    strict = dataclasses.replace(cfg, prompts=config.PromptLimits(buckets=(40,)))
    with pytest.raises(config.ConfigError, match=r"prompt of .*d.jsonl, line 2\d .* 40"):
        tabled(strict)
    write(path, worked=lambda n: f"so {n}")
    path.write_text(path.read_text().replace('"worked": "so 24"', '"other": "so 24"'))
    with pytest.raises(config.ConfigError, match="d.jsonl, line 25 has no demonstration"):
        tabled(settings(path, demonstration_field="worked"))
    assert not list(cache.iterdir())  # nothing half made is left


def test_a_small_files_faults_after_reading_are_named_by_line_too(tmp_path):
    path = write(tmp_path / "d.jsonl")
    cfg = dataclasses.replace(settings(path), prompts=config.PromptLimits(buckets=(40,)))
    with pytest.raises(config.ConfigError, match=r"prompt of .*d.jsonl, line 2\d .* 40"):
        tabled(cfg)


def test_parquet_and_tfds_become_the_same_large_table(tmp_path, cache, large):
    from dapo_jax.data import build

    task = config.Task(name="math", format="dapo")
    built = build.build("dapo", {"train": str(CASES / "dapo.parquet")}, str(tmp_path), task=task)
    found = []
    for path in (CASES / "dapo.parquet", built):
        cfg = settings(path, format="dapo", eval_path=str(path), eval_split="train")
        cfg = dataclasses.replace(cfg, prompts=config.PromptLimits(buckets=(500,)))
        found.append(plain(tabled(cfg, "train", CHAT)[0]))
    assert found[0] == found[1]
    assert [record["answer"] for record in found[0]["records"]] == ["7", "8", "100"]


# ------------------------------------------------------------------------------------- processes


def test_processes_prepare_a_table_and_show_how_far_they_are(tmp_path, cache, monkeypatch, caplog):
    path = write(tmp_path / "d.jsonl", 400)
    cfg = settings(path)
    small = plain(tabled(cfg)[0])
    monkeypatch.setattr(origins, "LARGE", 1)
    monkeypatch.setattr(files, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(workers, "PLAIN_SECONDS", 0.0)
    write(path, 400)  # anew: what was found in it at its last reading is still known
    with caplog.at_level(logging.INFO):
        assert plain(tabled(cfg)[0]) == small
    for title in ("reading data", r"preparing prompts \(train\)"):
        assert re.search(rf"{title}: ([4-9]) of \1 parts", caplog.text)


def test_results_come_in_the_order_of_the_jobs():
    jobs = list(range(50))
    found = workers.ordered(worker_functions.doubled, jobs, prepare=worker_functions.given,
                            given="g", title="t")
    assert list(found) == [("g", 2 * job) for job in jobs]


@pytest.mark.parametrize("job, error, words", [
    ("fault", config.ConfigError, "told fault"), ("leave", RuntimeError, "ended with status 3")])
def test_what_a_process_raises_is_raised_here_and_no_process_stays(job, error, words):
    import psutil

    with pytest.raises(error, match=words):
        list(workers.ordered(worker_functions.refuse, [job] * 5, prepare=worker_functions.given,
                             given="told", title="t"))
    assert not [child for child in psutil.Process().children() if "serve" in " ".join(
        child.cmdline())]


def test_a_cache_folder_that_is_taken_away_does_not_harm_a_table_in_use(tmp_path, cache, large):
    table, _ = tabled(settings(write(tmp_path / "d.jsonl")))
    before = plain(table)
    shutil.rmtree(cache)
    assert plain(table) == before and store.load("nothing") is None
