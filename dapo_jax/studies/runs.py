"""Runs of a study: work directories that the train command fills, each a process of its own."""

import dataclasses
import json
import pathlib
import shutil

from dapo_jax import command_line, config, journal
from dapo_jax.runtime import checkpoint, metrics
from dapo_jax.studies import jobs, learning


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration file with changes, and where its run goes."""

    config: pathlib.Path
    out: pathlib.Path  # of the study
    name: str  # below it
    changes: tuple[str, ...]  # a.b=VALUE, the later ones win

    @property
    def workdir(self) -> pathlib.Path:
        """The directory of the run."""
        return self.out / self.name


def flags(one: Run) -> list[str]:
    """What the train command is told."""
    changed = dict(change.split("=", 1) for change in one.changes)
    return [f"--config={one.config}", f"--workdir={one.workdir}",
            *(f"--config.{name}={value}" for name, value in changed.items())]


def log(out: pathlib.Path, name: str) -> pathlib.Path:
    """Where a process of the study prints to."""
    return out / "logs" / f"{name.replace('/', '_')}.txt"


def job(one: Run, *, warm: Run | None = None) -> jobs.Job:
    """The job of a run; `warm`: it begins from where this one ended.

    Raises ConfigError if the directory holds a run of another configuration, or the study's
    configuration file is not there.
    """
    if not one.config.is_file():
        raise config.ConfigError(f"{one.config} does not exist: run this from the project's folder")
    cfg, _ = command_line.parse(flags(one), program="python -m dapo_jax.train", purpose="",
                                extra={"workdir": command_line.Flag(None, "")})
    checkpoint.check_config(one.workdir, config.to_json(cfg), free=journal.FREE)
    last = cfg.sft.steps + cfg.rl.steps

    def prepare() -> None:
        if warm is not None and not (one.workdir / "config.json").exists():
            adopt(warm.workdir, one.workdir, cfg)

    return jobs.Job(
        one.name, ("-m", "dapo_jax.train", *flags(one)), log(one.out, one.name),
        done=lambda: (learning.finished(one.workdir)
                      and (one.workdir / "checkpoints" / str(last)).is_dir()),
        status=lambda: f"step {newest_step(one.workdir)}/{last}", prepare=prepare)


def adopt(source: pathlib.Path, workdir: pathlib.Path, cfg: config.Config) -> None:
    """Make `workdir` a run of `cfg` that stands where the run in `source` ended.

    The state after SFT does not depend on what differs here; equal settings would give it again,
    in a quarter of a run's time.
    """
    if not (source / "checkpoints").is_dir():
        return  # the warm start failed: the run makes its own
    fresh = workdir.with_name(workdir.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shutil.copytree(source / "checkpoints", fresh / "checkpoints")
    shutil.copy(source / "metrics.jsonl", fresh / "metrics.jsonl")
    stored = json.loads((source / "config.json").read_text(encoding="utf-8"))
    checkpoint.write_config(
        fresh, config.to_json(cfg) | {"_environment": stored["_environment"]})
    shutil.rmtree(workdir, ignore_errors=True)  # without a config.json there is nothing in it
    fresh.replace(workdir)


def newest_step(workdir: pathlib.Path) -> int:
    """The newest step that the run has logged; 0 if none."""
    path = workdir / "metrics.jsonl"
    lines = metrics.whole_lines(path.read_bytes()) if path.is_file() else []
    return json.loads(lines[-1])["step"] if lines else 0
