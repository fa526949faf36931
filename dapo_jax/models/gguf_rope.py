"""How a GGUF file says that its positions are stretched."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.models.spec import ModelSpec, RopeScaling

DIVISORS = "rope_freqs.weight"  # a tensor with one divisor per rotation


def scaling(
    metadata: Mapping[str, Any], architecture: str, path: pathlib.Path, spec: ModelSpec,
    divisors: np.ndarray | None,
) -> RopeScaling | None:
    """The scaling of the file's full layers, or None; ConfigError names one that is unknown."""
    at = f"{architecture}.rope"
    context = int(metadata.get(f"{at}.scaling.original_context_length", 8192))
    if divisors is not None:
        return _llama3(divisors, path, spec, context)
    kind = metadata.get(f"{at}.scaling.type", "none")
    factor = float(metadata.get(f"{at}.scaling.factor", metadata.get(f"{at}.scale_linear", 1.0)))
    if kind not in ("none", "linear"):
        raise config.ConfigError(f"{path}: {at}.scaling.type = {kind!r} is not supported; only "
                                 f"'none', 'linear' and {DIVISORS} are")
    return None if factor in (0.0, 1.0) else RopeScaling(kind="linear", factor=factor)


def _llama3(
    divisors: np.ndarray, path: pathlib.Path, spec: ModelSpec, context: int
) -> RopeScaling:
    """The file holds one divisor per rotation; find the rule that gives them."""
    result = RopeScaling(kind="llama3", factor=float(divisors.max()), original_context=context)
    expected = _divisors(result, spec)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise config.ConfigError(f"{path}: {DIVISORS} is not Llama 3.1's scaling ({result}), the "
                                 "only one that is supported")
    return result


def _divisors(scaling: RopeScaling, spec: ModelSpec) -> np.ndarray:
    half = spec.head_size // 2
    waves = 2 * math.pi * spec.rope_base ** (np.arange(half) / half)
    turns = scaling.original_context / waves
    smooth = ((turns - scaling.low_frequency)
              / (scaling.high_frequency - scaling.low_frequency)).clip(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
