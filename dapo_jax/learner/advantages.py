"""Advantages: what each sample's tokens are worth against a baseline.

Every function takes `(rewards f32[n], group i32[n], *, valid bool[n], lengths i32[n], settings)`
and returns f32[n]. Groups are found by id alone: they may differ in size, and permuting the rows
permutes the result. An invalid sample gets 0 and is out of every statistic; so is a group with
fewer than two valid samples, because it has no baseline (`ones` excepted: it needs none).

Call them on the whole rollout batch, before it is cut into updates or microbatches.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Settings:
    """`ddof` of the group's standard deviation (1 or 0); `eps` is added to every deviation."""

    ddof: int = 1
    eps: float = 1e-6


def grpo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """(r - group mean) / (group std + eps); arXiv 2402.03300, equation 3 and arXiv 2503.14476."""
    centred, used, inverse, count = _centre(rewards, group, valid)
    squares = np.bincount(inverse, centred ** 2)
    std = np.sqrt(squares / np.maximum(count - settings.ddof, 1))
    return _finish(centred / (std[inverse] + settings.eps), used)


def dr_grpo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
            settings: Settings) -> np.ndarray:
    """r - group mean; arXiv 2503.20783."""
    centred, used, _, _ = _centre(rewards, group, valid)
    return _finish(centred, used)


def rloo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """r - mean of the *other* samples of the group, = n / (n - 1) centred; arXiv 2402.14740."""
    centred, used, inverse, count = _centre(rewards, group, valid)
    return _finish(centred * (count / np.maximum(count - 1, 1))[inverse], used)


def reinforce_baseline(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray,
                       lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """r - group mean, whitened over all *tokens* of the batch; arXiv 2501.03262.

    A sample counts as many times as it has tokens, in the mean and in the (population) deviation:
    with unequal lengths the mean shifts too. `group_batch` is the same by samples.
    """
    centred, used, _, _ = _centre(rewards, group, valid)
    share = np.where(used, lengths, 0).astype(np.float64)
    share /= max(share.sum(), 1.0)
    shifted = centred - (share * centred).sum()
    std = np.sqrt((share * shifted ** 2).sum())
    return _finish(shifted / (std + settings.eps), used)


def group_batch(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray,
                lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """(r - group mean) / (root of the mean squared centred reward over all *samples* + eps)."""
    centred, used, _, _ = _centre(rewards, group, valid)
    std = np.sqrt((centred ** 2).sum() / max(used.sum(), 1))
    return _finish(centred / (std + settings.eps), used)


def ones(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """1 for every valid sample: supervised fine-tuning, or on the samples that were selected."""
    return _finish(np.ones(len(rewards)), valid)


def _centre(rewards: np.ndarray, group: np.ndarray, valid: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Centred rewards f64[n], 0 where unused; used bool[n]; each row's group; valid per group."""
    ids, inverse = np.unique(group, return_inverse=True)
    count = np.bincount(inverse, valid, minlength=len(ids))
    used = valid & (count[inverse] >= 2)
    rewards = np.where(used, rewards, 0.0).astype(np.float64)
    mean = np.bincount(inverse, rewards, minlength=len(ids)) / np.maximum(count, 1)
    return np.where(used, rewards - mean[inverse], 0.0), used, inverse, count


def _finish(advantages: np.ndarray, used: np.ndarray) -> np.ndarray:
    return np.where(used, advantages, 0.0).astype(np.float32)


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "group_batch": group_batch,
    "ones": ones,
}
