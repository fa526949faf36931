import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dapo_jax import types
from dapo_jax.learner import algorithms, losses, weights

TOKEN = losses.LossSettings(ratio="token", clip_low=0.2, clip_high=0.28, dual_clip=0.0,
                            entropy_coef=0.0)
VARIANTS = {
    "token": TOKEN,
    "dual": dataclasses.replace(TOKEN, dual_clip=1.5),
    "sequence": dataclasses.replace(TOKEN, ratio="sequence", clip_low=0.05, clip_high=0.1),
    "none": dataclasses.replace(TOKEN, ratio="none"),
    "entropy": dataclasses.replace(TOKEN, entropy_coef=0.3),
}


def batch(seed=0, rows=6, width=5):
    """logprobs, old, advantages, weights, entropy; ratios from about 0.3 to 3."""
    rng = np.random.default_rng(seed)
    old = -rng.random((rows, width)) * 2
    mask = rng.random((rows, width)) < 0.7
    mask[0], mask[1] = True, False
    table = weights.token(mask, np.arange(rows), max_length=width)
    advantages = np.where(np.arange(rows) % 2, -1.0, 1.0)[:, None] * rng.random((rows, 1))
    arrays = (old + rng.normal(size=old.shape) * 0.5, old, np.broadcast_to(advantages, old.shape),
              table, rng.random(old.shape))
    return tuple(np.array(a, np.float32) for a in arrays)


def eager(arrays, settings):
    *rest, entropy = arrays
    return losses.policy_loss(*rest, entropy=entropy, settings=settings)


def eager_gradient(arrays, settings):
    return jax.grad(lambda x: eager((x, *arrays[1:]), settings)[0])(arrays[0])


call = jax.jit(eager, static_argnums=1)
gradient = jax.jit(eager_gradient, static_argnums=1)


