"""How many prompts to ask for, so that about as many groups as needed are informative.

x_t = target * T_t / K_t is the number of prompts that would have given exactly `target` groups in
step t, from T_t prompts sampled and K_t groups kept. The ratio is stored, never the answer, which
would feed on itself and grow.
"""

import math

import numpy as np

from dapo_jax import config, types


def init(cfg: config.Predictor) -> types.PredictorState:
    """An empty window of `cfg.window` steps."""
    return types.PredictorState(asked=np.zeros(cfg.window, np.int32),
                                kept=np.zeros(cfg.window, np.int32), count=np.asarray(0, np.int32))


def update(state: types.PredictorState, asked: int, kept: int, *,
           cfg: config.Predictor) -> types.PredictorState:
    """Append one step: `asked` prompts sampled, of which `kept` groups were informative.

    A step that kept nothing is an observation too. Raises ValueError unless 0 <= kept <= asked
    and asked > 0.
    """
    if not 0 <= kept <= asked or asked == 0:
        raise ValueError(f"predictor.update: asked = {asked}, kept = {kept}; a step that sampled "
                         "has asked > 0 and 0 <= kept <= asked; leave other steps out")
    return types.PredictorState(
        asked=_append(state.asked, asked, cfg.window), kept=_append(state.kept, kept, cfg.window),
        count=np.asarray(min(int(state.count) + 1, cfg.window), np.int32))


def predict(state: types.PredictorState, target: int, cfg: config.Predictor) -> int:
    """Prompts to sample first for `target` groups: in [target, ceil(max_multiplier * target)]."""
    if target <= 0:
        return 0
    wanted = _ceil(target * MULTIPLIERS[cfg.kind](state, cfg))
    return max(target, min(wanted, bound(target, cfg)))


def bound(target: int, cfg: config.Predictor) -> int:
    """Most prompts that one request may name for `target` groups."""
    return max(target, _ceil(cfg.max_multiplier * target))


def refill(deficit: int, asked: int, kept: int, *, factor: float) -> int:
    """Prompts to sample for `deficit` more groups after `kept` of `asked` were informative."""
    return _ceil(factor * max(deficit, 0) * (asked + 1) / (kept + 0.5))


def round_up(count: int, ladder: tuple[int, ...]) -> int:
    """The least k times the largest rung, plus one rung for the rest, that holds `count`."""
    if not ladder:
        return count
    whole, rest = divmod(count, max(ladder))
    return whole * max(ladder) + (min(rung for rung in ladder if rung >= rest) if rest else 0)


def _append(values: np.ndarray, value: int, window: int) -> np.ndarray:
    return np.concatenate([np.zeros(window), values, [value]]).astype(np.int32)[-window:]


def _ceil(value: float) -> int:
    """Ceiling; what lies above a whole number by rounding errors alone counts as that number."""
    return math.ceil(value - 1e-9 * abs(value))


def _ratios(state: types.PredictorState, cfg: config.Predictor) -> np.ndarray:
    """T / K of the steps in use, f64[count], oldest first."""
    used = min(int(state.count), cfg.window)
    asked, kept = (values[len(values) - used:].astype(np.float64)
                   for values in (state.asked, state.kept))
    none_kept = np.minimum((asked + 1) / 0.5, cfg.max_multiplier)
    return np.where(kept > 0, asked / np.maximum(kept, 1), none_kept)


def _fixed(state: types.PredictorState, cfg: config.Predictor) -> float:
    del state
    return cfg.multiplier


def _window(state: types.PredictorState, cfg: config.Predictor) -> float:
    ratios = _ratios(state, cfg)
    if len(ratios) == 0 or (len(ratios) < cfg.window and not cfg.eager):
        return cfg.multiplier
    decay = cfg.gamma ** np.arange(len(ratios))[::-1]
    spread = (np.mean(ratios) + cfg.alpha * np.std(ratios)) * cfg.ratio1
    recent = np.sum(decay * ratios) / np.sum(decay) * cfg.ratio2
    return float(max(spread, recent) * cfg.q)


MULTIPLIERS = {"fixed": _fixed, "window": _window}
