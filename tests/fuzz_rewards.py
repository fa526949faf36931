"""Reward functions of test_scoring_fuzz.py, run in its workers."""

import os
import time

import pool_rewards

from dapo_jax.envs import math


def timed(text, record):
    begin = time.monotonic()
    task = math.score(text, record)
    return {"task": task, "seconds": time.monotonic() - begin}


def poisoned(text, record):
    """A number is its own reward; a word is a way to fail."""
    if text == "fork":  # a child that leaves the group, and the parent's sudden end
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        os._exit(1)
    if text in ("nan", "str"):
        return {"nan": float("nan"), "str": "1"}[text]
    return pool_rewards.act(text, record)
