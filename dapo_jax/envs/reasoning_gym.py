"""The procedural tasks of the package reasoning-gym, each with its own scorer.

config.task.dataset names one, or several with commas between them, which are drawn evenly. Their
settings are config.task.options: pairs of name and value, "name" for all that have it or
"dataset.name" for one. `python -m dapo_jax.envs` lists them. Some of the scorers hand the answer to
sympy's parser, which evaluates it as Python: they run in the scoring processes only.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.envs import base, options, templates

LOG = logging.getLogger(__name__)
FULL = 0.99  # of the scorers' partial credit: from here on an answer is right
CHUNKS = 6  # in which a data set is drawn, each twice the last, before it counts as used up
FAILURES = 20  # problems in a row that cannot be made, before the data set counts as unusable
LONGEST = 10_000  # characters of an answer that are scored
LEFT_OUT = ("composite",)  # mixes others, which config.task.dataset does by itself
# What scorers raise on answers of another form than they expect: such an answer is wrong.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)

Drawn = tuple[Mapping[str, Any], ...]


def names() -> list[str]:
    """All data sets there are; ConfigError if the package is not installed."""
    return sorted(set(_package().factory.DATASETS) - set(LEFT_OUT))


def build(cfg: config.Config, split: str) -> tuple[list[base.Record], dict[str, int]]:
    """Records of `split` and how many fewer there are than the configuration asks for.

    Which split a question belongs to depends on the question alone, so no question is in both,
    whatever the seed and the sizes.
    """
    chosen = [name.strip() for name in cfg.task.dataset.split(",") if name.strip()]
    settings = _settings(chosen, options.pairs(cfg.task.options))
    sizes = (cfg.task.train_size, cfg.eval.prompts)
    shares = [tuple(math.ceil(size / len(chosen)) for size in sizes)] * len(chosen)
    parts = []
    for name, (train, held_out) in zip(chosen, shares, strict=True):
        drawn = _draw(name, settings[name], seed=cfg.seed, train=train + cfg.task.shots,
                      held_out=held_out)
        shots, rest = drawn[0][:cfg.task.shots], drawn[0][cfg.task.shots:]
        entries = rest if split == "train" else drawn[1]
        parts.append([_record(cfg.task, entry, shots, name=name, settings=settings[name])
                      for entry in entries])
    mixed = [record for row in itertools.zip_longest(*parts) for record in row if record]
    mixed = mixed[:sizes[split == "eval"]]
    if not all("demonstration" in record for record in mixed):  # all records have one, or none
        mixed = [{**record, "demonstration": None} for record in mixed]
    return mixed, {"missing": sizes[split == "eval"] - len(mixed)}


def score(text: str, record: Mapping[str, Any]) -> float:
    """1.0 if the data set's own scorer gives the final answer full marks, else 0.0."""
    return float(partial(text, record) >= FULL)


def partial(text: str, record: Mapping[str, Any]) -> float:
    """What the data set's own scorer gives the final answer, partial credit included."""
    scorer = _dataset(record["dataset"], record["options"])
    try:
        return float(scorer.score_answer(extract(text, record), record["entry"]))
    except MALFORMED:
        return 0.0


def extract(text: str, record: Mapping[str, Any]) -> str:
    """The final answer as the scorer gets it."""
    return templates.final_answer(text)[:LONGEST]


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise config.ConfigError(
            f"the task reasoning_gym needs the package reasoning-gym ({error}): pip install -r "
            "requirements-optional.txt") from error
    return reasoning_gym


