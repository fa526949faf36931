"""What the tests of the scoring pool share."""

import time

from dapo_jax import config
from dapo_jax.envs import pool


def start(name, **settings):
    return pool.open(f"pool_rewards:{name}",
                     config.Scoring(**{"timeout": 20.0, **settings}))


def run(name, texts, records=None, **settings):
    with start(name, **settings) as workers:
        return pool.score(workers, texts, records or [{}] * len(texts))


def gone(pid, within=10.0):
    limit = time.monotonic() + within
    while True:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        if time.monotonic() >= limit:
            return False
        time.sleep(0.02)
