"""Whole episodes on a pool of environments, and logged ones played again.

A replay gives the environment the recorded texts, not the model; if it does not say the same again,
the environment is not deterministic, or has changed.
"""

import base64
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.envs import episode_pool, episodes

WAIT = 1.0  # seconds at most in one look at the pool
SHOWN = ("demonstration", "demonstration_segments")  # of a record: no part of the problem


@dataclasses.dataclass(frozen=True)
class Played:
    """One turn: what the model wrote and what came of it."""

    text: str
    reply: str
    reward: float
    done: bool
    parts: Mapping[str, float]
    seconds: float  # that the environment took, waiting for a worker included


@dataclasses.dataclass(frozen=True)
class Episode:
    """What was said in one episode, so far."""

    environment: str
    record: Mapping[str, Any]
    seed: int
    messages: tuple[Mapping[str, str], ...] = ()  # that the model was shown first
    turns: tuple[Played, ...] = ()
    failure: str = ""  # a kind of episodes.FAILURES: invalid, whatever its rewards were
    message: str = ""  # of the failure
    last_text: str = ""  # the one at which it failed

    @property
    def done(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.turns) and self.turns[-1].done

    @property
    def final(self) -> str:
        """What the model wrote last: where an answer is looked for."""
        return self.last_text or (self.turns[-1].text if self.turns else "")

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards."""
        return sum(turn.reward for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came of playing logged episodes again."""

    compared: int
    differing: tuple[int, ...]  # places of the episodes
    failed: tuple[int, ...]  # places of those that failed now, and had not before
    first: str  # what differs first; empty if nothing does


def begun(environment: str, record: Mapping[str, Any], seed: int) -> Episode:
    """The episode of a record, before its start; the environment gets no demonstration."""
    return Episode(environment, {name: value for name, value in record.items()
                                 if name not in SHOWN}, seed)


def play(pool: episode_pool.Pool, begun: Sequence[Episode],
         policy: Callable[[int, Episode], str | None], *, turns: int, seconds: float = 3600.0
         ) -> list[Episode]:
    """Play episodes that have a record and a seed, in order of place.

    `policy(place, episode)` writes the next text, or None to leave it. An episode is left after
    `turns` turns, and fails by "timeout" if the environment has not answered when `seconds` are
    over; the pool is closed then.
    """
    limit, found = time.monotonic() + seconds, list(begun)
    for place, episode in enumerate(found):
        episode_pool.start(pool, place, record=dict(episode.record), seed=episode.seed)
    texts: dict[int, str] = {}
    waiting = set(range(len(found)))
    while waiting:
        if time.monotonic() > limit:
            for place in waiting:
                found[place] = dataclasses.replace(
                    found[place], failure="timeout", message=f"not over within {seconds:g} s",
                    last_text=texts.get(place, ""))
            episode_pool.close(pool)  # answers still on their way would be taken for the next ones
            break
        for answer in episode_pool.poll(pool, seconds=WAIT):
            place = answer.ticket
            found[place] = advanced(found[place], texts.get(place, ""), answer)
            text = _next(found[place], place, policy, turns)
            if text is None:
                waiting.discard(place)
            else:
                texts[place] = text
                episode_pool.step(pool, place, state=state_of(answer), text=text)
    return found


def state_of(answer: episode_pool.Answer) -> bytes:
    """The state that an answer of kind "done" holds, for the next step."""
    return base64.b64decode(answer.value["state"])


def advanced(episode: Episode, text: str, answer: episode_pool.Answer) -> Episode:
    """The episode after an answer to its start, or to the text of its next turn."""
    if answer.kind != "done":
        return dataclasses.replace(episode, failure=answer.kind, message=answer.value,
                                   last_text=text)
    if not episode.messages:
        return dataclasses.replace(episode, messages=tuple(answer.value["messages"]))
    value = {name: answer.value[name] for name in ("reply", "reward", "done", "parts")}
    turn = Played(text, seconds=round(answer.seconds, 6), **value)
    return dataclasses.replace(episode, turns=(*episode.turns, turn))


def _next(episode: Episode, place: int, policy: Callable[[int, Episode], str | None], turns: int
          ) -> str | None:
    if episode.failure or episode.done or len(episode.turns) >= turns:
        return None
    return policy(place, episode)


def replay(pool: episode_pool.Pool, logged: Sequence[Episode]) -> Replay:
    """Play logged episodes again by their records, seeds and texts; ValueError: another's log."""
    foreign = {one.environment for one in logged} - {pool.name}
    if foreign:
        raise ValueError(f"episodes of {sorted(foreign)} cannot be replayed by {pool.name!r}")
    used = [one for one in logged if one.messages]
    begun = [Episode(one.environment, one.record, one.seed) for one in used]

    def recorded(place: int, episode: Episode) -> str | None:
        at, turns = len(episode.turns), used[place].turns
        return turns[at].text if at < len(turns) else None

    again = play(pool, begun, recorded, turns=max((len(one.turns) for one in used), default=0))
    places = [place for place, one in enumerate(logged) if one.messages]
    failed = tuple(place for place, new in zip(places, again, strict=True) if new.failure)
    faults = {place: difference(logged[place], new)
              for place, new in zip(places, again, strict=True) if not new.failure}
    differing = tuple(place for place, fault in faults.items() if fault)
    first = f"episode {differing[0]}: {faults[differing[0]]}" if differing else ""
    return Replay(len(faults), differing, failed, first)


def difference(logged: Episode, again: Episode) -> str:
    """What the environment said otherwise the second time; empty if it said the same."""
    if logged.messages != again.messages:
        return f"it began with {again.messages!r:.200}, logged are {logged.messages!r:.200}"
    for at, (old, new) in enumerate(zip(logged.turns, again.turns)):
        for name in ("text", "reply", "reward", "done", "parts"):
            was, now = getattr(old, name), getattr(new, name)
            if was != now:
                return f"turn {at}: {name} is {now!r:.200}, logged is {was!r:.200}"
    if len(logged.turns) != len(again.turns):
        return f"{len(again.turns)} turns, logged are {len(logged.turns)}"
    return ""


def failures(found: Sequence[Episode]) -> dict[str, int]:
    """Invalid episodes by kind, every kind of episodes.FAILURES included."""
    kinds = [episode.failure for episode in found]
    return {kind: kinds.count(kind) for kind in episodes.FAILURES}
