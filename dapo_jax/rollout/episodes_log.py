"""What metrics and the log say of episodes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.envs import episode_play, episodes
from dapo_jax.rollout import outcomes

CALLS, TOOL_ERRORS = "calls", "tool_errors"  # parts that tools count


def texts(played: outcomes.Played) -> list[str]:
    """All that the model wrote in each episode, and nothing that it was told."""
    return ["".join(turn.text for turn in one.turns) + one.last_text for one in played.episodes]


def finals(played: outcomes.Played) -> list[str]:
    """What the model wrote last in each episode: where an answer is looked for."""
    return [one.final for one in played.episodes]


def metrics(rounds: Sequence[outcomes.Played]) -> dict[str, float]:
    """Turns, tools, failures and latency over a step's rounds; latency is in seconds."""
    found = [one for played in rounds for one in played.episodes]
    ends = [end for played in rounds for end in played.ends]
    taken = np.array([len(one.turns) for one in found])
    latency = np.concatenate([played.latency for played in rounds])
    part = lambda name: float(np.mean([  # noqa: E731
        sum(turn.parts.get(name, 0.0) for turn in one.turns) for one in found]))
    failures = episode_play.failures(found)
    values = {
        "turns/mean": float(taken.mean()), "turns/max": int(taken.max()),
        "turns/calls": part(CALLS), "turns/tool_errors": part(TOOL_ERRORS),
        "turns/cut": float(np.concatenate([one.cut for one in rounds]).mean()),
        "turns/reply_tokens": float(np.concatenate([one.told for one in rounds]).mean()),
        "invalid/env_error": sum(failures.values()),
        "environment/retries": sum(played.retries for played in rounds),
        "environment/refused": sum(played.refused for played in rounds)}
    values |= {f"invalid/kind_{kind}": count for kind, count in failures.items()}
    values |= {f"turns/ended_{end}": float(np.mean([one == end for one in ends]))
               for end in (outcomes.DONE, outcomes.TURNS, outcomes.TOKENS)}
    for share in (50, 95):
        values[f"time/environment_p{share}"] = (
            float(np.percentile(latency, share)) if len(latency) else math.nan)
    return values


def row(played: outcomes.Played, place: int) -> dict[str, Any]:
    """The episode as DIR/samples holds it, beside its prompt and answer."""
    one = played.episodes[place]
    record = {name: value for name, value in one.record.items() if name not in ("prompt", "answer")}
    return {"environment": one.environment, "seed": one.seed, "ended": played.ends[place],
            "turns": [vars(turn) | {"parts": dict(turn.parts)} for turn in one.turns],
            "failure": one.failure, "message": one.message, "last_text": one.last_text,
            "messages": bool(one.messages), "record": record}


def episode(logged: Mapping[str, Any]) -> episode_play.Episode | None:
    """The episode of a row of DIR/samples, to be played again; None: the row is of one turn.

    KeyError or TypeError: the row lacks what an episode needs.
    """
    if "episode" not in logged:
        return None
    own, asked = logged["episode"], {name: logged[name] for name in ("prompt", "answer")}
    return episode_play.Episode(
        own["environment"], asked | own["record"], own["seed"],
        messages=tuple(episodes.told(asked["prompt"])) if own["messages"] else (),
        turns=tuple(episode_play.Played(**turn) for turn in own["turns"]),
        failure=own["failure"], message=own["message"], last_text=own["last_text"])
