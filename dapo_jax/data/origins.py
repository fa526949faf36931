"""Which files a split is made of: one, or a mixture of several, each with its own layout."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.data import files, formats, scan

LARGE = 8 * 2 ** 20  # bytes of files from which on several processes read them
# Keys of a mixture's source that stand for a field of the task.
_FIELDS = ("format", "prompt_field", "answer_field", "answer_rule", "demonstration_field")
_KEYS = ("path", "name", "split", "weight", *_FIELDS)


@dataclasses.dataclass(frozen=True)
class Source:
    """One file or TFDS folder of a split."""

    path: str
    kind: str
    split: str  # of TFDS
    rules: scan.Rules
    weight: float  # share of the mixture; 0: as its size is


def configured(task: config.Task, split: str, convert: str) -> tuple[Source, ...]:
    """The files that the configuration names for a split; none if it names none."""
    several = {"train": task.train_sources, "eval": task.eval_sources}[split]
    path = {"train": task.train_path, "eval": task.eval_path}[split]
    field = f"config.task.{split}_sources"
    if several and path:
        raise config.ConfigError(f"{field} and config.task.{split}_path are both given: leave one "
                                 "of them out")
    if path:
        return (_source({"path": path}, task, split, convert),)
    made = [_source(_named(given, f"{field}[{at}]"), task, split, convert)
            for at, given in enumerate(several)]
    weights = [source.weight for source in made]
    if any(weights) and not all(weights):
        raise config.ConfigError(f"{field}: some have a weight and some have none; give all of "
                                 "them one, above 0, or none")
    return tuple(made)


def _named(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("path"), str):
        raise config.ConfigError(f"{where} is {given!r}; it must be a dict with a 'path'")
    for key in given:
        if key not in _KEYS:
            raise config.ConfigError(f"{where}: unknown key {key!r}{config.near(key, _KEYS)}; "
                                     f"there are: {', '.join(_KEYS)}")
    for key in _KEYS:
        if key != "weight" and not isinstance(given.get(key, ""), str):
            raise config.ConfigError(f"{where}: {key} is {given[key]!r}, not a text")
    weight = given.get("weight", 0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < 1e9:
        raise config.ConfigError(f"{where}: weight is {weight!r}, not a number from 0")
    for key, choices in (("format", formats.FORMATS), ("answer_rule", formats.RULES)):
        if key in given and given[key] not in choices:
            raise config.ConfigError(f"{where}: {key} is {given[key]!r}; allowed: "
                                     f"{', '.join(choices)}")
    return given


def _source(given: Mapping[str, Any], task: config.Task, split: str, convert: str) -> Source:
    path = given["path"]
    kind = "jsonl" if task.name == "jsonl" and _is_odd(path) else files.kind(path)
    form = formats.of(task, {name: given[name] for name in _FIELDS if name in given})
    if kind == "parquet":
        _check_columns(path, form)
    part = given.get("split", {"train": task.train_split, "eval": task.eval_split}[split])
    whole = pathlib.Path(path)
    name = given.get("name") or (whole.resolve().parent.name if kind == "tfds" else whole.stem)
    return Source(path, kind, part, scan.Rules(form, name, _where(task.where), convert),
                  float(given.get("weight", 0)))


def _check_columns(path: str, form: formats.Format) -> None:
    """ConfigError where no row can have a field; other kinds of files say it row by row."""
    there = files.columns(path)
    for field in (form.prompt, form.answer):
        if not any(choice in there or choice.split(".")[0] in there for choice in field.split("|")):
            raise config.ConfigError(f"{path} has no column {field!r}; it has: "
                                     f"{', '.join(there)}. Set config.task.format, or "
                                     "prompt_field and answer_field")


def _is_odd(path: str) -> bool:
    """Whether a file's name does not say of what kind it is."""
    return not pathlib.Path(path).is_dir() and (
        pathlib.Path(path).suffix.lower() not in files.SUFFIXES)


def _where(given: tuple) -> tuple[tuple[str, tuple], ...]:
    for pair in given:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
                and isinstance(pair[1], tuple)
                and all(isinstance(value, (str, int, float)) for value in pair[1])):
            raise config.ConfigError(f"config.task.where holds {pair!r}; it must hold pairs such "
                                     "as ('level', ('Level 4', 'Level 5'))")
    return given


def stamp(path: str) -> tuple[int, ...]:
    """What changes with a file's content."""
    try:
        about = pathlib.Path(path).stat()
    except OSError as error:
        raise config.ConfigError(f"cannot read {path!r}: {error.strerror}") from error
    return about.st_size, about.st_mtime_ns, about.st_ino


def large(found: Sequence[Source]) -> bool:
    """Whether the files are worth several processes, and a cache of what is made of them."""
    return sum(files.size(source.path) for source in found) >= LARGE
