"""Metrics to Weights & Biases, where config.log.wandb names a project: optional, and only shown.

The package is imported only then. Its own variables hold: WANDB_MODE=offline keeps the run on the
disk, WANDB_API_KEY says who is logging.
"""

import importlib
import importlib.util
import logging
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.runtime import metrics

LOG = logging.getLogger(__name__)
ID_FILE = "wandb_id.txt"  # in the work directory: a run that goes on is the same run there


def check(project: str) -> None:
    """ConfigError if a project is named and the package is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise config.ConfigError(
            f"config.log.wandb is {project!r}, but the package wandb is not installed: pip install "
            "wandb, or leave the field empty")


def opened(project: str, workdir: pathlib.Path, values: Mapping[str, Any]) -> metrics.Logger | None:
    """Begin the run of a project, or go on with the one that `workdir` began; None without one.

    `values` is the configuration shown. ConfigError where the service refuses. What goes wrong
    later is said once and ends nothing: the same numbers are in metrics.jsonl.
    """
    if not project:
        return None
    check(project)
    wandb = importlib.import_module("wandb")
    try:
        run = wandb.init(project=project, id=_identity(workdir), name=workdir.resolve().name,
                         resume="allow", dir=str(workdir), config=dict(values))
    except Exception as error:  # the package has many kinds, and they change
        raise config.ConfigError(
            f"config.log.wandb is {project!r}, but wandb did not begin a run: {error}. Log in with "
            "`wandb login`, set WANDB_MODE=offline, or leave the field empty") from error
    broken: list[Exception] = []

    def guarded(act: Any, *arguments: Any, **named: Any) -> None:
        if broken:
            return
        try:
            act(*arguments, **named)
        except Exception as error:  # a display must not end what it shows
            broken.append(error)
            LOG.warning("wandb stopped: %s; the run goes on, its figures are in metrics.jsonl",
                        error)

    return metrics.Logger(lambda step, numbers: guarded(run.log, dict(numbers), step=step),
                          lambda: guarded(run.finish))


def _identity(workdir: pathlib.Path) -> str:
    path = workdir / ID_FILE
    if not path.exists():
        path.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
