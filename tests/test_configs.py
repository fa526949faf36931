"""The experiments in configs/, and that no field of the configuration is without effect."""

import ast
import dataclasses
import json

import pytest
from conftest import ROOT

from dapo_jax import config, config_checks, config_file
from dapo_jax.learner import algorithms

CONFIGS = sorted((ROOT / "configs").rglob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_an_experiment_loads_passes_the_checks_and_survives_json(path):
    cfg = config_checks.from_dict(config_file.load(str(path)))
    stored = json.loads(json.dumps(config.to_json(cfg)))
    values = config.default()
    values.update_from_flattened_dict(_flat(stored))
    assert config_checks.from_dict(values) == cfg


def _flat(tree, prefix=""):
    found = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {
            prefix + name: _tuple(value)}
    return found


def _tuple(value):
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def test_every_experiment_says_how_to_run_it():
    for path in CONFIGS:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_every_field_is_read_somewhere():
    read = set()
    for path in (ROOT / "dapo_jax").rglob("*.py"):
        if not path.stem.startswith("config"):
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    unread = {name for name in config_file.field_names() if name.split(".")[-1] not in read}
    assert not unread


def test_every_choice_of_an_algorithm_is_a_field_of_one():
    choices = {field.name for field in dataclasses.fields(config.AlgorithmChoice)} - {"preset"}
    assert choices <= {field.name for field in dataclasses.fields(algorithms.Algorithm)}
