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
    """`ddof` of a deviation of rewards (1 or 0); `eps` is added to every deviation.

    `leave_one_out`: the baseline is the mean of the group's other samples, where it would be that
    of all; deviations stay those around the mean of all. `clip`: the largest size of the result,
    0 for no bound.
    """

    ddof: int = 1
    eps: float = 1e-6
    leave_one_out: bool = False
    clip: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Rewards f64[n], 0 where unused, and what is known of each row's group."""

    rewards: np.ndarray
    centred: np.ndarray  # f64[n] reward - mean of the group, 0 where unused
    used: np.ndarray  # bool[n]
    inverse: np.ndarray  # i64[n] row -> group
    count: np.ndarray  # f64[groups] valid samples


def grpo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """(r - group mean) / (group std + eps); arXiv 2402.03300, equation 3 and arXiv 2503.14476."""
    of = _groups(rewards, group, valid)
    squares = np.bincount(of.inverse, of.centred ** 2)
    std = np.sqrt(squares / np.maximum(of.count - settings.ddof, 1))
    return _finish(_above_baseline(of, settings) / (std[of.inverse] + settings.eps), of, settings)


def dr_grpo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
            settings: Settings) -> np.ndarray:
    """r - group mean; arXiv 2503.20783."""
    of = _groups(rewards, group, valid)
    return _finish(_above_baseline(of, settings), of, settings)


def rloo(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """r - mean of the *other* samples of the group, = n / (n - 1) centred; arXiv 2402.14740."""
    return dr_grpo(rewards, group, valid=valid, lengths=lengths,
                   settings=dataclasses.replace(settings, leave_one_out=True))


def reinforce_baseline(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray,
                       lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """r - group mean, whitened over all *tokens* of the batch; arXiv 2501.03262.

    A sample counts as many times as it has tokens, in the mean and in the (population) deviation:
    with unequal lengths the mean shifts too.
    """
    of = _groups(rewards, group, valid)
    return _finish(_whitened(of, lengths, settings), of, settings)


def reinforce_baseline_sample(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray,
                              lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """As `reinforce_baseline`, but each sample counts once, whatever its length."""
    of = _groups(rewards, group, valid)
    return _finish(_whitened(of, np.ones(len(rewards)), settings), of, settings)


def group_batch(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray,
                lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """(r - group mean) / (std of all *rewards* of the batch + eps); arXiv 2508.08221.

    The deviation is that of the rewards themselves: it also holds how far the groups' means lie
    apart, which `reinforce_baseline_sample` leaves out.
    """
    of = _groups(rewards, group, valid)
    count = of.used.sum()
    mean = of.rewards.sum() / max(count, 1)
    squares = np.where(of.used, (of.rewards - mean) ** 2, 0).sum()
    std = np.sqrt(squares / max(count - settings.ddof, 1))
    return _finish(_above_baseline(of, settings) / (std + settings.eps), of, settings)


def ones(rewards: np.ndarray, group: np.ndarray, *, valid: np.ndarray, lengths: np.ndarray,
         settings: Settings) -> np.ndarray:
    """1 for every valid sample: supervised fine-tuning, or on the samples that were selected."""
    return valid.astype(np.float32)


def _groups(rewards: np.ndarray, group: np.ndarray, valid: np.ndarray) -> _Groups:
    ids, inverse = np.unique(group, return_inverse=True)
    count = np.bincount(inverse, valid, minlength=len(ids))
    used = valid & (count[inverse] >= 2)
    rewards = np.where(used, rewards, 0.0).astype(np.float64)
    mean = np.bincount(inverse, rewards, minlength=len(ids)) / np.maximum(count, 1)
    return _Groups(rewards, np.where(used, rewards - mean[inverse], 0.0), used, inverse, count)


def _above_baseline(of: _Groups, settings: Settings) -> np.ndarray:
    if not settings.leave_one_out:
        return of.centred
    return of.centred * (of.count / np.maximum(of.count - 1, 1))[of.inverse]


def _whitened(of: _Groups, counts: np.ndarray, settings: Settings) -> np.ndarray:
    """Mean 0 and deviation 1 over the batch, in which a row counts `counts` times."""
    values = _above_baseline(of, settings)
    share = np.where(of.used, counts, 0).astype(np.float64)
    share /= max(share.sum(), 1.0)
    shifted = values - (share * values).sum()
    return shifted / (np.sqrt((share * shifted ** 2).sum()) + settings.eps)


def _finish(advantages: np.ndarray, of: _Groups, settings: Settings) -> np.ndarray:
    if settings.clip:
        advantages = np.clip(advantages, -settings.clip, settings.clip)
    return np.where(of.used, advantages, 0.0).astype(np.float32)


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "reinforce_baseline_sample": reinforce_baseline_sample,
    "group_batch": group_batch,
    "ones": ones,
}
DEVIATIONS_OF_REWARDS = ("grpo", "group_batch")  # those that read `ddof`
