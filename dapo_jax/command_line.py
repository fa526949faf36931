"""Flags, help and exit statuses, alike for every `python -m dapo_jax.<name>`."""

import argparse
import contextlib
import dataclasses
import logging
import operator
import os
import pathlib
import select
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from dapo_jax import config, config_checks, config_file, config_gin

DONE, BAD_INPUT, LIMIT, INTERRUPTED, NO_READER, TERMINATED = 0, 2, 3, 130, 141, 143


@dataclasses.dataclass(frozen=True)
class Flag:
    """One `--name=value` beside --config."""

    default: Any  # its type is the flag's type; None: a required text
    help: str


def parse(
    arguments: Sequence[str], *, program: str, purpose: str, extra: Mapping[str, Flag],
    changes: Sequence[config_gin.Setting] = ()
) -> tuple[config.Config, dict[str, Any]]:
    """The checked configuration and the other flags' values.

    The file, what is bound in Gin, --config.a.b and `changes` set fields in this order. Raises
    ConfigError for anything wrong; prints help and leaves with status 0 for --help.
    """
    if {"--help", "-h", "-help"} & set(arguments):
        print(describe(program, purpose, extra))
        raise SystemExit(DONE)
    path, arguments = _take_config(arguments, program)
    bound, arguments = _take_gin(arguments)
    values, chosen = flags.FlagValues(), config_file.load(path)
    config_file.set_fields(chosen, bound)
    for name, flag in extra.items():
        kind = flags.DEFINE_integer if isinstance(flag.default, int) else flags.DEFINE_string
        kind(name, flag.default, flag.help, flag_values=values)
    try:
        config_flags.DEFINE_config_dict("config", chosen, flag_values=values,
                                        sys_argv=[program, *arguments])
        rest = values([program, *arguments])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise config.ConfigError(_explain(error, arguments, extra, program)) from error
    if rest:
        raise config.ConfigError(f"unexpected argument {rest[0]!r}; flags are --name=value; "
                                 f"see {program} --help")
    for name in (name for name, flag in extra.items() if flag.default is None):
        if not values[name].value:
            raise config.ConfigError(f"--{name} is missing; see {program} --help")
    config_file.set_fields(values["config"].value, changes)
    cfg = config_checks.from_dict(values["config"].value)
    return cfg, {name: values[name].value for name in extra}


def _take_config(arguments: Sequence[str], program: str) -> tuple[str, list[str]]:
    """The path given by --config, and the other arguments."""
    path, rest, waiting = "", [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if waiting:
            path, waiting = argument, False
        elif name in ("--config", "-config"):
            path, waiting = value, not equals
        else:
            rest.append(argument)
    if not path:
        files = [value for one in rest if (value := one.rpartition("=")[2]).endswith(".py")]
        hint = f"; did you mean --config={files[0]}?" if files else ""
        raise config.ConfigError(f"--config=FILE is missing{hint}; see {program} --help")
    return path, rest


def config_path(arguments: Sequence[str]) -> str:
    """The path given by --config; ConfigError if there is none."""
    return _take_config(arguments, "the command")[0]


def _take_gin(arguments: Sequence[str]) -> tuple[list[config_gin.Setting], list[str]]:
    """What each --gin_file and --gin_binding sets, and the other arguments."""
    found: dict[str, list[str]] = {"gin_file": [], "gin_binding": []}
    rest, waiting = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = name.removeprefix("-").removeprefix("-") if argument.startswith("-") else ""
        if waiting:
            found[waiting].append(argument)
            waiting = ""
        elif name not in found:
            rest.append(argument)
        elif equals:
            found[name].append(value)
        else:
            waiting = name
    if waiting or not all(all(each) for each in found.values()):
        raise config.ConfigError("--gin_file=FILE or --gin_binding='config.a.b = VALUE' has no "
                                 "value")
    return config_gin.read(found["gin_file"], found["gin_binding"]), rest


def _explain(error: Exception, arguments: Sequence[str], extra: Iterable[str],
             program: str) -> str:
    """Name the overridden field or the flag that does not exist, with its neighbours; else the
    error."""
    known = config_file.field_names()
    for argument in arguments:
        name = argument.lstrip("-").split("=")[0]
        path = name.removeprefix("config.")
        if name.startswith("config.") and path not in known:
            return f"unknown field {name}{config.near(path, known)} ({program} --help lists all)"
    if isinstance(error, flags.UnrecognizedFlagError):
        names = [f"--{known}" for known in ("config", "gin_file", "gin_binding", *extra)]
        wrong = f"--{error.flagname}"
        return f"unknown flag {wrong}{config.near(wrong, names)} ({program} --help lists all)"
    return str(error)


def describe(program: str, purpose: str, extra: Mapping[str, Flag]) -> str:
    """The text of --help."""
    lines = [purpose.strip(), "", f"usage: {program} --config=FILE [--config.a.b=VALUE ...] "
             + " ".join(f"[--{name}=...]" if flag.default is not None else f"--{name}=..."
                        for name, flag in extra.items()),
             "", "  --config=FILE", "      a Python file whose get_config() returns "
             "dapo_jax.config.default() with changes; see configs/",
             "  --gin_file=FILE, --gin_binding='config.a.b = VALUE'",
             "      the same fields in Gin's language (package gin-config), before --config.a.b; "
             "repeatable"]
    for name, flag in extra.items():
        default = "" if flag.default is None else flag.default
        lines += [f"  --{name}={default}", _indented(flag.help)]
    lines += ["", "exit status: 0 done, 2 bad configuration or data, 3 stopped by a limit, "
              "143 saved and left on SIGTERM (130: on Ctrl-C)", "",
              "configuration fields (--config.NAME=VALUE), with defaults:"]
    defaults = config.Config()
    for name, field in config_file.field_names().items():
        # Not field.default: a section may be made with other values.
        default = operator.attrgetter(name)(defaults)
        text = field.metadata["help"]
        if field.metadata["choices"]:
            text = f"{text}{': ' if text else ''}{' | '.join(field.metadata['choices'])}"
        lines.append(f"  {name} = {'preset' if default is None else repr(default)}")
        lines.append(_indented(text))
    return "\n".join(lines)


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6,
                         break_on_hyphens=False)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def check_folder(folder: pathlib.Path, *, flag: str) -> None:
    """Refuse, by ConfigError, a `--flag` whose folder is none and cannot be made: what is computed
    first would be lost."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise config.ConfigError(f"--{flag}: {folder} cannot be written: {there} is no folder that "
                                 "this user may write to") from error


def leave(main: Callable[[Sequence[str]], int]) -> None:
    """Run an entry and leave with its status; bad input ends with one clear message, and so does
    an interrupt that the entry does not wait for."""
    # Some import has given the root logger a handler already.
    logging.basicConfig(format="%(message)s", stream=sys.stderr, force=True)
    try:
        status = main(sys.argv[1:])
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise
        status = NO_READER
    sys.exit(status)


def _reader_left() -> bool:
    """Whether standard output goes to a program that has ended, such as head; it is given up."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
        return False
    # Python flushes again when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The list of signals received: the first SIGTERM or SIGINT is noted there, for the caller to
    end in order; a second one acts as usual."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        # Not by logging: the signal may have interrupted it while it holds its lock.
        os.write(2, b"signal received: saving after what is under way (again: at once)\n")
        for one, handler in before.items():
            signal.signal(one, handler)

    before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
