"""Functions that tests give to data.workers, in a module that imports little."""

import os

from dapo_jax import config


def given(value):
    return value


def refuse(ready, job):
    if job == "leave":
        os._exit(3)
    raise config.ConfigError(f"{ready} {job}")


def doubled(ready, job):
    return ready, 2 * job
