"""Demonstrations that are episodes: what an environment shows, played on it once."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax import config
from dapo_jax.data import encoding
from dapo_jax.envs import episodes

Record = Mapping[str, Any]


def with_episodes(
    records: Sequence[Record], environment: episodes.Environment, cfg: config.Environment
) -> list[Record]:
    """Records with an episode in place of their demonstration, in `demonstrated` of all; which,
    the prompt alone decides. ConfigError: an episode that is shown is not over at its end.

    Only the model's turns are to be learned. Under a `role` the episode is a chat's messages.
    """
    if environment.shown is None:
        return list(records)
    return [_shown(record, environment, cfg.role) if _share(record) < cfg.demonstrated else record
            for record in records]


def _share(record: Record) -> float:
    """A number from [0, 1) that the prompt fixes."""
    digest = hashlib.blake2b(repr(record["prompt"]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _shown(record: Record, environment: episodes.Environment, role: str) -> Record:
    state, _ = environment.start(record, 0)
    said: list[tuple[str, str]] = []  # role, text
    assert environment.shown is not None, "asked only of environments that show episodes"
    for text in environment.shown(record):
        turn = environment.step(state, text)
        state = turn.state
        said += [("assistant", text), (role, turn.reply)]
    if not said or not turn.done:
        raise config.ConfigError(f"environment {environment.name!r}: the episode that it shows for "
                                 f"{record['prompt']!r:.80} is not over after {len(said) // 2} "
                                 "turns")
    said.pop()  # what the environment says at the end is told to nobody
    if role:
        messages = [{"role": one, "content": text} for one, text in said]
        rest = {name: value for name, value in record.items() if name != "demonstration"}
        return {**rest, "prompt": [*episodes.told(record["prompt"]), *messages]}
    return {**record, "demonstration": "".join(text for _, text in said),
            encoding.SEGMENTS: tuple((text, one == "assistant") for one, text in said)}
