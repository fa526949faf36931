"""What the records of the configuration are written with."""

import dataclasses
from typing import Any


class ConfigError(ValueError):
    """Bad configuration or data: the message says which field and what to do; exit status 2."""


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A configuration field with its help text and, for words, the allowed ones."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def section(record: type, **changes: Any) -> Any:
    """A nested record."""
    return dataclasses.field(default_factory=lambda: record(**changes))
