"""A configuration file: what its functions return, and fields set in that by their dotted names."""

import dataclasses
import importlib.util
import pathlib
import re
import traceback
from collections.abc import Iterable
from typing import Any

import ml_collections

from dapo_jax import config, config_gin


def load(path: str) -> ml_collections.ConfigDict:
    """The ConfigDict of a configuration file's get_config()."""
    values = call(path, "get_config")
    if not isinstance(values, ml_collections.ConfigDict):
        raise config.ConfigError(f"{path}: get_config() must return a ConfigDict made by "
                                 f"dapo_jax.config.default(), not {type(values).__name__}")
    return values


def call(path: str, function: str) -> Any:
    """What a configuration file's function of no arguments returns; None if it has no such
    function. Raises ConfigError with file and line for what goes wrong there."""
    if not (file := pathlib.Path(path)).is_file():
        beside = [str(other) for other in file.parent.glob("*.py")] if file.suffix else []
        raise config.ConfigError(f"--config={path}: there is no such file"
                                 f"{config.near(path, beside)}")
    spec = importlib.util.spec_from_file_location("experiment", path)
    if spec is None or spec.loader is None:
        made = ": it holds what a run was made of; name the .py file that the run was started with"
        raise config.ConfigError(f"--config={path}: not a .py file"
                                 f"{made if file.name == 'config.json' else ''}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, function, lambda: None)()
    except (Exception, SystemExit) as error:
        here = [frame for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == spec.origin]
        line = f", line {here[-1].lineno}" if here else ""
        raise config.ConfigError(f"{path}{line}: {_fault(error)}") from error


def _fault(error: BaseException) -> str:
    """What a configuration file did wrong, in short where it set a field that does not exist."""
    missing = re.match(r"'?Key \"(\w+)\" does not exist", str(error))
    if missing is None:
        return f"{type(error).__name__}: {error}"
    known = {part for name in field_names() for part in name.split(".")}
    return f"unknown field {missing[1]}{config.near(missing[1], known)}"


def set_fields(values: ml_collections.ConfigDict, changes: Iterable[config_gin.Setting]) -> None:
    """Change fields in place; ConfigError names one that does not exist, with its neighbours, or
    whose value is of another type."""
    known = field_names()
    for one in changes:
        if one.name not in known:
            raise config.ConfigError(f"{one.where}: unknown field config.{one.name}"
                                     f"{config.near(one.name, known)}")
        try:
            values.update_from_flattened_dict({one.name: one.value})
        except (TypeError, ValueError) as error:
            raise config.ConfigError(f"{one.where}: {error}") from error


def field_names(record: Any = None, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every configuration field by its dotted name."""
    names: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(config.Config() if record is None else record):
        value = getattr(config.Config() if record is None else record, field.name)
        if dataclasses.is_dataclass(value):
            names |= field_names(value, f"{prefix}{field.name}.")
        else:
            names[prefix + field.name] = field
    return names