def values(*parts):
    """Metrics of all parts together, each merged by its own reduction."""
    def value(metrics):
        if isinstance(metrics[0], types.Max):
            return max(float(m.value) for m in metrics)
        return float(sum(m.total for m in metrics)) / float(sum(m.weight for m in metrics))
    return {name: value([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_loss_is_that_of_the_papers(settings):
    arrays = batch()
    want = reference.policy_loss(
        *(a.tolist() for a in arrays), ratio=settings.ratio, low=settings.clip_low,
        high=settings.clip_high, dual=settings.dual_clip, entropy_coef=settings.entropy_coef)
    loss, metrics = eager(tuple(jnp.asarray(a) for a in arrays), settings)
    np.testing.assert_allclose(loss, want, atol=1e-6)
    compiled, compiled_metrics = call(arrays, settings)
    np.testing.assert_allclose(compiled, loss, atol=1e-6)
    assert values(compiled_metrics) == pytest.approx(values(metrics), abs=1e-6)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_gradient_is_that_of_finite_differences(settings):
    with jax.enable_x64(True):
        arrays = tuple(a.astype(np.float64) for a in batch(seed=3))
        got = np.array(gradient(arrays, settings))
        step = 1e-6
        for index in np.ndindex(got.shape):
            moved = []
            for sign in (1, -1):
                shifted = arrays[0].copy()
                shifted[index] += sign * step
                moved.append(float(call((shifted, *arrays[1:]), settings)[0]))
            assert got[index] == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("preset", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_loss_and_gradient_equal_torch_with_min_and_clamp(preset):
    torch = pytest.importorskip("torch")
    algorithm = algorithms.PRESETS[preset]()
    settings = algorithms.loss_settings(algorithm)
    spread = 1e-3 if preset == "gspo" else 1.0
    logprobs, old, advantages, table, entropy = batch(seed=5)
    mask = table > 0
    table = weights.WEIGHTS[algorithm.weights](mask, np.arange(6), max_length=20)
    logprobs = old + spread * (logprobs - old)

    new = torch.tensor(logprobs, requires_grad=True)
    on, gain = torch.tensor(mask).float(), torch.tensor(advantages)
    log_ratio = new - torch.tensor(old)
    if preset == "gspo":
        # s = sg[s_i] * pi / sg[pi] gives each token the gradient of its own log-prob (GSPO-token);
        # with one advantage per row its sum is that of GSPO.
        whole = ((log_ratio * on).sum(1) / on.sum(1).clamp(min=1))[:, None].detach()
        log_ratio = whole + new - new.detach()
    ratio = log_ratio.exp()
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(preset, (0.2, 0.2))
    per_token = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - low, 1 + high))
    if preset == "dapo":
        per_token = torch.where(gain < 0, torch.minimum(per_token, -10 * gain), per_token)
    rows = (on.sum(1) > 0).sum()
    by_row = (per_token * on).sum(1)
    loss = {"dapo": by_row.sum() / on.sum(), "dr_grpo": by_row.sum() / (rows * 20)}.get(
        preset, (by_row / on.sum(1).clamp(min=1)).sum() / rows)
    loss.backward()

    arrays = (logprobs, old, advantages, table, entropy)
    np.testing.assert_allclose(call(arrays, settings)[0], loss.item(), atol=1e-6)
    np.testing.assert_allclose(gradient(arrays, settings), new.grad.numpy(), atol=1e-6)


def test_sft_is_the_cross_entropy_of_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(size=(4, 6, 11)).astype(np.float32), rng.integers(0, 11, (4, 6))
    mask = np.arange(6) < np.array([[6], [2], [4], [1]])
    table = weights.token(mask, np.arange(4), max_length=6)
    zeros, settings = np.zeros((4, 6), np.float32), algorithms.loss_settings(algorithms.sft())

    def loss(logits):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return call((logprobs, zeros, zeros + 1, table, zeros), settings)[0]

    theirs = torch.tensor(logits, requires_grad=True)
    want = torch.nn.functional.cross_entropy(
        theirs.reshape(-1, 11), torch.tensor(np.where(mask, targets, -100)).reshape(-1))
    want.backward()
    got, slope = jax.value_and_grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(got, want.item(), atol=1e-6)
    np.testing.assert_allclose(slope, theirs.grad.numpy(), atol=1e-6)


def row(ratio, advantages):
    """One row of given ratios, each token of weight 1."""
    old = np.full((1, len(ratio)), -1.0, np.float32)
    return (old + np.log(np.array([ratio], np.float32)), old, np.array([advantages], np.float32),
            np.ones_like(old), np.full_like(old, 0.7))


def test_clip_truth_table():  # B39
    ratio, advantages = (1.5, 0.5, 1.5, 0.5), (1.0, -1.0, -1.0, 1.0)
    for i, want in enumerate((-1.28, 0.8, 1.5, -0.5)):
        assert call(row(ratio[i:i + 1], advantages[i:i + 1]), TOKEN)[0] == pytest.approx(want)
    arrays = row(ratio, advantages)
    np.testing.assert_allclose(gradient(arrays, TOKEN), [[0, 0, 1.5, -0.5]], atol=1e-6)
    metrics = values(call(arrays, TOKEN)[1])
    assert metrics["policy/clip_high"] == pytest.approx(0.25)
    assert metrics["policy/clip_low"] == pytest.approx(0.25)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)
    assert metrics["policy/entropy"] == pytest.approx(0.7)
    assert metrics["policy/kl"] == pytest.approx(-np.log(0.75) / 2)


def test_the_two_bounds_are_two():
    arrays = row((1.25, 0.75, 1.3), (1.0, -1.0, 1.0))
    np.testing.assert_allclose(gradient(arrays, TOKEN), [[-1.25, 0, 0]], atol=1e-6)


def test_metrics_are_over_the_loss_tokens_only():
    arrays = batch(seed=4)
    logprobs, old, advantages, table, entropy = arrays
    tokens = [(math.exp(logprobs[at] - old[at]), advantages[at], entropy[at])
              for at in zip(*np.nonzero(table))]
    want = {
        "policy/ratio_mean": np.mean([r for r, _, _ in tokens]),
        "policy/ratio_max": max(r for r, _, _ in tokens),
        "policy/clip_high": np.mean([r > 1.28 and a > 0 for r, a, _ in tokens]),
        "policy/clip_low": np.mean([r < 0.8 and a < 0 for r, a, _ in tokens]),
        "policy/kl": np.mean([r - 1 - math.log(r) for r, _, _ in tokens]),
        "policy/entropy": np.mean([e for _, _, e in tokens]),
    }
    assert values(call(arrays, TOKEN)[1]) == pytest.approx(want, abs=1e-6)
    unclipped = values(call(arrays, VARIANTS["none"])[1])
    assert unclipped == pytest.approx({"policy/entropy": want["policy/entropy"]})


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    settings = dataclasses.replace(TOKEN, dual_clip=3.0)
    arrays = row((5.0, 2.0, 5.0), (-1.0, -1.0, 1.0))
    np.testing.assert_allclose(call(arrays, settings)[0], 3.0 + 2.0 - 1.28, rtol=1e-6)
    np.testing.assert_allclose(gradient(arrays, settings), [[0, 2, 0]], atol=1e-6)


@pytest.mark.parametrize("settings", [TOKEN, VARIANTS["sequence"], dataclasses.replace(
    TOKEN, clip_low=0.0, clip_high=0.0)], ids=["token", "sequence", "no room"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_reinforce(settings):  # B38
    _, old, advantages, _, entropy = batch()
    table = weights.sequence(np.ones_like(old, bool), np.arange(6), max_length=5)
    arrays = (old, old, advantages, table, entropy)
    metrics = values(call(arrays, settings)[1])
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == metrics["policy/kl"] == 0
    slope = np.array(gradient(arrays, settings))
    np.testing.assert_allclose(slope, -advantages * table, atol=1e-7)
    assert np.abs(slope).max() > 0
    moved = (old - slope, *arrays[1:])
    assert values(call(moved, settings)[1])["policy/ratio_max"] > 1


def test_temperature_belongs_inside_the_softmax():  # B36
    logprobs = jax.nn.log_softmax(jnp.array([[2.0, 0.0]]) / 0.5)[:, :1]
    np.testing.assert_allclose(logprobs, -0.01815, atol=1e-5)
    arrays = (logprobs, np.full((1, 1), -0.01815), np.ones((1, 1)), np.ones((1, 1)),
              np.zeros((1, 1)))
    assert values(call(arrays, TOKEN)[1])["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("preset,want", [("dapo", 1.8), ("grpo", 3.0), ("gspo", 3.0)])
def test_presets_aggregate_as_their_papers_say(preset, want):  # B25, B35
    algorithm = algorithms.PRESETS[preset]()
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    table = weights.WEIGHTS[algorithm.weights](mask, np.zeros(2, int), max_length=4)
    old = np.full((2, 4), -1.0)
    arrays = (old, old, np.array([[-1.0], [-5.0]]) * np.ones((2, 4)), table, old)
    settings = algorithms.loss_settings(algorithm)
    assert call(arrays, settings)[0] == pytest.approx(want)
    assert sum(float(call([a[i:i + 1] for a in arrays], settings)[0])
               for i in range(2)) == pytest.approx(want)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_any_split_has_the_same_loss_gradient_and_metrics(settings):
    with jax.enable_x64(True):
        arrays = tuple(a.astype(np.float64) for a in batch(seed=7))
        loss, metrics = call(arrays, settings)
        whole = gradient(arrays, settings)
        for cuts in ([1], [2, 3], [1, 2, 5], [1, 2, 3, 4, 5]):  # row 1 is masked: an empty one too
            parts = list(zip(*(np.split(a, cuts) for a in arrays)))
            results = [call(part, settings) for part in parts]
            assert float(sum(x for x, _ in results)) == pytest.approx(float(loss), abs=1e-12)
            assert values(*(m for _, m in results)) == pytest.approx(values(metrics), abs=1e-12)
            split = np.concatenate([gradient(part, settings) for part in parts])
            np.testing.assert_allclose(split, whole, atol=1e-12)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_masked_tokens_touch_nothing_whatever_they_hold(settings, junk):
    arrays = batch(seed=1)
    masked = arrays[3] == 0
    dirty = tuple(jnp.asarray(np.where(masked, np.float32(junk), a) if i != 3 else a)
                  for i, a in enumerate(arrays))
    with jax.debug_nans(True):
        loss, metrics = eager(dirty, settings)
        slope = eager_gradient(dirty, settings)
    arrays = tuple(jnp.asarray(a) for a in arrays)
    clean, clean_metrics = eager(arrays, settings)
    assert loss == clean and values(metrics) == values(clean_metrics)
    np.testing.assert_array_equal(slope, eager_gradient(arrays, settings))
    assert (np.array(slope)[masked] == 0).all()


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_masking_everything_gives_zero_loss_and_zero_gradient(settings):  # B29
    junk, zeros = jnp.full((6, 5), jnp.nan), jnp.zeros((6, 5))
    arrays = (junk, junk, junk, zeros, junk)
    with jax.debug_nans(True):
        loss, metrics = eager(arrays, settings)
        slope = eager_gradient(arrays, settings)
    assert loss == 0 and (np.array(slope) == 0).all()
    assert all(float(m.weight) == 0 for m in metrics.values() if isinstance(m, types.Mean))
    assert all(float(m.value) == 0 for m in metrics.values() if isinstance(m, types.Max))


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_permuting_rows_changes_nothing(settings):
    arrays = batch(seed=9)
    order = np.random.default_rng(0).permutation(6)
    np.testing.assert_allclose(call([a[order] for a in arrays], settings)[0],
                               call(arrays, settings)[0], atol=1e-6)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_hopeless_log_ratio_stays_finite(ratio):
    settings = dataclasses.replace(TOKEN, ratio=ratio)
    one = np.ones((1, 1), np.float32)
    with jax.debug_nans(True):
        for logprob, advantage in ((-1000, 1), (1000, -1), (-np.inf, -1)):
            arrays = (one * np.float32(logprob), -one, one * advantage, one, one)
            assert np.isfinite(call(arrays, settings)[0])
            assert np.isfinite(gradient(arrays, settings)).all()
