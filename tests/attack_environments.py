"""What environments should not do, by the text of a turn; tests/test_episode_attacks.py."""

import ctypes
import json
import os
import sys
import time

import numpy as np

from dapo_jax.envs import episodes


def start(record, seed):
    """The state is the record, which `step` changes."""
    odd = {"object": object(), "half": "\ud800", "long": "x" * (episodes.LONGEST_TEXT + 1)}
    tell = record.get("tell")
    if tell == "exit":
        sys.exit("on purpose")
    messages = episodes.told(record["prompt"])
    return record, messages if tell is None else [messages[0] | {"content": odd[tell]}]


def step(state, text):
    """Something else than what the protocol asks for, or a turn that ends the episode."""
    state["prompt"] = state["answer"] = "changed"
    if text in DEEDS:
        DEEDS[text]()
    fields = {"reply": "", "reward": 1.0, "done": True, "state": state} | FIELDS.get(text, {})
    return None if text == "none" else episodes.Turn(**fields)


FIELDS = {
    "numpy": {"reward": np.float32(0.5), "parts": {"a": np.int64(2)}},
    "half": {"reply": "\ud800", "done": False}, "long": {"reply": "\U0001f600" * 50_000},
    "endless": {"reward": float("inf")}, "large": {"reward": -10**400}, "word": {"reward": "1"},
    "object": {"reply": object()}, "named": {"parts": {"a\n": 1.0}}, "own": {"state": print},
    "local": {"state": lambda: None}, "not done": {"done": None}}
DEEDS = {
    "exit": lambda: sys.exit(3), "library": lambda: json.loads("{"),
    "closed": lambda: os.closerange(3, 64),
    "fault": lambda: ctypes.string_at(0), "read": lambda: sys.stdin.read(),
    "loud": lambda: print("[\"done\", {}]\n" * 3000, flush=True),
    "stay": lambda: os.fork() or time.sleep(600)}

ATTACKS = episodes.Environment("attacks", start, step)
