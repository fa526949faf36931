"""From a batch of samples to a changed model: advantages, weights, microbatches, updates."""

import dataclasses

from dapo_jax import types
from dapo_jax.learner import advantages, algorithms, packing, update, weights


@dataclasses.dataclass(frozen=True)
class Work:
    """One optimizer update, packed."""

    batches: list[types.TrainBatch]
    tokens: int  # of its completions, also of those masked out of the loss


def prepare(
    samples: types.Samples, *, algorithm: algorithms.Algorithm, updates: int, step: int,
    table: types.PromptTable, shape: packing.PackShape, max_length: int,
) -> list[Work]:
    """The step's updates, whole groups each. Advantages are made over the whole batch, weights
    over each update; an update without a loss token is left out (it would change nothing but the
    optimizer's memory)."""
    settings = advantages.Settings(ddof=algorithm.ddof)
    advantage = advantages.ADVANTAGES[algorithm.advantage](
        samples.shaped, samples.group, valid=samples.valid, lengths=samples.length,
        settings=settings)
    mask = packing.overlong_mask(samples, algorithm.mask_overlong)
    work = []
    for number, rows in enumerate(packing.split_updates(samples, updates)):
        weight = weights.WEIGHTS[algorithm.weights](
            mask[rows], samples.group[rows], max_length=max_length)
        # Only the first update's parameters are those that sampled.
        fresh = ((samples.born[rows] == step) & (number == 0)
                 & (algorithm.samples == "rollout"))
        batches = packing.pack(samples.take(rows), prompts=table, advantages=advantage[rows],
                               weights=weight, fresh=fresh, shape=shape)
        if batches:
            work.append(Work(batches, int(samples.length[rows].sum())))
    return work


def learn(
    programs: update.Programs, state: types.TrainState, work: list[Work]
) -> tuple[types.TrainState, list[types.Metrics]]:
    """Take the updates in turn; `state` is consumed, each update's metrics stay on the device."""
    metrics = []
    for one in work:
        state, more = update.update(programs, state, one.batches)
        metrics.append(more)
    return state, metrics
