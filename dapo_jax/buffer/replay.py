"""What a step learns from: what is selected of its rollouts, and groups of earlier steps again.

The buffer is state like any other, saved in the checkpoint; nothing in it knows a trainer. A group
comes back with the log-probs that it was sampled with: they stay the denominator of the ratio.
"""

import dataclasses

import numpy as np

from dapo_jax import config, types
from dapo_jax.buffer import buffer, select

STREAM = 5  # keeps these random numbers apart from others drawn from the run's seed
BEHIND = 1000  # the place of the buffer's own bound, behind all strategies


@dataclasses.dataclass(frozen=True)
class Intake:
    """How a phase makes what it learns from."""

    strategies: tuple[select.Strategy, ...]
    buffer: config.Buffer
    seed: int


def nothing(width: int, *, turns: int = 0) -> types.Selected:
    """An empty buffer for completions `width` tokens wide, of `turns` if they are credited apart.
    """
    return types.Selected(types.no_samples(width, turns=turns), np.zeros(0, bool))


def learned_from(
    kept: types.Selected | None, samples: types.Samples, intake: Intake, *, step: int,
    states: select.States = select.no_states,
) -> tuple[types.Selected | None, types.Selected, dict[str, float]]:
    """The buffer after the step, what the step learns from, and metrics of both.

    `samples` are the step's own, `kept` is the buffer before it (None: there is none), `states` as
    in select.apply. Metrics are of what the intake does: a phase that selects and replays nothing
    has none.
    """
    key = select.Key(intake.seed, step)
    own = select.apply(intake.strategies, samples, key, states=states)
    chosen = own
    metrics: dict[str, float] = {}
    if kept is not None and intake.buffer.capacity:
        old, expired = _young(kept, step=step, max_age=intake.buffer.max_age)
        again = _drawn(old, intake.buffer.replay, key)
        chosen = _mixed(own, again, key)
        kept, evicted = _bounded(_joined(old, _useful(own)), intake.buffer, key)
        metrics |= {
            "replay/groups": buffer.groups(again.samples),
            "replay/age": buffer.mean_age(again.samples, step=step), "replay/expired": expired,
            "replay/evicted": evicted, "replay/kept": buffer.groups(kept.samples),
            "replay/kept_age": buffer.mean_age(kept.samples, step=step)}
    if intake.strategies:
        metrics |= _measured(samples, own) | {"select/skipped": int(not chosen.chosen.any())}
    return kept, chosen, metrics


def _measured(samples: types.Samples, own: types.Selected) -> dict[str, float]:
    left = own.samples.take(own.chosen)
    return {"select/samples": len(left), "select/groups": buffer.groups(left),
            "select/share": len(left) / len(samples) if len(samples) else float("nan"),
            "select/reward_mean": float(left.reward.mean()) if len(left) else float("nan")}


def _young(kept: types.Selected, *, step: int, max_age: int) -> tuple[types.Selected, int]:
    rows = select.max_age(kept.samples, select.Key(0, step), steps=max_age)
    young = kept.take(rows)
    return young, buffer.groups(kept.samples) - buffer.groups(young.samples)


def _drawn(kept: types.Selected, count: int, key: select.Key) -> types.Selected:
    """`count` groups, any of them alike; fewer if there are fewer."""
    ids = np.unique(kept.samples.group)
    drawn = _generator(key, 0).permutation(ids)[:count]
    return kept.take(np.isin(kept.samples.group, drawn))


def _mixed(own: types.Selected, again: types.Selected, key: select.Key) -> types.Selected:
    """Groups of both in an order that is drawn, so that no mini-batch is all old ones."""
    if not len(again.samples):
        return own
    both = _joined(own, again)
    ids, place = np.unique(both.samples.group, return_inverse=True)
    order = _generator(key, 1).permutation(len(ids))
    return both.take(np.argsort(order[place], kind="stable"))


def _useful(own: types.Selected) -> types.Selected:
    """Groups of which something is learned from."""
    groups = own.samples.group
    return own.take(np.isin(groups, groups[own.chosen]))


def _joined(first: types.Selected, second: types.Selected) -> types.Selected:
    return types.Selected(buffer.add(first.samples, second.samples),
                          np.concatenate([first.chosen, second.chosen]))


def _bounded(kept: types.Selected, cfg: config.Buffer, key: select.Key
             ) -> tuple[types.Selected, int]:
    rows = select.capacity(kept.samples, dataclasses.replace(key, place=BEHIND),
                           groups=cfg.capacity, evict=cfg.evict)
    bounded = kept.take(rows)
    return bounded, buffer.groups(kept.samples) - buffer.groups(bounded.samples)


def _generator(key: select.Key, purpose: int) -> np.random.Generator:
    return np.random.default_rng([key.seed, STREAM, key.step, purpose])
