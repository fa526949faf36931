"""Settings of one task, given in the configuration as pairs of name and value."""

import dataclasses
from typing import Any, TypeVar, cast

from dapo_jax import config

Settings = TypeVar("Settings")


def pairs(given: tuple) -> dict[str, Any]:
    """The pairs as a dict; ConfigError if they are none, or a name comes twice."""
    good = all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
               for pair in given)
    if not good or len({pair[0] for pair in given}) < len(given):
        raise config.ConfigError(f"config.task.options = {given!r} must be pairs of a name and a "
                                 "value, each name once, such as (('largest', 9),)")
    return dict(given)


def read(record: type[Settings], given: tuple, *, where: str) -> Settings:
    """The settings record with the given pairs; ConfigError for unknown names and wrong types."""
    values = pairs(given)
    known = {field.name: field.default for field in dataclasses.fields(cast(Any, record))}
    for name, value in values.items():
        if name not in known:
            raise config.ConfigError(f"config.task.options: {where} has no setting {name!r}"
                                     f"{config.near(name, known)} (there are: {', '.join(known)})")
        if type(value) is not type(known[name]):
            raise config.ConfigError(f"config.task.options: {name} = {value!r} must be "
                                     f"{type(known[name]).__name__}")
    return record(**values)
