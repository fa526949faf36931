"""The doctor: each check finds what is wrong when it is, says what to do, and stops no other."""

import collections
import dataclasses

import numpy as np
import pytest

from dapo_jax import doctor, self_test
from dapo_jax.envs import pool as pools
from dapo_jax.learner import weights

Usage = collections.namedtuple("Usage", "total used free")


def fails(message):
    def find():
        raise self_test.Wrong(message)

    return find


def test_what_fails_is_named_with_what_to_do_and_the_others_go_on(monkeypatch, capsys):
    chosen = [doctor.Check("one", lambda: "fine", ""),
              doctor.Check("two", fails("it is broken"), "mend it"),
              doctor.Check("three", lambda: 1 // 0, "divide by something"),
              doctor.Check("four", lambda: "fine", "")]
    monkeypatch.setattr(doctor, "checks", lambda folder: chosen)
    assert doctor.main([]) == doctor.FAILED
    out = capsys.readouterr().out
    assert "FAILED: it is broken" in out and "what to do: mend it" in out
    assert "FAILED: ZeroDivisionError" in out and "four        fine" in out
    assert out.splitlines()[-1] == "failed: two, three"
    monkeypatch.setattr(doctor, "checks", lambda folder: chosen[::3])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all well"


def test_what_the_machine_has_is_said(tmp_path):
    for check in doctor.checks(tmp_path):
        assert check.remedy
        if check.name in ("python", "packages", "devices", "memory", "disk"):
            assert check.find()
    assert all(f"{name} " in doctor.packages() for name in ("jax", "jaxlib", "orbax-checkpoint"))
    assert str(tmp_path) in doctor.disk(tmp_path)


def test_a_missing_or_an_old_package_fails(monkeypatch, tmp_path):
    required = tmp_path / "requirements.txt"
    required.write_text("numpy>=1000  # of another age\nno-such-package-here>=1\n# a comment\n")
    monkeypatch.setattr(doctor, "REQUIRED", required)
    with pytest.raises(self_test.Wrong, match="numpy is .*>=1000; no-such-package-here is missing"):
        doctor.packages()


def test_an_idle_gpu_a_full_disk_and_another_python_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "cpu" in doctor.devices()  # the tests ask for the CPU
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(self_test.Wrong, match="no GPU"):
        doctor.devices()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(9e9, 9e9, 1e8))
    with pytest.raises(self_test.Wrong, match=r"0\.1 GiB"):
        doctor.disk(tmp_path)
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 2))
    with pytest.raises(self_test.Wrong, match=r"3\.10"):
        doctor.python()


def test_a_cache_that_cannot_be_written_fails(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for path, fault in ((tmp_path / "made", None), (tmp_path / "file", FileExistsError)):
        monkeypatch.setattr(type(doctor.jax.config), "jax_compilation_cache_dir", str(path),
                            raising=False)
        if fault is None:
            assert "0 files" in doctor.cache()
        else:
            with pytest.raises(fault):
                doctor.cache()


def test_the_loss_of_two_splits_agrees_and_a_wrong_normalisation_is_found(monkeypatch):
    assert "agree" in self_test.exact_loss()
    calls = iter((1.0, 1.01))
    right = weights.token
    monkeypatch.setattr(weights, "token", lambda *args, **how: np.float32(next(calls)) * right(
        *args, **how))
    with pytest.raises(self_test.Wrong, match="differ by 1.0e-02"):
        self_test.exact_loss()


def test_a_state_comes_back_and_one_that_does_not_is_named(monkeypatch):
    assert "equal to the bit" in self_test.resume()
    restore = self_test.checkpoint.restore

    def other(manager, like):
        found = restore(manager, like)
        return dataclasses.replace(found, step=found.step + 1)

    monkeypatch.setattr(self_test.checkpoint, "restore", other)
    with pytest.raises(self_test.Wrong, match=r"\.step is not what was saved"):
        self_test.resume()


def test_a_worker_answers_and_a_wrong_answer_is_found(monkeypatch):
    assert "4 answers" in self_test.scoring()
    score = pools.score

    def wrong(pool, texts, records):
        found = score(pool, texts, records)
        return dataclasses.replace(found, reward=1 - found.reward)

    monkeypatch.setattr(pools, "score", wrong)
    with pytest.raises(self_test.Wrong, match="rewards"):
        self_test.scoring()
