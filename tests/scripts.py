"""Environments that follow a script: what they reply depends on the sample and its turn alone, and
when they do on numbers of their own."""

import dataclasses

import numpy as np

from dapo_jax.rollout import turns


@dataclasses.dataclass(frozen=True)
class Script:
    """Up to `most` turns, then over; replies of 1 to `longest` tokens of `vocab`."""

    most: int = 3
    longest: int = 4
    turn_budget: int = 4
    room: int = 16  # tokens of a sample
    vocab: int = 64
    seed: int = 0


def reply(script, ended):
    """The tokens that follow a turn; None if nothing does."""
    rng = np.random.default_rng([script.seed, ended.prompt, ended.visit, ended.sample, ended.turn])
    if ended.turn + 1 >= rng.integers(1, script.most + 1):
        return None
    tokens = rng.integers(0, script.vocab, rng.integers(1, script.longest + 1)).astype(np.int32)
    return tokens if ended.length + len(tokens) < script.room else None


def talk(script, *, delay=lambda: 0, log=None, failed=lambda ended: False):
    """A turns.Talk; a reply is there after `delay()` further looks, and a waiting look goes on to
    the first. `log` gets every turn that is handed over."""
    held = []  # [looks that are left, turn]

    def ended(found):
        for one in found:
            held.append([delay(), one])
            if log is not None:
                log.append(one)

    def replies(seconds):
        step = min((left for left, _ in held), default=0) if seconds else 1
        for one in held:
            one[0] -= step
        due = sorted((one for one in held if one[0] <= 0), key=lambda one: one[0])
        held[:] = [one for one in held if one[0] > 0]
        return [answer(script, one, failed) for _, one in due]

    return turns.Talk(ended, replies, lambda: len(held), script.turn_budget)


def answer(script, ended, failed=lambda ended: False):
    """The turns.Reply to a turn."""
    tokens = None if failed(ended) else reply(script, ended)
    if tokens is None:
        return turns.Reply(ended.group, ended.sample, np.zeros(0, np.int32), over=True, budget=0,
                           valid=not failed(ended))
    budget = min(script.room, ended.length + len(tokens) + script.turn_budget)
    return turns.Reply(ended.group, ended.sample, tokens, over=False, budget=budget)
