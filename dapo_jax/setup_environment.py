"""What judges the completions of a run: a pool that scores them, or an environment that answers
them turn by turn."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from dapo_jax import config
from dapo_jax.envs import crew, environments, episode_pool, episode_rewards, episodes
from dapo_jax.envs import pool as pools
from dapo_jax.rollout import collect, episodes_talk
from dapo_jax.text import chat as chats
from dapo_jax.text import replies
from dapo_jax.text import tokenizer as tokenizers

TRIED = 2  # records, the first ones, whose episodes are started before anything is compiled


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
    limits = episode_pool.Limits(own.workers, own.timeout, own.memory_mb, own.retries, own.backoff,
                                 own.bound, own.pause)
    environment = environments.environment(own.name)
    environments.ready(environment)
    parts = episode_rewards.weights(weights, environment)
    with episode_pool.open(own.name, limits) as pool:
        yield episodes_talk.Scene(
            pool, _encoder(cfg, tokenizer), tokenizer.decode, parts, cfg.seed, turns=own.turns,
            turn_tokens=own.turn_tokens, seconds=own.seconds, by_turn=turns_credited(own),
            lag=own.reply_lag)


def try_out(scene: episodes_talk.Scene, records: Sequence[Mapping[str, Any]]) -> None:
    """Start episodes of the first records, which waits for a worker.

    ConfigError: one fails, or is told something else than its prompt, after which the model goes
    on.
    """
    count, pool = min(TRIED, len(records)), scene.pool
    for place in range(count):
        episode_pool.start(pool, place, record=dict(records[place]), seed=place)
    limit = time.monotonic() + crew.START_SECONDS + scene.seconds
    answers: list[episode_pool.Answer] = []
    while len(answers) < count:
        if time.monotonic() > limit:
            raise config.ConfigError(f"environment {pool.name!r} did not start an episode in time")
        answers += episode_pool.poll(pool, seconds=1.0)
    for answer in answers:
        if answer.kind != "done":
            raise config.ConfigError(f"environment {pool.name!r} cannot start an episode of record "
                                     f"{answer.ticket}: {answer.value}")
        prompt = records[cast(int, answer.ticket)]["prompt"]
        if answer.value["messages"] != episodes.told(prompt):
            raise config.ConfigError(
                f"environment {pool.name!r} begins with {answer.value['messages']!r:.200}, but the "
                f"model goes on from the record's prompt, {prompt!r:.200}: make start tell "
                "episodes.told(record['prompt']), and write what it tells into the records")
