"""Demonstrations that are episodes: what an environment shows, played on it once."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.data import encoding
from dapo_jax.envs import environments, episodes

Record = Mapping[str, Any]


def with_episodes(
    records: Sequence[Record], environment: episodes.Environment, cfg: config.Environment
) -> list[Record]:
    """Records with an episode in place of their demonstration, in `demonstrated` of all; which,
    the prompt alone decides. ConfigError: what is shown cannot be played to its end.

    Only the model's turns are to be learned. Under a `role` the episode is a chat's messages.
    """
    show = environment.shown
    if show is None:
        return list(records)

    def played(record: Record) -> Record:
        return environments.asked(
            environment, f"the episode shown for {record['prompt']!r:.80}",
            lambda: _shown(record, environment, show(copy.deepcopy(record)), cfg.role))

    return [played(record) if _share(record) < cfg.demonstrated else record for record in records]


def _share(record: Record) -> float:
    """A number from [0, 1) that the prompt fixes."""
    digest = hashlib.blake2b(repr(record["prompt"]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _shown(
    record: Record, environment: episodes.Environment, texts: Sequence[str], role: str
) -> Record:
    """The record with the episode in which the model writes these texts; ValueError: they do not
    make a whole one."""
    said: list[tuple[str, str]] = []  # role, text
    begun = environment.start(copy.deepcopy(record), 0)  # which may change what it gets
    if fault := episodes.fault_of_start(begun):
        raise ValueError(fault)
    state, done = begun[0], False
    for text in texts:
        if done:
            raise ValueError(f"it is over before the text {text!r:.80}")
        turn = environment.step(state, text)
        if fault := episodes.fault_of_turn(turn):
            raise ValueError(fault)
        state, done = turn.state, turn.done
        said += [("assistant", text), (role, turn.reply)]
    if not done:
        raise ValueError(f"it is not over after {len(said) // 2} turns")
    said.pop()  # what the environment says at the end is told to nobody
    if role:
        messages = [{"role": one, "content": text} for one, text in said]
        rest = {name: value for name, value in record.items() if name != "demonstration"}
        return {**rest, "prompt": [*episodes.told(record["prompt"]), *messages]}
    return {**record, "demonstration": "".join(text for _, text in said),
            encoding.SEGMENTS: tuple((text, one == "assistant") for one, text in said)}
