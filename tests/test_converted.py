import json
import logging
import os
import pathlib
import time

import numpy as np
import pytest
import tiny
from gguf_files import source, write

from dapo_jax import config
from dapo_jax.models import converted, gguf


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def path(tmp_path, cache):
    return write(tmp_path / "model.gguf", source())


def refuse(path):
    raise AssertionError("the file was parsed again")


def everything(file):
    return {name: file.read(name) for name in file.shapes}


def test_a_second_start_reads_the_same_and_parses_nothing(path, cache, monkeypatch):
    parsed = gguf._parse(path)
    first = gguf.open(path)
    monkeypatch.setattr(gguf, "_parse", refuse)
    second = gguf.open(path)
    for file in (first, second):
        assert file.path == path
        assert file.metadata == parsed.metadata == json.loads(json.dumps(parsed.metadata))
        assert file.shapes == parsed.shapes and gguf.spec(file) == gguf.spec(parsed)
        for name, values in everything(parsed).items():
            np.testing.assert_array_equal(everything(file)[name], values)
    assert len(list(cache.iterdir())) == 1


def test_the_content_counts_not_the_name(path, cache, tmp_path, monkeypatch):
    gguf.open(path)
    moved = path.rename(tmp_path / "other.gguf")
    os.utime(moved, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_parse", refuse)
        gguf.open(moved)
    other = write(path, source(seed=1))
    os.utime(other, (1, 1))  # the same size and time as the first
    np.testing.assert_array_equal(gguf.open(other).read("output.weight"),
                                  source(seed=1)["output.weight"])


@pytest.mark.parametrize("spoil", [
    lambda data: data[:-1], lambda data: b"", lambda data: data[:100],
    lambda data: b"\x00" * len(data)])
def test_a_broken_copy_is_made_again_with_a_message(path, cache, caplog, spoil):
    gguf.open(path)
    stored = next(cache.iterdir())
    whole = stored.read_bytes()
    stored.write_bytes(spoil(whole))
    with caplog.at_level(logging.WARNING):
        file = gguf.open(path)
    assert str(stored) in caplog.text and "broken" in caplog.text
    np.testing.assert_array_equal(file.read("output.weight"), source()["output.weight"])
    assert stored.read_bytes() == whole


def test_where_nothing_can_be_kept_the_file_itself_is_used(path, cache, caplog):
    cache.parent.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        file = gguf.open(path)
    assert "cannot be kept" in caplog.text
    np.testing.assert_array_equal(file.read("output.weight"), source()["output.weight"])


def test_a_conversion_that_fails_leaves_nothing_behind(path, cache, monkeypatch):
    def fail(path, tensor):
        if tensor.name == "output.weight":
            raise config.ConfigError("cannot be read")
        return np.zeros([int(n) for n in reversed(tensor.shape)], np.float32)

    monkeypatch.setattr(gguf, "_dequantise", fail)
    with pytest.raises(config.ConfigError, match="cannot be read"):
        gguf.open(path)
    assert list(cache.iterdir()) == []


def test_large_files_and_an_empty_setting_keep_nothing(path, cache, monkeypatch):
    monkeypatch.setattr(converted, "LARGEST", 1000)
    gguf.open(path)
    monkeypatch.undo()
    monkeypatch.setenv("DAPO_JAX_CACHE", "")
    gguf.open(path)
    assert not cache.exists()


def test_the_folder_follows_the_user_s_settings(monkeypatch, tmp_path):
    monkeypatch.delenv("DAPO_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert converted._path("x") == tmp_path / "dapo_jax" / "gguf" / "x.safetensors"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert converted._path("x") == (
        pathlib.Path.home() / ".cache" / "dapo_jax" / "gguf" / "x.safetensors")


def test_the_small_real_model_starts_fast_the_second_time(smollm2):
    """Parsing it takes four seconds of processor time; of an open converted file it is 0.3."""
    start = time.process_time()
    file = gguf.open(smollm2.path)
    spec = gguf.spec(file)
    assert len(tiny.gathered(spec, gguf.pieces(file, spec))["embedding"]) == 49152
    assert time.process_time() - start < 3
