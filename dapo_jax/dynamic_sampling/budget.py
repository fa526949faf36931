"""How many samples each prompt gets, in stages: so many now, and by what they gave, more or stop.

P(mixed) of n samples at pass rate p is 1 - p^n - (1 - p)^n: the chance that right and wrong both
occur, so that the group carries gradient.
"""

from collections.abc import Callable

import numpy as np

from dapo_jax import config


def mixed(p: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Chance that `n` samples at pass rate `p` are neither all right nor all wrong, f64; 0 for
    n < 2."""
    p, n = np.asarray(p, np.float64), np.asarray(n)
    chance = 1 - p ** np.maximum(n, 1) - (1 - p) ** np.maximum(n, 1)
    return np.where(n < 2, 0.0, np.maximum(chance, 0.0))


def least_mixed(p: np.ndarray, *, tau: float, least: int, most: int) -> np.ndarray:
    """The smallest n from `least` to `most` with P(mixed) >= tau, i32; `most` where none has it."""
    sizes = np.arange(least, most)
    short = mixed(np.asarray(p)[..., None], sizes) < tau * (1 - 1e-12)
    return (least + np.sum(short, axis=-1)).astype(np.int32)


def allocate(p: np.ndarray, *, total: int, least: int, most: int) -> np.ndarray:
    """Split `total` samples so that the expected number of mixed groups is largest, i32[n].

    Each of the prompts with pass rates `p`, f64[n], gets `least` to `most`; with least = 0 one may
    get nothing, and none gets a single sample, which is worth nothing. Fewer than `total` are given
    only where no more are of use. Raises ValueError unless n * least <= total and least != 1.

    Optimal: P(mixed) gains p^k (1-p) + (1-p)^k p with sample k + 1 (k >= 1), which falls in k, so
    from two samples on taking the largest gain next is optimal. A first pair gains 2 p (1-p), per
    sample what the third gains, so pairs may be taken sample by sample in the same order, if the
    one pair that the last sample may leave open is mended (`_mend`).
    """
    if least * len(p) > total or least == 1:
        raise ValueError(f"budget.allocate: total = {total} for {len(p)} prompts of at least "
                         f"{least}; give a total of at least n * least, and least 0 or from 2")
    gains = _gains(np.asarray(p, np.float64), most)
    steps = gains[:, least:]
    prompt, number = np.divmod(np.arange(steps.size), max(steps.shape[1], 1))
    number += least
    # Of equal gains those of lower number come first, and the halves of a pair together.
    order = np.lexsort([number, prompt, np.maximum(number, 1), -steps.ravel()])
    extra = np.bincount(prompt[order[:total - least * len(p)]], minlength=len(p))
    result = (least + extra).astype(np.int32)
    return _mend(result, gains, most) if least == 0 else result


def _gains(p: np.ndarray, most: int) -> np.ndarray:
    """What samples 1 ... most of each prompt add, f64[n, most]; half a pair's for its samples."""
    k = np.arange(most)
    q = 1 - p
    later = p[:, None] ** k * q[:, None] + q[:, None] ** k * p[:, None]
    gains = np.where(k < 2, (p * q)[:, None], later)
    return np.minimum.accumulate(gains, axis=1)  # rounding must not put a third before its pair


def _mend(result: np.ndarray, gains: np.ndarray, most: int) -> np.ndarray:
    """Without a single sample: complete the open pair with the least useful third or later sample
    of another prompt, or give its sample to the most useful next one, whichever gains more."""
    single = np.flatnonzero(result == 1)
    if not len(single):
        return result
    one, rows = int(single[0]), np.arange(len(result))
    last = np.where(result >= 3, gains[rows, np.maximum(result - 1, 0)], np.inf)
    after = np.where((result >= 2) & (result < most),
                     gains[rows, np.minimum(result, most - 1)], -np.inf)
    giver, taker = int(np.argmin(last)), int(np.argmax(after))
    mended = result.copy()
    if 2 * gains[one, 0] - last[giver] >= max(after[taker], 0.0):
        mended[[giver, one]] += np.array([-1, 1], np.int32)
    else:
        mended[one] = 0
        mended[taker] += after[taker] > 0
    return mended


def most(cfg: config.Budget, size: int) -> int:
    """Most samples that a group may get where the default is `size`."""
    bounds = {"fixed": size, "screening": size}
    return bounds.get(cfg.kind, cfg.most or 2 * size)


def more(
    cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, *, drawn: np.ndarray,
    mixed: np.ndarray, rate: np.ndarray, size: int,
) -> np.ndarray:
    """Samples to draw now for each group, i32[n]; 0: it is complete.

    `successes` and `trials` i32[n] of the valid samples so far; `drawn` i32[n] all samples so far,
    those that failed too, which keeps every budget bounded; `mixed` bool[n]: its rewards differ;
    `rate` f64[n] the prompt's pass rate as known before this visit; `size` the default number.
    """
    wanted = KINDS[cfg.kind](cfg, successes, trials, drawn, mixed, rate, size)
    bounded = np.minimum(wanted, most(cfg, size) - drawn)
    return np.maximum(bounded, 0).astype(np.int32)


def _fixed(cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, drawn: np.ndarray,
           mixed: np.ndarray, rate: np.ndarray, size: int) -> np.ndarray:
    del cfg, successes, trials, mixed, rate
    return np.where(drawn == 0, size, 0)


def _hard_more(cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, drawn: np.ndarray,
               mixed: np.ndarray, rate: np.ndarray, size: int) -> np.ndarray:
    """As many as make both outcomes likely at the known pass rate."""
    del successes, trials, mixed
    wanted = least_mixed(rate, tau=cfg.tau, least=cfg.least, most=most(cfg, size))
    return np.where(drawn == 0, wanted, 0)


def _screening(cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, drawn: np.ndarray,
               mixed: np.ndarray, rate: np.ndarray, size: int) -> np.ndarray:
    """Stages of `first` while all are equal, at most `stages`; the rest once they differ."""
    del successes, trials, rate
    screened = drawn >= cfg.first * cfg.stages
    return np.where(mixed, size - drawn, np.where(screened, 0, cfg.first))


def _successive(cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, drawn: np.ndarray,
                mixed: np.ndarray, rate: np.ndarray, size: int) -> np.ndarray:
    """Stages of `first` until each outcome occurred `each` times."""
    del mixed, rate, size
    rarer = np.minimum(successes, trials - successes)
    return np.where(rarer >= cfg.each, 0, cfg.first)


def _allocate(cfg: config.Budget, successes: np.ndarray, trials: np.ndarray, drawn: np.ndarray,
              mixed: np.ndarray, rate: np.ndarray, size: int) -> np.ndarray:
    """`size` samples per new prompt on average, put where they make most groups mixed."""
    del successes, trials, mixed
    new = drawn == 0
    result = np.zeros(len(drawn), np.int32)
    result[new] = allocate(rate[new], total=size * int(np.sum(new)), least=cfg.least,
                           most=most(cfg, size))
    return result


KINDS: dict[str, Callable[..., np.ndarray]] = {
    "fixed": _fixed, "hard_more": _hard_more, "screening": _screening, "successive": _successive,
    "allocate": _allocate}
