"""What is known of each prompt."""

import dataclasses

import numpy as np

from dapo_jax import types


def init(size: int) -> types.HistoryState:
    """`size` prompts, none sampled yet."""
    return types.HistoryState(visits=np.zeros(size, np.int32))


def observe(state: types.HistoryState, prompts: np.ndarray) -> types.HistoryState:
    """Count one more visit for each id in `prompts`, i32[n]."""
    visits = state.visits + np.bincount(prompts, minlength=len(state.visits)).astype(np.int32)
    return dataclasses.replace(state, visits=visits)
