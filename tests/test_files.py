"""Files cut into chunks: every row once, whatever the cut, and every fault with its place."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import ROOT

from dapo_jax import config
from dapo_jax.data import build, files

CASES = ROOT / "tests" / "cases"


def everything(path, split="train"):
    path = str(path)
    found = []
    for chunk in files.chunks(path, files.kind(path), split=split):
        rows = list(files.rows(chunk))
        assert [place for place, _, _ in rows] == list(range(len(rows)))
        some = {place for place, _, _ in rows if place % 3}
        assert list(files.rows(chunk, some)) == [row for row in rows if row[0] in some]
        found += [(number, row) for _, number, row in rows]
    return found


@pytest.mark.parametrize("size", [1, 3, 7, 64, 10**6])
def test_any_cut_of_json_lines_gives_each_line_once_with_its_number(tmp_path, monkeypatch, size):
    lines = ['{"a": 1}', "", '{"a": "\u2028\r"}'.replace("\r", "\\r"), "  ", "x", '{"a": [2, 3]}\r']
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    monkeypatch.setattr(files, "CHUNK_BYTES", size)
    found = everything(path)
    assert [number for number, _ in found] == [1, 3, 5, 6]
    assert [row for _, row in found if not isinstance(row, str)] == [
        {"a": 1}, {"a": "\u2028\r"}, {"a": [2, 3]}]


@pytest.mark.parametrize("line, words", [
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands in it twice"), ('{"a": NaN}', "NaN"),
    ('{"a": "\\ud800"}', "surrogates"), ('{"a": ', "not valid JSON"), ("[1]", "list, not an"),
    ("\udcff", "not UTF-8 (byte 0)"), ('{"a": "\x01"}', "control character"),
    ("\ufeff{}", "BOM")])
def test_a_line_that_is_no_object_says_why(tmp_path, line, words):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"a": 0}\n' + line.encode("utf-8", "surrogateescape") + b'\n{"a": 2}')
    found = everything(path)
    assert [row for _, row in found[::2]] == [{"a": 0}, {"a": 2}]
    assert found[1][0] == 2 and words in found[1][1]


def parquet(path, rows, **options):
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_any_cut_of_parquet_gives_each_row_once_with_its_number(tmp_path, monkeypatch):
    rows = [{"n": n, "inner": {"text": f"é{n}", "list": [{"a": n}]}, "none": None}
            for n in range(11)]
    path = parquet(tmp_path / "d.parquet", rows, row_group_size=4)
    for size in (1, 3, 100):
        monkeypatch.setattr(files, "CHUNK_ROWS", size)
        assert everything(path) == list(enumerate(rows, start=1))


def test_values_that_json_has_no_word_for_become_texts(tmp_path):
    import datetime
    import decimal

    path = parquet(tmp_path / "d.parquet", [{"day": datetime.date(2024, 1, 2), "raw": b"abc",
                                             "price": decimal.Decimal("1.50")}])
    assert everything(path) == [(1, {"day": "2024-01-02", "raw": "abc", "price": "1.50"})]
    path = parquet(tmp_path / "e.parquet", [{"raw": b"abc"}, {"raw": b"\xff"}])
    assert everything(path)[1] == (2, "it is not UTF-8 (byte 0)")


def test_broken_and_odd_files_are_named(tmp_path):
    whole = parquet(tmp_path / "whole.parquet", [{"a": str(n) * 50} for n in range(100)])
    content = whole.read_bytes()
    cut, middle, empty = (tmp_path / f"{name}.parquet" for name in ("cut", "middle", "empty"))
    cut.write_bytes(content[:len(content) // 2])
    middle.write_bytes(content[:60] + bytes(200) + content[260:])
    empty.write_bytes(b"")
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b")
    for path, words in ((cut, "no whole Parquet file"), (empty, "no whole Parquet file"),
                        (middle, "row group 0 cannot be read"), (tmp_path, "dataset_info.json"),
                        (packed, "ends in none of .jsonl"),
                        (tmp_path / "none.jsonl", "No such file")):
        with pytest.raises(config.ConfigError) as caught:
            everything(path)
        assert str(path) in str(caught.value) and words in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"a": 1}\n' * 3)
    (chunk,) = files.chunks(str(path), "jsonl", split="")
    path.write_text('{"a": 1}\n')
    with pytest.raises(config.ConfigError, match="shorter"):
        list(files.rows(chunk))


# ------------------------------------------------------------------------------------------- TFDS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A data set that TFDS built, of 9 training rows and 4 test rows."""
    folder = tmp_path_factory.mktemp("built")
    train = folder / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"p{n}é", "answer": str(n), "n": [n, None]})
                             + "\n" for n in range(9)))
    return build.build("own", {"train": str(train), "test": str(CASES / "gsm8k.jsonl")},
                       str(folder), task=config.Task(
                           name="math", prompt_field="prompt|question", answer_field="answer"))


def test_any_cut_of_a_tfds_data_set_gives_each_row_once(built, monkeypatch):
    for size in (1, 4, 100):
        monkeypatch.setattr(files, "CHUNK_ROWS", size)
        found = everything(built)
        assert [number for number, _ in found] == list(range(1, 10))
        assert [row["prompt"] for _, row in found] == [f"p{n}é" for n in range(9)]
    assert len(everything(built, "train[:5]")) == 5
    assert len(everything(built, "test")) == 4


def test_a_split_that_is_not_there_or_a_broken_folder_is_named(built, tmp_path):
    with pytest.raises(config.ConfigError, match="own.*split 'valid'"):
        everything(built, "valid")
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(config.ConfigError, match=str(tmp_path)):
        everything(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in built.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content[:40] if "array_record" in file.name else content)
    with pytest.raises(config.ConfigError, match="copy"):
        everything(copy)


def test_no_tensorflow_is_imported_to_build_or_to_read(built, tmp_path):
    code = f"""
import sys
from dapo_jax import config
from dapo_jax.data import build, sources
build.build("again", {{"train": {str(CASES / "gsm8k.jsonl")!r}}}, {str(tmp_path)!r},
            task=config.Task(name="math", format="gsm8k"))
task = config.Task(name="math", train_path={str(built)!r}, eval_path={str(built)!r}, train_size=0)
print(len(sources.load(config.Config(task=task), "train")[0]))
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"tensorflow", "torch", "jax"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert done.stdout.splitlines() == ["9", "[]"], done.stderr
