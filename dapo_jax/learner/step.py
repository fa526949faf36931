"""From a batch of samples to a changed model: advantages, weights, microbatches, updates."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax import types
from dapo_jax.learner import (
    advantages,
    algorithms,
    credit,
    packing,
    rows,
    stacks,
    update,
    weights,
)
from dapo_jax.rollout import turns


@dataclasses.dataclass(frozen=True)
class Work:
    """One mini-batch, which makes an optimizer update, packed."""

    batches: Sequence[stacks.Batches]  # stacks only where they are `scored`
    tokens: int  # of its completions, also of those masked out of the loss
    places: Sequence[rows.Place] = ()  # of the samples in the microbatches, all processes' slots


def prepare(
    samples: types.Samples, *, algorithm: algorithms.Algorithm, updates: int, step: int,
    table: types.PromptTable, shape: packing.PackShape, max_length: int,
    chosen: np.ndarray | None = None, discount: float = 1.0,
) -> list[Work]:
    """The step's mini-batches, whole groups each. Advantages are made over the whole batch, weights
    over each mini-batch; one without a loss token is left out (it would change nothing but the
    optimizer's memory). `chosen` bool[n]: rows that are learned from, all if None; the others
    count in the advantages' statistics only. `discount`: by turn, of types.Episodes."""
    tokens = samples.loss_mask.sum(axis=1)
    advantage = _advantages(samples, algorithm, discount, tokens)
    if chosen is not None:
        samples, advantage, tokens = samples.take(chosen), advantage[chosen], tokens[chosen]
    kept = packing.learned(samples, algorithm.mask_overlong)
    tokens, content = tokens * kept, packing.content(samples.loss_mask) * kept
    work = []
    for number, part in enumerate(packing.split_updates(samples, updates)):
        group = samples.group[part]
        places = packing.places(group, samples.prompt[part], content[part], prompts=table,
                                shape=shape)
        share = _shares(algorithm, tokens[part], group, places, max_length=max_length)
        # Only the first update's parameters are those that sampled.
        fresh = (samples.born == step) & (number == 0) & (algorithm.samples == "rollout")
        batches = packing.filled(places, samples, part, prompts=table, advantages=advantage,
                                 weights=share, fresh=fresh, shape=shape)
        if batches:
            work.append(Work(batches, int(samples.length[part].sum()), places))
    return work


def _shares(
    algorithm: algorithms.Algorithm, tokens: np.ndarray, group: np.ndarray,
    places: Sequence[rows.Place], *, max_length: int,
) -> np.ndarray:
    """What a loss token of each row weighs, f32[m]."""
    if algorithm.weights in weights.COUNTS:
        count = weights.COUNTS[algorithm.weights](tokens, group, max_length=max_length)
    else:
        microbatch = np.zeros(len(tokens), np.int64)
        for number, place in enumerate(places):
            microbatch[place.layout.sample] = number
        count = weights.PACKED[algorithm.weights](tokens, microbatch)
    return weights.shares(tokens, count)


def _advantages(
    samples: types.Samples, algorithm: algorithms.Algorithm, discount: float, tokens: np.ndarray
) -> np.ndarray:
    """f32[n], of a sample; of types.Episodes f32[n, T], its turn's, 0 where nothing was sampled."""
    of_samples = advantages.ADVANTAGES[algorithm.advantage]
    given: dict[str, Any] = {"valid": samples.valid, "lengths": tokens,
             "settings": algorithms.advantage_settings(algorithm)}
    if not isinstance(samples, types.Episodes):
        return of_samples(samples.shaped, samples.group, **given)
    turn = turns.turn_numbers(samples.loss_mask)
    count = turn.max(axis=1, initial=turns.OUTSIDE) + 1
    returns = credit.discounted(samples.turn_rewards, count, discount)
    return credit.by_token(credit.advantages(
        of_samples, returns, count, group=samples.group, **given), turn)


def scored(
    programs: update.Programs, params: types.Tree, work: Sequence[Work], *,
    reference: types.Tree | None = None, base: types.Tree | None = None,
) -> list[Work]:
    """The same with recomputed log-probs and those of the reference model, where they are needed;
    `params` are those before the step's first update, an adapter's if there is a `base`."""
    return [dataclasses.replace(one, batches=update.scored(
        programs, params, reference, one.batches, base=base)) for one in work]


def learn(
    programs: update.Programs, state: types.TrainState, work: Sequence[Work], *, epochs: int = 1,
    base: types.Tree | None = None,
) -> tuple[types.TrainState, list[types.Metrics]]:
    """Take the updates in turn, `epochs` times over; `state` is consumed, each update's metrics
    stay on the device."""
    metrics = []
    for epoch in range(epochs):
        for one in work:
            batches = map(_stale, one.batches) if epoch else one.batches
            state, more = update.update(programs, state, batches, base=base)
            metrics.append(more)
    return state, metrics


def _stale(batch: stacks.Batches) -> stacks.Batches:
    """Of a later epoch, whose parameters are not those that sampled."""
    one = batch.batch if isinstance(batch, types.Stack) else batch
    return stacks.changed(batch, fresh=np.zeros(one.fresh.shape, np.float32))
