"""What a study is: how it is asked for, and what it leaves."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from dapo_jax.runtime import status_line
from dapo_jax.studies import jobs


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command was told."""

    out: pathlib.Path
    quick: bool  # a few steps of a tiny model: shows that it works, says nothing
    only: tuple[str, ...]  # parts to run; the page shows all that is there
    seeds: int
    at_once: int  # processes


@dataclasses.dataclass(frozen=True)
class Result:
    """What was written, and what failed."""

    paths: Sequence[pathlib.Path]
    failures: Sequence[jobs.Failure]


@dataclasses.dataclass(frozen=True)
class Study:
    """One entry of the table of studies."""

    parts: Mapping[str, str]  # name -> what it is
    run: Callable[[Options, Sequence[int], status_line.Show], Result]  # the numbers are signals
