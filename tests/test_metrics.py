import io
import json
import math
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from dapo_jax.runtime import metrics, samples_log


def brute_repetition(text: str) -> float:
    n = len(text)
    if n <= 1:
        return 0.0
    substrings = {text[i:j] for i in range(n) for j in range(i + 1, n + 1)}
    return 1 - len(substrings) / (n * (n + 1) / 2)


def lines_of(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@hypothesis.given(strategies.one_of(strategies.text(alphabet="ab", max_size=40),
                                    strategies.text(max_size=40)))
@hypothesis.settings(max_examples=150, deadline=None)
def test_repetition_counts_distinct_substrings(text):
    assert metrics.repetition(text) == pytest.approx(brute_repetition(text), abs=1e-12)


@pytest.mark.parametrize("text, value", [
    ("", 0.0), ("a", 0.0), ("aa", 1 / 3), ("ab", 0.0), ("abab", 3 / 10), ("\ud800\ud800", 1 / 3),
])
def test_repetition_of_small_texts(text, value):
    assert metrics.repetition(text) == pytest.approx(value, abs=1e-12)


def test_repetition_is_of_characters_not_bytes():
    assert metrics.repetition("äö") == 0.0  # their UTF-8 shares a byte


def test_repetition_metrics_average_texts_and_count_those_above_a_fifth():
    texts = ["abc", "aaaaaa", "aaaaaa", "abcd"]
    got = metrics.repetition_metrics(texts)
    assert got["repetition/mean"] == pytest.approx(np.mean([brute_repetition(t) for t in texts]))
    assert got["repetition/share"] == 0.5


def test_repetition_metrics_look_at_the_end_of_long_texts():
    loop = "x" * metrics.REPETITION_CHARACTERS
    got = metrics.repetition_metrics(["abcdefg" + loop])
    assert got["repetition/mean"] == metrics.repetition(loop)
    assert got["repetition/mean"] != metrics.repetition("abcdefg" + loop[7:])
    assert all(math.isnan(value) for value in metrics.repetition_metrics([]).values())


def test_lines_begin_with_step_and_hold_plain_numbers(tmp_path):
    writer = metrics.open_writer(tmp_path, resume_step=-1, tensorboard=False)
    metrics.write(writer, {"phase": "rl", "a": np.float32(0.5), "step": np.int32(1),
                           "b": float("nan"), "c": np.inf, "d": jnp.int32(3), "e": np.bool_(True),
                           "f": [np.float64("-inf"), 2], "g": jnp.bfloat16(1.5),
                           "h": np.arange(2)})
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: each line is flushed
    assert text.startswith('{"step": 1, ')
    assert json.loads(text) == {"step": 1, "phase": "rl", "a": 0.5, "b": None, "c": None, "d": 3,
                                "e": True, "f": [None, 2], "g": 1.5, "h": [0, 1]}
    metrics.close(writer)


@pytest.mark.parametrize("resume_step, kept",
                         [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_lines_past_the_restored_step_are_cut_off(tmp_path, resume_step, kept):
    writer = metrics.open_writer(tmp_path, resume_step=-1, tensorboard=False)
    for step in range(4):
        metrics.write(writer, {"step": step})
    metrics.close(writer)
    writer = metrics.open_writer(tmp_path, resume_step=resume_step, tensorboard=False)
    metrics.write(writer, {"step": 10})
    metrics.close(writer)
    assert [line["step"] for line in lines_of(tmp_path)] == kept + [10]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn",
                         ['{"step": 2, "a"', '{"step": 2}', '[1]\n', '{"a": 1}\n', '\x00\n'])
def test_a_torn_line_is_dropped_with_all_that_follows(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n' + torn)
    if torn.endswith("\n"):
        path.write_text(path.read_text() + '{"step": 3}\n')
    metrics.close(metrics.open_writer(tmp_path, resume_step=5, tensorboard=False))
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_cutting_an_intact_file_leaves_its_bytes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":  1}\n')
    before = path.stat().st_ino
    metrics.close(metrics.open_writer(tmp_path, resume_step=1, tensorboard=False))
    assert path.read_text() == '{"step":  1}\n' and path.stat().st_ino == before


def test_tensorboard_gets_the_numbers_and_the_purge_step(tmp_path):
    writer = metrics.open_writer(tmp_path, resume_step=4, tensorboard=True)
    metrics.write(writer, {"step": 5, "reward/mean": 0.25, "phase": "rl", "kl": float("nan")})
    metrics.close(writer)
    content = b"".join(path.read_bytes() for path in (tmp_path / "tb").iterdir())
    assert b"reward/mean" in content and b"kl" not in content and b"phase" not in content
    assert b"\x10\x05" in content  # field 2 of an event, its step: 5


def test_samples_are_appended_by_round_and_cut_by_step(tmp_path):
    for step in (1, 2, 3):
        for number in range(2):
            samples_log.write(tmp_path, step, [{"step": step, "round": number,
                                                "reward": np.float32(1), "kept": None}])
        samples_log.write_eval(tmp_path, step, [{"step": step}])
        samples_log.write_eval(tmp_path, step, [{"step": step}])
    samples_log.cut(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["eval_000001.jsonl", "eval_000002.jsonl",
                     "step_000001.jsonl", "step_000002.jsonl"]
    rows = [json.loads(line) for line in
            (tmp_path / "samples" / "step_000002.jsonl").read_text().splitlines()]
    assert rows == [{"step": 2, "round": n, "reward": 1.0, "kept": None} for n in (0, 1)]
    assert len((tmp_path / "samples" / "eval_000002.jsonl").read_text().splitlines()) == 1
    samples_log.cut(tmp_path, -1)
    assert not list((tmp_path / "samples").iterdir())


def test_cutting_samples_of_a_new_directory_does_nothing(tmp_path):
    samples_log.cut(tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()


def test_progress_line_tells_step_reward_accuracy_and_time_left():
    text = metrics.progress_line({"step": 12, "phase": "rl", "reward/mean": 0.25}, total=300,
                                 accuracy=0.5, seconds=20.0)
    assert text == "step 12/300  rl  reward 0.250  accuracy 0.500  20.00 s/step  ETA 1:36:00"
    text = metrics.progress_line({"step": 3, "phase": "sft", "policy/loss": 2.5}, total=0,
                                 accuracy=None, seconds=1.0)
    assert text == "step 3  sft  loss 2.500  1.00 s/step"
    bare = metrics.progress_line({"step": 0, "reward/mean": None}, total=0, accuracy=None,
                                 seconds=1.0)
    assert bare == "step 0  1.00 s/step"


def test_plain_progress_is_sparse_but_shows_first_and_last(monkeypatch):
    clock = iter([0.0] + [float(second) for second in range(1, 14)])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    monkeypatch.setattr(metrics.sys, "stderr", stream)
    progress = metrics.open_progress(13, 0)
    for step in range(1, 14):
        accuracy = {"eval/avg@8": 0.5} if step == 1 else {}
        metrics.advance(progress, {"step": step} | accuracy)
    metrics.close_progress(progress)
    shown = stream.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == ["1/13", "6/13", "11/13", "13/13"]
    assert all("accuracy 0.500  1.00 s/step" in line for line in shown)
    assert "ETA 0:00:07" in shown[1]


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(metrics.sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    progress = metrics.open_progress(4, 1)
    for step in (2, 3, 4):
        metrics.advance(progress, {"step": step, "phase": "rl", "reward/mean": 0.5})
    metrics.close_progress(progress)
    assert "\u2501" in stream.getvalue() and "step 4/4" in stream.getvalue()


def test_each_new_shape_is_one_compile():
    metrics.count_compiles()
    metrics.count_compiles()
    double = jax.jit(lambda x: x * 2)
    inputs = [jax.device_put(np.ones(n, np.float32)) for n in (3, 3, 5)]
    counts = [metrics.compile_count()]
    for x in inputs:
        double(x).block_until_ready()
        counts.append(metrics.compile_count())
    assert np.diff(counts).tolist() == [1, 0, 1]
