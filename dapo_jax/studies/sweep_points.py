"""The runs of a sweep: which there are, where each goes, and which are over."""

import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any

from dapo_jax import command_line, config, config_file, config_gin, journal, sweeps
from dapo_jax.runtime import checkpoint, processes

LONGEST = 120  # characters of a folder's name
FINISHED = "finished.json"  # in a run's folder: the configuration that it finished


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str  # of its folder: its setting
    setting: sweeps.Setting
    cfg: config.Config
    workdir: pathlib.Path


def read(flags: Sequence[str], out: pathlib.Path) -> tuple[list[Point], dict[str, Any]]:
    """The points of the file that `flags` (those of the train command but for --workdir) name, all
    of them checked, and the values of the flags of processes.

    Raises ConfigError for a wrong one, or one whose folder holds a run of another configuration.
    """
    cfg, values = _parsed(flags, {}, "")
    del cfg  # the file alone is in order: what is wrong below is a setting's fault
    path = command_line.config_path(flags)
    found = config_file.call(path, "sweep")
    if found is None:
        raise config.ConfigError(f"{path} has no function sweep(); see configs/sweeps/")
    points = []
    for place, setting in enumerate(sweeps.checked(found, path)):
        _check_flags(setting, flags)
        cfg, _ = _parsed(flags, setting, f"{path}, setting {place} of sweep()")
        name = name_of(setting)
        points.append(Point(name, setting, cfg, out / "runs" / name))
    for point in points:
        checkpoint.check_config(point.workdir, config.to_json(point.cfg), free=journal.FREE)
    return points, values


def _parsed(flags: Sequence[str], setting: sweeps.Setting, where: str
            ) -> tuple[config.Config, dict[str, Any]]:
    changes = [config_gin.Setting(name, value, where) for name, value in setting.items()]
    try:
        return command_line.parse(flags, program="python -m dapo_jax.sweep", purpose="",
                                  extra=processes.FLAGS, changes=changes)
    except config.ConfigError as error:
        if not where or where in str(error):
            raise
        raise config.ConfigError(f"{where}: {error}") from error


def _check_flags(setting: sweeps.Setting, flags: Sequence[str]) -> None:
    given = {flag.lstrip("-").split("=")[0].removeprefix("config.") for flag in flags
             if flag.lstrip("-").startswith("config.")}
    if both := sorted(given & setting.keys()):
        raise config.ConfigError(f"--config.{both[0]} is what the sweep varies; leave it out, or "
                                 "take it out of sweep()")


def name_of(setting: sweeps.Setting) -> str:
    """A folder's name that says the setting, and is no other's."""
    plain = ",".join(f"{name}={value}" for name, value in setting.items()) or "as_it_is"
    name = re.sub(r"[^\w.=,+-]+", "_", plain)
    if name == plain and len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{zlib.crc32(plain.encode()):08x}"


def find(points: Sequence[Point], wanted: str) -> Point:
    """The point of that index, from 0, or of that name."""
    for place, point in enumerate(points):
        if wanted in (point.name, str(place)):
            return point
    raise config.ConfigError(f"--index={wanted}: there are 0 to {len(points) - 1}, and no setting "
                             "of that name; has the file changed?")


def done(point: Point) -> bool:
    """Whether this very configuration was run to its end."""
    path = point.workdir / FINISHED
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == config.to_json(
        point.cfg)


def finish(point: Point) -> None:
    """Note that the run came to its end."""
    path = point.workdir / FINISHED
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(config.to_json(point.cfg), indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
