"""Weights & Biases as an optional logger, against a stand-in for its package."""

import importlib.machinery
import json
import logging
import subprocess
import sys
import types as python_types

import pytest
from conftest import ROOT

from dapo_jax import config
from dapo_jax.runtime import metrics, wandb_log


class Service:
    """What the package was asked to do."""

    def __init__(self):
        self.begun, self.logged, self.finished = [], [], 0
        self.refuses, self.breaks_at = "", None

    def module(self):
        made = python_types.ModuleType("wandb")
        made.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        made.init = self.init
        return made

    def init(self, **named):
        if self.refuses:
            raise ValueError(self.refuses)
        self.begun.append(named)
        return self

    def log(self, numbers, *, step):
        if step == self.breaks_at:
            raise OSError("the network is gone")
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made.module())
    return made


def written(workdir, steps, *, resume_step=-1):
    logger = wandb_log.opened("sums", workdir, {"seed": 3})
    writer = metrics.open_writer(workdir, resume_step=resume_step, tensorboard=False,
                                 logger=logger)
    for step in steps:
        metrics.write(writer, {"step": step, "phase": "rl", "reward/mean": step / 4,
                               "policy/kl": float("nan"), "groups/kept": 2, "some": True})
    metrics.close(writer)


def test_numbers_reach_the_project_by_step_and_texts_do_not(service, tmp_path):
    written(tmp_path, (1, 2))
    begun, = service.begun
    assert (begun["project"], begun["name"], begun["config"]) == (
        "sums", tmp_path.name, {"seed": 3})
    assert service.logged == [(step, {"reward/mean": step / 4, "groups/kept": 2})
                              for step in (1, 2)]
    assert service.finished == 1


def test_a_run_that_goes_on_is_the_same_run_there_and_another_is_not(service, tmp_path):
    for folder, steps in (("a", (1,)), ("a", (2,)), ("b", (1,))):
        (tmp_path / folder).mkdir(exist_ok=True)
        written(tmp_path / folder, steps, resume_step=steps[0] - 1)
    first, again, other = service.begun
    assert first["id"] == again["id"] != other["id"] and again["resume"] == "allow"


def test_what_breaks_later_is_said_once_and_ends_nothing(service, tmp_path, caplog):
    service.breaks_at = 2
    with caplog.at_level(logging.WARNING):
        written(tmp_path, (1, 2, 3))
    assert [record.getMessage() for record in caplog.records] == [
        "wandb stopped: the network is gone; the run goes on, its figures are in metrics.jsonl"]
    assert [step for step, _ in service.logged] == [1] and service.finished == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_missing_package_and_a_refusal_are_errors_that_name_the_field(
        service, tmp_path, monkeypatch):
    service.refuses = "api_key not configured"
    with pytest.raises(config.ConfigError, match=r"config\.log\.wandb is 'sums'.*api_key"):
        wandb_log.opened("sums", tmp_path, {})
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match=r"config\.log\.wandb is 'sums'.*pip install"):
        wandb_log.check("sums")
    wandb_log.check("")
    assert wandb_log.opened("", tmp_path, {}) is None


@pytest.mark.slow
def test_a_run_refuses_a_missing_package_before_it_compiles(tmp_path):
    hidden = ("import importlib.util as u, sys; find = u.find_spec; "
              "u.find_spec = lambda name, *a: None if name == 'wandb' else find(name, *a); "
              "from dapo_jax import command_line, train; command_line.leave(train.main)")
    done = subprocess.run(
        [sys.executable, "-c", hidden, "--config=configs/quickstart.py",
         f"--workdir={tmp_path / 'run'}", "--config.log.wandb=sums"], cwd=ROOT,
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "pip install wandb" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_imports_the_package_where_no_project_is_named():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from dapo_jax.runtime import wandb_log; "
         "wandb_log.check(''); print('wandb' in sys.modules)"], cwd=ROOT, capture_output=True,
        text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
