"""How many prompts to ask for, so that about as many groups as needed are informative.

x_t = target * T_t / K_t is the number of prompts that would have given exactly `target` groups in
step t, from T_t prompts sampled and K_t groups kept. The ratio is stored, never the answer, which
would feed on itself and grow.

The maths is written once: `xp` is numpy (the default) or jax.numpy, inside a jitted function too.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.scipy import special as device_special
from scipy import special as host_special

from dapo_jax import config, types

Number = Any  # a float, or an array of shape [] of either namespace
PASSES, PARTS = 5, 64  # a pass makes the interval that holds a margin PARTS times smaller


def init(cfg: config.Predictor) -> types.PredictorState:
    """An empty window of `cfg.window` steps, with the configured costs."""
    return types.PredictorState(
        asked=np.zeros(cfg.window, np.int32), kept=np.zeros(cfg.window, np.int32),
        count=np.asarray(0, np.int32), round_cost=np.asarray(cfg.round_cost, np.float32),
        prompt_cost=np.asarray(cfg.prompt_cost, np.float32))


def calibrated(state: types.PredictorState, *, round_cost: float,
               prompt_cost: float) -> types.PredictorState:
    """With the costs of one more round and of one more prompt, in one unit.

    Raises ValueError unless both are finite and above 0.
    """
    if not all(0 < cost < math.inf for cost in (round_cost, prompt_cost)):
        raise ValueError(f"predictor.calibrated: round_cost = {round_cost}, prompt_cost = "
                         f"{prompt_cost}; give finite numbers above 0, in one unit")
    return dataclasses.replace(state, round_cost=np.asarray(round_cost, np.float32),
                               prompt_cost=np.asarray(prompt_cost, np.float32))


def update(state: types.PredictorState, asked: int, kept: int, *,
           cfg: config.Predictor) -> types.PredictorState:
    """Append one step: `asked` prompts sampled, of which `kept` groups were informative.

    A step that kept nothing is an observation too. Raises ValueError unless 0 <= kept <= asked
    and asked > 0. With numbers of a jitted function see `append`.
    """
    if not 0 <= kept <= asked or asked == 0:
        raise ValueError(f"predictor.update: asked = {asked}, kept = {kept}; a step that sampled "
                         "has asked > 0 and 0 <= kept <= asked; leave other steps out")
    return append(state, asked, kept)


def append(state: types.PredictorState, asked: Number, kept: Number, *,
           xp: Any = np) -> types.PredictorState:
    """`update` without a check, for any namespace."""
    def shift(values: Number, value: Number) -> Number:
        return xp.concatenate([values[1:], xp.asarray(value, dtype=np.int32)[None]])
    count = xp.minimum(state.count + 1, len(state.asked))
    return dataclasses.replace(state, asked=shift(state.asked, asked),
                               kept=shift(state.kept, kept), count=xp.asarray(count, np.int32))


def predict(state: types.PredictorState, target: int, cfg: config.Predictor, *,
            absorbed: float = 0.0) -> int:
    """Prompts to sample first for `target` groups: in [target, ceil(max_multiplier * target)].

    `absorbed`: surplus groups that later steps will train on before they expire.
    """
    return int(request(state, target, cfg, absorbed=absorbed))


def request(state: types.PredictorState, target: Number, cfg: config.Predictor, *,
            absorbed: Number = 0.0, xp: Any = np) -> Number:
    """`predict` for any namespace, i32[]; 0 where nothing is needed."""
    need = xp.asarray(target, dtype=float)
    safe = xp.maximum(need, 1.0)
    wanted = WANTED[cfg.kind](state, safe, cfg, xp.asarray(absorbed, dtype=float), xp)
    most = xp.maximum(safe, _ceil(cfg.max_multiplier * safe, xp))
    # Bounded before it is a whole number: a margin may be infinite.
    count = xp.maximum(safe, _ceil(xp.minimum(wanted, most), xp))
    return xp.where(need > 0, count, 0.0).astype(np.int32)


def bound(target: int, cfg: config.Predictor) -> int:
    """Most prompts that one request may name for `target` groups."""
    return max(target, int(_ceil(cfg.max_multiplier * target, np)))


def refill(deficit: float, asked: int, kept: float, *, factor: float) -> int:
    """Prompts to sample for `deficit` more groups after `kept` of `asked` were informative."""
    return int(_ceil(factor * max(deficit, 0) * (asked + 1) / (kept + 0.5), np))


def acceptance(state: types.PredictorState, *, xp: Any = np) -> Number:
    """Pooled share of informative groups over the window: (sum K + 1/2) / (sum T + 1)."""
    asked, kept = (xp.sum(xp.where(_used(state, xp), values, 0))
                   for values in (state.asked, state.kept))
    return xp.asarray(kept + 0.5, dtype=float) / (asked + 1.0)


def margin(spread: Number, cost_ratio: Number, *, room: Number = 0.0, xp: Any = np) -> Number:
    """z, f[]: by how many spreads to ask for more than the need, at the least expected cost.

    `spread`: s, the standard deviation, in prompts, of how many prompts the target takes;
    `cost_ratio`: a / c, a further round in prompts; `room`: surplus groups that are absorbed, as a
    multiple of their own standard deviation.

    Asking for need + z s costs c z s, and a further round with the chance P(Z > z). The sum is
    least where a phi(z) = c s, so z = sqrt(2 ln(a / (sqrt(2 pi) c s))), or 0 where there is no such
    z. With room, a prompt more is lost only if its group expires; else it saves a later step the
    c it cost. Informative groups beyond the target have mean z and standard deviation 1 in units of
    their own spread s A, A the acceptance, so a group more expires with P(Z > room - z) and
    a phi(z) = c P(Z > room - z) s. The left side falls and the right side rises with z: one root at
    most, found by narrowing the interval.
    """
    logarithm = xp.log(cost_ratio / (math.sqrt(2 * math.pi) * spread))
    alone = xp.sqrt(2 * xp.maximum(logarithm, 0.0))
    erfc = (host_special if xp is np else device_special).erfc
    low, high = alone, alone + room + 40.0
    for _ in range(PASSES):
        z = low + (high - low) * np.linspace(0.0, 1.0, PARTS + 1)
        expires = 0.5 * erfc((room - z) / math.sqrt(2))
        expires = xp.maximum(expires, xp.finfo(expires.dtype).tiny)
        worth = z ** 2 / 2 + xp.log(expires) <= logarithm
        low, high = xp.max(xp.where(worth, z, low)), xp.min(xp.where(worth, high, z))
    return xp.where(room > 0, low, alone)


def _used(state: types.PredictorState, xp: Any) -> Number:
    return xp.arange(len(state.asked)) >= len(state.asked) - state.count


def _ceil(value: Number, xp: Any) -> Number:
    """Ceiling; what lies above a whole number by rounding errors alone counts as that number."""
    slack = 1e-9 if np.dtype(xp.asarray(value, dtype=float).dtype) == np.float64 else 1e-6
    return xp.ceil(value - slack * xp.abs(value))


def _fixed(state: types.PredictorState, need: Number, cfg: config.Predictor, absorbed: Number,
           xp: Any) -> Number:
    del state, absorbed, xp
    return cfg.multiplier * need


def _window(state: types.PredictorState, need: Number, cfg: config.Predictor, absorbed: Number,
            xp: Any) -> Number:
    del absorbed
    used, size = _used(state, xp), len(state.asked)
    asked, kept = (xp.asarray(values, dtype=float) for values in (state.asked, state.kept))
    none_kept = xp.minimum((asked + 1) / 0.5, cfg.max_multiplier)
    ratios = xp.where(kept > 0, asked / xp.maximum(kept, 1), none_kept)

    def mean(values: Number, weight: Number) -> Number:
        weight = xp.where(used, weight, 0.0)
        return xp.sum(weight * values) / xp.maximum(xp.sum(weight), 1e-30)

    average = mean(ratios, 1.0)
    std = xp.sqrt(mean((ratios - average) ** 2, 1.0))
    recent = mean(ratios, cfg.gamma ** np.arange(size)[::-1])
    fitted = xp.maximum((average + cfg.alpha * std) * cfg.ratio1, recent * cfg.ratio2) * cfg.q
    ready = state.count >= (1 if cfg.eager else size)
    return need * xp.where(ready, fitted, cfg.multiplier)


def _cost_optimal(state: types.PredictorState, need: Number, cfg: config.Predictor,
                  absorbed: Number, xp: Any) -> Number:
    rate = acceptance(state, xp=xp)
    spread = xp.sqrt(need * (1 - rate)) / rate
    known = (state.prompt_cost > 0) & (state.round_cost > 0)
    costs = (xp.asarray(cost, dtype=float) for cost in (state.round_cost, state.prompt_cost))
    ratio = xp.where(known, next(costs) / xp.where(known, next(costs), 1.0), 1.0)
    z = margin(spread, ratio, room=absorbed / (spread * rate), xp=xp)
    return xp.where(known & (state.count > 0), need / rate + z * spread, cfg.multiplier * need)


WANTED = {"fixed": _fixed, "window": _window, "cost_optimal": _cost_optimal}