def _settings(chosen: list[str], given: Mapping[str, Any]) -> dict[str, tuple]:
    """Pairs for each data set; ConfigError for one that does not exist and a setting it lacks."""
    if not chosen:
        raise config.ConfigError("config.task.dataset is empty: name a data set of reasoning-gym; "
                                 "python -m dapo_jax.envs lists them")
    for name in chosen:
        if name not in names():
            raise config.ConfigError(f"config.task.dataset: reasoning-gym has no {name!r}"
                                     f"{config.near(name, names())}")
    result: dict[str, dict] = {name: {} for name in chosen}
    for option, value in given.items():
        owner, _, field = option.rpartition(".")
        takers = [name for name in chosen if owner in ("", name) and field in _fields(name)]
        if not takers or field in ("seed", "size"):
            known = sorted({field for name in chosen for field in _fields(name)})
            raise config.ConfigError(
                f"config.task.options: no setting {option!r} of {', '.join(chosen)}"
                f"{config.near(field, known)} (there are: {', '.join(known)}; seed and size are "
                "config.seed, config.task.train_size and config.eval.prompts)")
        for name in takers:
            result[name][field] = value
    return {name: tuple(values.items()) for name, values in result.items()}


def _fields(name: str) -> list[str]:
    fields = dataclasses.fields(_package().factory.DATASETS[name][1])
    return [field.name for field in fields if field.name not in ("seed", "size")]


@functools.lru_cache(maxsize=256)
def _dataset(name: str, settings: tuple, seed: int = 0, size: int = 1) -> Any:
    try:
        return _package().create_dataset(name, seed=seed, size=size, **dict(settings))
    except (AssertionError, ValueError, TypeError) as error:
        raise config.ConfigError(f"config.task.options {settings!r} do not suit reasoning-gym's "
                                 f"{name!r}: {error}") from error


@functools.lru_cache(maxsize=32)
def _draw(name: str, settings: tuple, *, seed: int, train: int, held_out: int
          ) -> tuple[Drawn, Drawn]:
    """Up to `train` and `held_out` entries with different questions, drawn in one go."""
    found: tuple[dict, dict] = ({}, {})
    wanted = (train, held_out)
    each = base.HELD_OUT
    for entry in _entries(name, settings, seed=seed,
                          size=max(train * each // (each - 1), held_out * each, 16)):
        side = base.held_out(entry["question"])
        if len(found[side]) < wanted[side]:
            found[side].setdefault(entry["question"], entry)
        if all(len(part) >= number for part, number in zip(found, wanted, strict=True)):
            break
    return tuple(found[0].values()), tuple(found[1].values())


def _entries(name: str, settings: tuple, *, seed: int, size: int) -> Iterator[Mapping[str, Any]]:
    """Entries chunk by chunk. Item i of seed s is item i - 1 of s + 1: hence the hashed seeds."""
    failed = in_a_row = 0
    for chunk in range(CHUNKS):
        dataset = _dataset(name, settings, _seed(name, seed, chunk), size << chunk)
        for index in range(size << chunk):
            try:
                entry = dataset[index]
            except (ValueError, AssertionError, LookupError, ArithmeticError) as error:
                failed, in_a_row, last = failed + 1, in_a_row + 1, error
                if in_a_row == FAILURES:
                    raise config.ConfigError(
                        f"config.task.dataset: reasoning-gym's {name!r} with {dict(settings)} made "
                        f"no problem in {FAILURES} attempts, at last: {last}") from last
                continue
            in_a_row = 0
            yield entry
    LOG.warning("reasoning-gym's %r ran out of different questions (%d could not be made)", name,
                failed)


def _seed(name: str, seed: int, chunk: int) -> int:
    digest = hashlib.blake2b(f"{name} {seed} {chunk}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _record(task: config.Task, entry: Mapping[str, Any], shots: Drawn, *, name: str,
            settings: tuple) -> base.Record:
    solved = [(shot["question"], answer(shot)) for shot in shots]
    record = {"prompt": templates.few_shot(task.template, solved, entry["question"]),
              "answer": answer(entry), "entry": entry, "dataset": name, "options": settings}
    return record if entry["answer"] is None else {
        **record, "demonstration": templates.answered(task.template, answer(entry))}


def answer(entry: Mapping[str, Any]) -> str:
    """The entry's answer, or base.NO_ANSWER where the scorer needs none to compare with."""
    return base.NO_ANSWER if entry["answer"] is None else str(entry["answer"])


TASK = base.Task(
    "reasoning_gym", build, "dapo_jax.envs.reasoning_gym:score",
    "dapo_jax.envs.reasoning_gym:extract",
    purpose="procedural tasks of the package reasoning-gym, by config.task.dataset")
