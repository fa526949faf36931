"""The reference of the configuration as Markdown, made of the records that define it.

    python -m dapo_jax.config_reference                                # on standard output
    python -m dapo_jax.config_reference --out=docs/configuration.md    # write the page

exit status: 0 done, 2 bad flags or a file that cannot be written
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dapo_jax import command_line, config

HEAD = """# Configuration reference

Every field with its default, made by `python -m dapo_jax.config_reference
--out=docs/configuration.md` from the records of `dapo_jax/config*.py`; a test fails where this page
is not what that command writes.

A configuration file is a Python file with a `get_config()` that returns `dapo_jax.config.default()`
with changes ([configs/quickstart.py](../configs/quickstart.py)). On the command line
`--config.a.b=VALUE` changes one field more: a tuple in quotes, `--config.rollout.slots="(8,16)"`, a
truth value as `True` or `False`. "preset" as a default means: as `algorithm.preset` says
([choosing_an_algorithm.md](choosing_an_algorithm.md)). A name that does not exist, a value of
another type and a contradiction are refused by name before anything is compiled.
"""


def markdown() -> str:
    """The page."""
    sections = "".join(_section(name, record) for name, record in _records(config.Config()))
    return f"{HEAD}\n{sections}".rstrip("\n") + "\n"


def _records(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The record and all below it, by dotted name; "" is the whole configuration."""
    yield prefix, record
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _records(value, f"{prefix}.{field.name}".lstrip("."))


def _section(name: str, record: Any) -> str:
    rows = [_row(name, field, getattr(record, field.name)) for field in dataclasses.fields(record)
            if not dataclasses.is_dataclass(getattr(record, field.name))]
    if not rows:
        return ""
    about = (type(record).__doc__ or "").strip()
    text = "" if about.startswith(type(record).__name__ + "(") else f"{about}\n\n"
    head = "| field | default | what it is |\n|---|---|---|\n"
    return f"## {name or 'the whole run'}\n\n{text}{head}{''.join(rows)}\n"


def _row(name: str, field: dataclasses.Field, default: Any) -> str:
    shown = "preset" if default is None else f"`{default!r}`"
    choices = ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    text = ". One of: ".join(part for part in (field.metadata["help"], choices) if part)
    path = f"{name}.{field.name}".lstrip(".")
    return f"| `{path}` | {_cell(shown)} | {_cell(text)} |\n"


def _cell(text: str) -> str:
    code = text.startswith("`")
    # A star outside of code would begin emphasis.
    return (text if code else text.replace("*", r"\*")).replace("|", r"\|")


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.config_reference", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE",
                        help="the page; default: standard output")
    out = parser.parse_args(arguments).out
    if out is None:
        sys.stdout.write(markdown())
        return command_line.DONE
    try:
        out.write_text(markdown(), encoding="utf-8")
    except OSError as error:
        raise config.ConfigError(f"--out={out} cannot be written: {error.strerror}") from error
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
