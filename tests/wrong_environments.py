"""Environments that are refused when they are looked up, by tests/test_setup_environment.py."""

from dapo_jax.envs import episodes


def start(record, seed):
    return None, episodes.told(record["prompt"])


def start_without_seed(record):
    return None, episodes.told(record["prompt"])


async def later(state, text):
    return episodes.Turn("", 1.0, True)


def step(state, text):
    return episodes.Turn("", 1.0, True)


START = episodes.Environment("start", start_without_seed, step)
STEP = episodes.Environment("step", start, 3)
LATER = episodes.Environment("later", start, later)
PARTS = episodes.Environment("parts", start, step, parts="calls")
