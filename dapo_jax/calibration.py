"""What a further round and a further prompt cost on this machine, measured once for cost_optimal.

The numbers go into the state before the first step that samples, so they are in every checkpoint,
and a run that goes on decides as it did. Nothing that decides reads a clock after that.
"""

import dataclasses
import logging
import time

import numpy as np

from dapo_jax import setup_adapter, types
from dapo_jax.dynamic_sampling import gather, predictor
from dapo_jax.rollout import collect, engine
from dapo_jax.runtime import processes

LOG = logging.getLogger(__name__)
REPEATS = 3  # calls of each size; the fastest counts
LEAST_SHARE = 0.01  # of what a prompt takes of a large call: no cost is measured lower


def calibrated(state: types.RunState, source: collect.Source | None,
               base: setup_adapter.Base | None = None) -> types.RunState:
    """The state with the costs of a round and of a prompt, in seconds of generating.

    Unchanged for a phase that does not sample (None) or whose predictor needs no costs, and if the
    state holds them already: from the configuration, or from a checkpoint.
    """
    seen = state.controller.predictor
    if (source is None or _size(source).dynamic.predictor.kind != "cost_optimal"
            or seen.round_cost > 0):
        return state
    measured = measure(source, setup_adapter.sampled(base, state.train.params))
    round_cost, prompt_cost = processes.gather(
        measured, what="calibration", seconds=source.late_seconds)[0]
    LOG.info("measured: a further round costs %.3g s, a further prompt %.3g s", round_cost,
             prompt_cost)
    seen = predictor.calibrated(seen, round_cost=round_cost, prompt_cost=prompt_cost)
    return dataclasses.replace(
        state, controller=dataclasses.replace(state.controller, predictor=seen))


def measure(source: collect.Source, params: types.Tree) -> tuple[float, float]:
    """Seconds of a round beyond those of its prompts, and of a prompt; both above 0.

    Calls of one prompt and of as many as there are slots give a line: its slope is the prompt's
    cost. In streaming mode the call of one prompt is the drain that a batch that turns out short
    waits for. Scoring is not part of either.
    """
    most = min(source.engine.slots[-1], len(source.table))
    _seconds(source, params, most)  # the first call is slower
    small, large = (min(_seconds(source, params, count) for _ in range(REPEATS))
                    for count in (1, most))
    prompt = max((large - small) / max(most - 1, 1), LEAST_SHARE * large / most)
    return max(small - prompt, LEAST_SHARE * small), prompt


def _size(source: collect.Source) -> gather.CollectSettings:
    assert source.size is not None  # training's, which has it, not an evaluation's
    return source.size


def _seconds(source: collect.Source, params: types.Tree, count: int) -> float:
    """Of generating for the first `count` prompts; what is drawn is forgotten."""
    ids = np.arange(count, dtype=np.int32)
    size = np.full(count, _size(source).samples_per_prompt, np.int32)
    plan = types.Plan(prompt=ids, visit=np.zeros_like(ids), group=ids, size=size)
    begun = time.perf_counter()
    engine.sample(source.engine, params, plan, table=source.table, root=source.root, step=0)
    return time.perf_counter() - begun
