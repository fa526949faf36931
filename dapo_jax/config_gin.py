"""Fields set in Gin's language (package gin-config): `config.rl.steps = 50`, a line each.

Only the language is used: bindings, blocks, macros (`rate = 1e-4`, then `%rate`) and `include`.
What gin would import or call (`import`, `@references`) and scopes are refused: a configuration has
fields alone.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from dapo_jax.config_fields import ConfigError

DEEPEST = 8  # files that include one another
PREFIX = "config"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field's new value; `where` says who set it."""

    name: str  # such as rl.steps
    value: Any
    where: str


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class _Reading:
    parser: ModuleType
    macros: dict[str, Any]
    places: dict[str, str]  # of macros that are not used so far


def read(files: Sequence[str], bindings: Sequence[str]) -> list[Setting]:
    """What the files and then the bindings set, in order; a later one wins.

    A macro holds in all that follows it. Raises ConfigError, with file and line, for what cannot
    be read, and where the package is missing.
    """
    if not files and not bindings:
        return []
    reading, found = _Reading(_parser(), {}, {}), []
    for path in files:
        found += _file(reading, pathlib.Path(path), depth=0)
    for text in bindings:
        found += _statements(reading, text, f"--gin_binding={text}")
    for name, where in reading.places.items():
        raise ConfigError(f"{where}: {name} is a macro that nothing uses as %{name}; fields are "
                          f"named {PREFIX}.a.b, as on the command line")
    return found


def _parser() -> ModuleType:
    try:
        return importlib.import_module("gin.config_parser")
    except ImportError as error:
        raise ConfigError("--gin_file and --gin_binding need the package gin-config: pip install "
                          f"-r requirements-optional.txt ({error})") from error


def _file(reading: _Reading, path: pathlib.Path, *, depth: int) -> list[Setting]:
    if depth > DEEPEST:
        raise ConfigError(f"{path}: included through more than {DEEPEST} files; does one include "
                          "itself?")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a Gin file: {error}") from error
    return _statements(reading, text, str(path), depth=depth, folder=path.parent)


def _statements(reading: _Reading, text: str, where: str, *, depth: int = 0,
                folder: pathlib.Path | None = None) -> list[Setting]:
    """The settings of one text, of a file in `folder` or (None) of the command line."""
    found, parser = [], reading.parser
    for one in _parsed(parser, text, where):
        line = where if folder is None else f"{where}, line {one.location.line_num}"
        if isinstance(one, parser.IncludeStatement):
            found += _file(reading, (folder or pathlib.Path()) / one.filename, depth=depth + 1)
        elif isinstance(one, parser.ImportStatement):
            raise ConfigError(f"{line}: import is not supported: a configuration has fields alone")
        elif isinstance(one, parser.BindingStatement):
            found += _binding(reading, one, line)
    return found


def _binding(reading: _Reading, one: Any, line: str) -> list[Setting]:
    """A field's setting; nothing for a macro, which is kept."""
    if one.scope:
        raise ConfigError(f"{line}: the scope {one.scope}/ is not supported")
    value = _value(reading, one.value, line)
    if one.arg_name:
        return [Setting(_field(f"{one.selector}.{one.arg_name}", line), value, line)]
    reading.macros[one.selector] = value
    reading.places[one.selector] = line
    return []


def _parsed(parser: ModuleType, text: str, where: str) -> Iterator[Any]:
    class Delegate(parser.ParserDelegate):  # type: ignore[name-defined]  # known when it runs
        """What the parser makes of macros and references."""

        def configurable_reference(self, scoped_name: str, evaluate: bool) -> Any:
            """References would call functions."""
            raise ConfigError(f"@{scoped_name} is not supported: a configuration has fields alone")

        def macro(self, macro_name: str) -> _Macro:
            """Found later, when those before it are known."""
            return _Macro(macro_name)

    try:
        yield from parser.ConfigParser(text, Delegate())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _field(name: str, where: str) -> str:
    if not name.startswith(f"{PREFIX}."):
        raise ConfigError(f"{where}: {name} is no field; fields are named {PREFIX}.a.b, as on the "
                          f"command line: {PREFIX}.{name}?")
    return name.removeprefix(f"{PREFIX}.")


def _value(reading: _Reading, value: Any, where: str) -> Any:
    """The value with each macro replaced."""
    if isinstance(value, _Macro):
        if value.name not in reading.macros:
            raise ConfigError(f"{where}: the macro %{value.name} is not set before this line")
        reading.places.pop(value.name, None)
        return reading.macros[value.name]
    if isinstance(value, list | tuple):
        return type(value)(_value(reading, one, where) for one in value)
    if isinstance(value, dict):
        return {key: _value(reading, one, where) for key, one in value.items()}
    return value
