"""What judges the completions of a run: a pool that scores them, or an environment that answers
them turn by turn."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from dapo_jax import config
from dapo_jax.envs import (
    crew,
    environments,
    episode_play,
    episode_pool,
    episode_rewards,
    episodes,
)
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect, episodes_talk
from dapo_jax.text import chat as chats
from dapo_jax.text import replies
from dapo_jax.text import tokenizer as tokenizers

TRIED = 2  # episodes, of the first records, that are begun before anything is compiled
TURNS = 2  # of each: the second has the state that the first returned
AGAIN = 10  # more of them, where these fail: an environment may fail now and then

LOG = logging.getLogger(__name__)


def check(cfg: config.Config, tokenizer: tokenizers.Tokenizer) -> None:
    """ConfigError for what an environment cannot be played with here."""
    if not cfg.environment.name:
        return
    environment = environments.environment(cfg.environment.name)
    episode_rewards.weights(cfg.task.reward_weights, environment)
    _encoder(cfg, tokenizer)
    if jax.process_count() > 1:
        raise config.ConfigError(
            f"config.environment.name = {cfg.environment.name!r}: an environment's answers come in "
            "another order in each of several processes; use one")
    for text in cfg.rollout.stop:
        if len(tokenizer.encode(text, start=False)) != 1:
            raise config.ConfigError(
                f"config.rollout.stop: {text!r} is of several tokens, found only when a completion "
                "is over; with an environment it has to end a turn while sampling: name a text of "
                "one token")


def turns_credited(own: config.Environment) -> int:
    """Turns of an episode that are credited apart; 0 where all have what the episode earned."""
    return own.turns if own.credit == "discounted" else 0


def _encoder(cfg: config.Config, tokenizer: tokenizers.Tokenizer) -> replies.Encoder:
    return replies.encoder(tokenizer, chats.configured(cfg.tokenizer, tokenizer),
                           role=cfg.environment.role)


@contextlib.contextmanager
def judge(
    cfg: config.Config, tokenizer: tokenizers.Tokenizer, reward: str, *, weights: tuple = (),
) -> Iterator[collect.Judge]:
    """The configured environment's scene, or else the pool that scores by `reward`; `weights` is
    config.task.reward_weights where rewards are shaped."""
    if not cfg.environment.name:
        with pools.open(reward, cfg.scoring, weights=weights) as pool:
            yield pool
        return
    own = cfg.environment
    environment = environments.environment(own.name)
    environments.ready(environment)
    parts = episode_rewards.weights(weights, environment)
    with episode_pool.open(own.name, episode_pool.limits(vars(own))) as pool:
        yield episodes_talk.Scene(
            pool, _encoder(cfg, tokenizer), tokenizer.decode, parts, cfg.seed, turns=own.turns,
            turn_tokens=own.turn_tokens, seconds=own.seconds, by_turn=turns_credited(own),
            lag=own.reply_lag)


def try_out(scene: episodes_talk.Scene, records: Sequence[Mapping[str, Any]]) -> None:
    """Play two turns of the first records' episodes, which waits for a worker.

    ConfigError: one is told something else than its prompt, after which the model goes on; or all
    fail, further ones too. Of an environment that fails now and then, a line says so.
    """
    found = _played(scene, records, range(min(TRIED, len(records))))
    if found and all(fault for fault, _ in found):
        found += _played(scene, records, range(len(found), len(found) + AGAIN))
    failed = [(fault, one) for fault, one in found if fault]
    if failed and len(failed) == len(found):
        raise config.ConfigError(f"environment {scene.pool.name!r} cannot play an episode, such as "
                                 f"that of {failed[0][1].record['prompt']!r:.80}: {failed[0][0]}; "
                                 "docs/environments.md says what it may return, and how to try it "
                                 "without a model")
    if failed:
        LOG.warning("environment %r failed in %d of the %d episodes that were tried; first: %s",
                    scene.pool.name, len(failed), len(found), failed[0][0])


def _played(
    scene: episodes_talk.Scene, records: Sequence[Mapping[str, Any]], places: Sequence[int]
) -> list[tuple[str, episode_play.Episode]]:
    """Two turns of an episode each, and what is wrong with them; empty if nothing."""
    begun = [episode_play.begun(scene.pool.name, records[place % len(records)], place)
             for place in places]

    def text(at: int, one: episode_play.Episode) -> str:
        """A model may write anything: here the answer, in every other episode nothing."""
        return "" if places[at] % 2 else str(one.record.get("answer", ""))

    limits = scene.pool.limits  # which end each call: this one is for what they do not reach
    calls = (1 + TURNS) * len(places) * (limits.retries + 1)
    found = episode_play.play(scene.pool, begun, text, turns=min(TURNS, scene.turns),
                              seconds=crew.START_SECONDS + calls * limits.timeout)
    if scene.pool.crew.closed:
        raise config.ConfigError(f"environment {scene.pool.name!r} did not play in time")
    return [(_fault(scene, one), one) for one in found]


def _fault(scene: episodes_talk.Scene, one: episode_play.Episode) -> str:
    """What is wrong with an episode that was tried; ConfigError: it begins with something else than
    what the model goes on from."""
    if one.messages and list(one.messages) != episodes.told(one.record["prompt"]):
        raise config.ConfigError(
            f"environment {scene.pool.name!r} begins with {list(one.messages)!r:.200}, but the "
            f"model goes on from the record's prompt, {one.record['prompt']!r:.200}: make start "
            "tell episodes.told(record['prompt']), and write what it tells into the records")
    for turn in one.turns:
        try:
            told = turn.done or len(scene.encode(turn.reply, 0))
        except ValueError as error:
            return f"its reply cannot be told: {error}"
        if not told:
            return "Turn.reply is empty, but done is False"
    return one.message
