"""Losses and gradients of TRL's GRPO trainer on the same tensors; skipped where trl is absent."""

import collections
import types

import jax
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.learner import algorithms, losses, weights

pytestmark = pytest.mark.slow  # importing it takes ten seconds
ROWS, WIDTH, LIMIT = 6, 5, 9
# What is changed of the preset -> TRL's settings. Its epsilon_high of cispo is the bound itself,
# and its delta bounds the ratio, which is the dual clip where advantages are negative.
VARIANTS = {
    "dapo": ({}, {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 10.0}),
    "dapo, delta that binds": ({"preset": "dapo", "dual_clip": 1.5},
                               {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5}),
    "grpo": ({}, {"loss_type": "grpo", "beta": 0.04}),
    "grpo, k3_weighted": ({"preset": "grpo", "kl_estimator": "k3_weighted"},
                          {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True}),
    "dr_grpo": ({}, {"loss_type": "dr_grpo"}),
    "gspo": ({"preset": "gspo", "clip_low": 0.1, "clip_high": 0.15},  # some are clipped
             {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}),
    "cispo": ({"preset": "cispo", "clip_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
}


def batch():
    """New, old and reference log-probs, advantages by sample, a mask of whole samples."""
    rng = np.random.default_rng(5)
    old = -rng.random((ROWS, WIDTH)) * 2
    mask = np.arange(WIDTH) < np.array([[5], [1], [3], [4], [2], [5]])
    near, far = (old + size * rng.normal(size=old.shape) for size in (0.5, 0.6))
    advantage = rng.normal(size=ROWS)
    return tuple(np.asarray(a, np.float32) for a in (near, old, far, advantage)) + (mask,)


def theirs(loss_type, *, level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0.0, delta=None,
           use_bias_correction_kl=False):
    """TRL's loss and its gradient by the log-probs, from its trainer's own method."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    new, old, reference, advantage, mask = map(torch.tensor, batch())
    new.requires_grad_()
    whole = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=epsilon_low,
        epsilon_high=epsilon_high, use_vllm=False, vllm_importance_sampling_correction=False,
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT, _entropy_bonus_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x,
                                          gather_for_metrics=lambda x: x,
                                          reduce=lambda x, reduction: x),
        args=types.SimpleNamespace(delta=delta, steps_per_generation=1,
                                   use_bias_correction_kl=use_bias_correction_kl))
    ids = torch.zeros(ROWS, 1, dtype=torch.long)
    loss = trainer._compute_loss(whole, None, {
        "prompt_ids": ids, "prompt_mask": ids + 1, "completion_mask": mask.long(),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.long), "advantages": advantage,
        "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum().float()})
    loss.backward()
    return loss.item(), new.grad.numpy()


def ours(preset, **changes):
    new, old, reference, advantage, mask = batch()
    algorithm = algorithms.resolve(config.AlgorithmChoice(preset=preset, **changes), where="rl")
    table = weights.WEIGHTS[algorithm.weights](mask, np.arange(ROWS), max_length=LIMIT)
    gain = np.broadcast_to(advantage[:, None], new.shape)

    def loss(logprobs):
        return losses.policy_loss(logprobs, old, gain, table, entropy=np.zeros_like(new),
                                  settings=algorithms.loss_settings(algorithm),
                                  reference=reference)[0]

    return jax.value_and_grad(loss)(new)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_equal_trl_s(name):
    changes, settings = VARIANTS[name]
    want = theirs(**settings)
    got = ours(**({"preset": name} | changes))
    assert float(got[0]) == pytest.approx(want[0], abs=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
    assert np.abs(want[1]).max() > 1e-2
