"""Settings of a sweep, put together from small parts: lists of {field: value}.

A configuration file's `sweep()` returns such a list; fields are named as on the command line, with
or without `config.`:

    def sweep():
        rates = sweeps.grid({"rl.optimizer.learning_rate": (1e-4, 3e-4)})
        return sweeps.product(rates, sweeps.seeds(3))
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.config_fields import ConfigError

Setting = dict[str, Any]  # field -> value
Settings = list[Setting]
Draw = Callable[[np.random.Generator], Any]

SEED = "seed"  # the field over whose values tables average


def grid(values: Mapping[str, Iterable[Any]]) -> Settings:
    """Every combination, the last field fastest."""
    columns = _columns(values)
    return [dict(zip(columns, row, strict=True)) for row in itertools.product(*columns.values())]


def zip_(values: Mapping[str, Iterable[Any]]) -> Settings:
    """The first values of all fields, then the second, ...; ConfigError if some have fewer."""
    columns = _columns(values)
    if len(set(map(len, columns.values()))) > 1:
        raise ConfigError("zip_: as many values for each field: " + ", ".join(
            f"{name} has {len(column)}" for name, column in columns.items()))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def random(count: int, draws: Mapping[str, Draw], *, seed: int = 0) -> Settings:
    """`count` settings, each field drawn by itself: another field more changes no other's values,
    and a larger count goes on from a smaller one's."""
    if count < 1:
        raise ConfigError(f"random: count is {count}; at least 1")
    columns = {}
    for name, draw in draws.items():
        rng = np.random.default_rng([seed, zlib.crc32(_bare(name).encode())])
        columns[_bare(name)] = [draw(rng) for _ in range(count)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def uniform(low: float, high: float) -> Draw:
    """Evenly from [low, high)."""
    _ordered("uniform", low, high)
    return lambda rng: float(rng.uniform(low, high))


def log_uniform(low: float, high: float) -> Draw:
    """From [low, high) with an even logarithm, for rates; both above 0."""
    _ordered("log_uniform", low, high)
    if low <= 0:
        raise ConfigError(f"log_uniform: from {low}; it must be above 0")
    return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))


def integers(low: int, high: int) -> Draw:
    """Evenly from the whole numbers low to high, both included."""
    _ordered("integers", low, high)
    return lambda rng: int(rng.integers(low, high, endpoint=True))


def choice(options: Sequence[Any]) -> Draw:
    """Evenly from the options."""
    if not len(options):
        raise ConfigError("choice: there are no options")
    return lambda rng: options[int(rng.integers(len(options)))]


def product(*parts: Sequence[Setting]) -> Settings:
    """Every setting of the first with every one of the second, ...; no field in two of them."""
    joined: Settings = [{}]
    for part in parts:
        joined = [_merged(one, other) for one in joined for other in part]
    return joined


def chain(*parts: Sequence[Setting]) -> Settings:
    """All settings of the first, then all of the second, ..."""
    return [dict(one) for part in parts for one in part]


def conditional(settings: Sequence[Setting], when: Mapping[str, Any], then: Sequence[Setting]
                ) -> Settings:
    """Where a setting has all of `when`, that setting with each of `then`; the others as they are.

    ConfigError if none has: then a name or a value is mistyped.
    """
    wanted = {_bare(name): value for name, value in when.items()}
    chosen = [all(name in one and one[name] == value for name, value in wanted.items())
              for one in settings]
    if not any(chosen):
        raise ConfigError(f"conditional: no setting has {dict(wanted)}")
    return [made for one, holds in zip(settings, chosen, strict=True)
            for made in (product([one], then) if holds else [dict(one)])]


def seeds(count: int) -> Settings:
    """Seeds 0 to count - 1, over which tables average."""
    if count < 1:
        raise ConfigError(f"seeds: count is {count}; at least 1")
    return grid({SEED: range(count)})


def checked(settings: Any, where: str) -> Settings:
    """What a file's sweep() returned, with bare names; ConfigError if it is none or has repeats."""
    if not isinstance(settings, list | tuple) or not all(isinstance(s, Mapping) for s in settings):
        raise ConfigError(f"{where}: sweep() must return a list of {{field: value}}, as the "
                          f"functions of dapo_jax.sweeps make it, not {type(settings).__name__}")
    if not settings:
        raise ConfigError(f"{where}: sweep() returned no setting")
    bare = [{_bare(name): value for name, value in one.items()} for one in settings]
    for place, one in enumerate(bare):
        if one in bare[:place]:
            raise ConfigError(f"{where}: settings {bare.index(one)} and {place} of sweep() are the "
                              f"same: {one}")
    return bare


def _merged(one: Setting, other: Setting) -> Setting:
    if twice := one.keys() & other.keys():
        raise ConfigError(f"{', '.join(sorted(twice))}: set by two parts of a product")
    return {**one, **other}


def _columns(values: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    columns = {}
    for name, column in values.items():
        if isinstance(column, str) or not isinstance(column, Iterable):
            raise ConfigError(f"{name}: {column!r} is no list of values")
        columns[_bare(name)] = list(column)
    return columns


def _bare(name: str) -> str:
    return name.removeprefix("config.")


def _ordered(name: str, low: float, high: float) -> None:
    if not low < high:
        raise ConfigError(f"{name}: from {low} to {high}; the first must be the smaller")
