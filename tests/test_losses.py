import dataclasses
import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, strategies

from dapo_jax import reductions
from dapo_jax.learner import algorithms, losses, weights

TOKEN = losses.LossSettings(ratio="token", clip_low=0.2, clip_high=0.28, dual_clip=0.0,
                            entropy_coef=0.0)
RECOMPUTED = dataclasses.replace(TOKEN, old_logprobs="recomputed", importance_min=0.6,
                                 importance_max=1.5)
VARIANTS = {
    "token": TOKEN,
    "dual": dataclasses.replace(TOKEN, dual_clip=1.5),
    "sequence": dataclasses.replace(TOKEN, ratio="sequence", clip_low=0.05, clip_high=0.1),
    "none": dataclasses.replace(TOKEN, ratio="none"),
    "entropy": dataclasses.replace(TOKEN, entropy_coef=0.3),
    "cispo": dataclasses.replace(TOKEN, objective="cispo", clip_low=1.0, clip_high=0.5),
    "cispo, sequence": dataclasses.replace(TOKEN, objective="cispo", ratio="sequence"),
    **{name: dataclasses.replace(TOKEN, kl_estimator=name, kl_coef=0.5) for name in losses.KLS},
    "truncate": RECOMPUTED,
    "truncate, sequence": dataclasses.replace(RECOMPUTED, importance="sequence"),
    "mask": dataclasses.replace(RECOMPUTED, importance_mode="mask"),
    "mask, sequence": dataclasses.replace(RECOMPUTED, importance_mode="mask",
                                          importance="sequence"),
    "uncorrected": dataclasses.replace(RECOMPUTED, importance="none"),
    "corrected, no ratio": dataclasses.replace(RECOMPUTED, ratio="none"),
    "corrected, all": dataclasses.replace(
        RECOMPUTED, dual_clip=1.5, entropy_coef=0.1, kl_coef=0.3, kl_estimator="k3_weighted"),
}
FEW = {name: VARIANTS[name] for name in ("token", "sequence", "none", "cispo", "corrected, all",
                                         "mask, sequence")}


def batch(seed=0, rows=6, width=5):
    """logprobs, old, advantages, weights, entropy, and log-probs of sampler and reference;
    ratios from about 0.3 to 3."""
    rng = np.random.default_rng(seed)
    old = -rng.random((rows, width)) * 2
    mask = rng.random((rows, width)) < 0.7
    mask[0], mask[1] = True, False
    table = weights.token(mask, np.arange(rows), max_length=width)
    advantages = np.where(np.arange(rows) % 2, -1.0, 1.0)[:, None] * rng.random((rows, 1))
    arrays = (old + rng.normal(size=old.shape) * 0.5, old, np.broadcast_to(advantages, old.shape),
              table, rng.random(old.shape), old + rng.normal(size=old.shape) * 0.4,
              old + rng.normal(size=old.shape) * 0.6)
    return tuple(np.array(a, np.float32) for a in arrays)


def eager(arrays, settings):
    *rest, entropy = arrays[:5]
    sampled, reference = arrays[5:] or (None, None)
    return losses.policy_loss(
        *rest, entropy=entropy, settings=settings, reference=reference,
        sampled=sampled if settings.old_logprobs == "recomputed" else None)


def eager_gradient(arrays, settings):
    return jax.grad(lambda x: eager((x, *arrays[1:]), settings)[0])(arrays[0])


call = jax.jit(eager, static_argnums=1)
gradient = jax.jit(eager_gradient, static_argnums=1)


def values(*parts):
    """Metrics of all parts together, each merged by its own reduction."""
    def value(metrics):
        if isinstance(metrics[0], reductions.Max):
            return max(float(m.value) for m in metrics)
        if isinstance(metrics[0], reductions.Effective):
            total, squares, count = (sum(float(getattr(m, name)) for m in metrics)
                                     for name in ("total", "squares", "count"))
            return total ** 2 / (squares * count)
        return float(sum(m.total for m in metrics)) / float(sum(m.weight for m in metrics))
    return {name: value([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_loss_is_that_of_the_papers(settings):
    arrays = batch()
    want = reference.policy_loss(
        *(a.tolist() for a in arrays), **dataclasses.asdict(settings))
    loss, metrics = eager(tuple(jnp.asarray(a) for a in arrays), settings)
    np.testing.assert_allclose(loss, want, atol=1e-6)
    compiled, compiled_metrics = call(arrays, settings)
    np.testing.assert_allclose(compiled, loss, atol=1e-6)
    assert values(compiled_metrics) == pytest.approx(values(metrics), abs=1e-6)


@pytest.mark.parametrize("name", ["token", "dual", "sequence", "none", "entropy", "corrected, all"])
def test_gradient_is_that_of_finite_differences(name):
    settings = VARIANTS[name]
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
    logprobs, old, advantages, table, entropy = batch(seed=5)[:5]
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

    arrays = (logprobs, old, advantages, table, entropy, old, logprobs)  # a KL of 0
    np.testing.assert_allclose(call(arrays, settings)[0], loss.item(), atol=1e-6)
    np.testing.assert_allclose(gradient(arrays, settings), new.grad.numpy(), atol=1e-6)


def torch_loss(torch, settings, new, old, gain, table, entropy, sampled, reference):
    """All variants but GSPO, as one would write them in PyTorch."""
    on = (table > 0).float()
    ratio = (new - old).exp()
    if settings.ratio == "sequence":
        ratio = (((new - old) * on).sum(1) / on.sum(1).clamp(min=1))[:, None].exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.ratio == "none":
        loss = -gain * new
    elif settings.objective == "cispo":
        loss = -ratio.clamp(low, high).detach() * gain * new
    else:
        loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(low, high))
        if settings.dual_clip:
            loss = torch.where(gain < 0, torch.minimum(loss, -settings.dual_clip * gain), loss)
    weight = torch.ones_like(new)
    if settings.old_logprobs == "recomputed" and settings.importance != "none":
        gap = old - sampled
        if settings.importance == "sequence":
            gap = (gap * on).sum(1, keepdim=True).expand_as(gap)
        weight, bounds = gap.exp(), (settings.importance_min, settings.importance_max)
        inside = (weight >= bounds[0]) & (weight <= bounds[1])
        weight = weight * inside if settings.importance_mode == "mask" else weight.clamp(*bounds)
    apart = new - reference
    k3 = (-apart).exp() - 1 + apart
    kl = {"k1": apart, "k2": apart ** 2 / 2, "k3": k3,
          "k3_weighted": weight * (new - old).exp() * k3}[settings.kl_estimator]
    loss = weight * loss + settings.kl_coef * kl - settings.entropy_coef * entropy
    return (loss * table).sum()


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_has_the_value_and_gradient_of_torch(settings):
    torch = pytest.importorskip("torch")
    arrays = batch(seed=8)
    tensors = [torch.tensor(a) for a in arrays]
    new = tensors[0].requires_grad_()
    loss = torch_loss(torch, settings, *tensors)
    loss.backward()
    np.testing.assert_allclose(call(arrays, settings)[0], loss.item(), atol=2e-6)
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


def test_cispo_weighs_clipped_tokens_down_but_leaves_their_gradient():
    settings = dataclasses.replace(TOKEN, objective="cispo", clip_low=0.4)
    arrays = row((1.5, 0.5, 1.5, 0.9), (1.0, -1.0, -1.0, 1.0))
    np.testing.assert_allclose(gradient(arrays, settings), [[-1.28, 0.6, 1.28, -0.9]], rtol=1e-6)
    metrics = values(call(arrays, settings)[1])
    assert (metrics["policy/clip_high"], metrics["policy/clip_low"]) == (0.5, 0.25)


@pytest.mark.parametrize("name,want", [
    ("k1", (0.5, -0.5)), ("k2", (0.125, 0.125)), ("k3", (0.106531, 0.148721)),
    ("k3_weighted", (0.106531, 0.148721))])
def test_the_kl_estimators_and_the_sign_of_the_penalty(name, want):  # B41
    one, settings = np.ones((1, 1), np.float32), dataclasses.replace(
        TOKEN, kl_coef=2.0, kl_estimator=name)
    for (logprob, other), value in zip(((-1.0, -1.5), (-1.5, -1.0)), want):
        arrays = (logprob * one, logprob * one, 0 * one, one, 0 * one)
        loss, metrics = call((*arrays, one, other * one), settings)
        assert loss == pytest.approx(2 * value, abs=1e-5)
        third = np.exp(other - logprob) - 1 - (other - logprob)
        assert values(metrics)["policy/kl_reference"] == pytest.approx(third, abs=1e-5)


def test_the_expected_gradients_of_the_kl_estimators_are_those_stated():
    """Over all tokens of a small vocabulary, each with its chance."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        policy, reference, sampler = (jnp.asarray(rng.normal(size=5)) for _ in range(3))
        logp = lambda x: jax.nn.log_softmax(x)  # noqa: E731
        kl = lambda p, q: (jnp.exp(logp(p)) * (logp(p) - logp(q))).sum()  # noqa: E731
        forward, reverse = (jax.grad(lambda x: kl(x, reference))(policy),
                            jax.grad(lambda x: kl(reference, x))(policy))

        def expected(name, drawn_from):
            chance = jax.lax.stop_gradient(jnp.exp(logp(drawn_from)))

            def mean(x):
                ratio = jnp.exp(logp(x) - logp(jax.lax.stop_gradient(drawn_from)))
                return (chance * losses.KLS[name](logp(x) - logp(reference), ratio)).sum()
            return jax.jit(jax.grad(mean))(policy)

        close = functools.partial(np.testing.assert_allclose, atol=1e-12)
        close(expected("k1", policy), 0)
        close(expected("k2", policy), forward)
        close(expected("k3", policy), reverse)
        close(expected("k3_weighted", policy), forward)
        close(expected("k3_weighted", sampler), forward)
        assert np.abs(expected("k2", sampler) - forward).max() > 1e-2


def test_nothing_is_corrected_twice():
    """ratio x weight is new / sampler's: the gradient of a ratio over the sampler's log-probs."""
    new, old, advantages, table, entropy, sampled, _ = batch(seed=6)
    free = dataclasses.replace(TOKEN, clip_low=1.0, clip_high=1e6)
    direct = gradient((new, sampled, advantages, table, entropy), free)
    both = dataclasses.replace(free, old_logprobs="recomputed", importance_max=1e6)
    np.testing.assert_allclose(
        gradient((new, old, advantages, table, entropy, sampled, sampled), both), direct, rtol=1e-5)
    # Recomputed by the sampler's own parameters and rounding: nothing is left to correct.
    same = (new, sampled, advantages, table, entropy, sampled, sampled)
    np.testing.assert_array_equal(gradient(same, both), direct)
    assert values(call(same, both)[1])["policy/importance_mean"] == 1


@pytest.mark.parametrize("name", ["sequence", "mask, sequence"])
def test_samples_that_share_a_row_are_as_in_rows_of_their_own(name):
    apart = batch(seed=2, rows=4, width=4)
    settings = dataclasses.replace(VARIANTS[name], old_logprobs="recomputed")
    together = [a.reshape(1, 16) for a in apart]
    sample = np.repeat([7, 3, 5, 4], 4)[None]

    def loss(logprobs, arrays, sample):
        _, old, advantages, table, entropy, sampled, _ = arrays
        return losses.policy_loss(logprobs, old, advantages, table, entropy=entropy,
                                  settings=settings, sampled=sampled, sample=sample)[0]

    one, other = (jax.jit(jax.value_and_grad(loss))(arrays[0], arrays, ids)
                  for arrays, ids in ((apart, None), (together, sample)))
    np.testing.assert_allclose(other[0], one[0], rtol=1e-6)
    np.testing.assert_allclose(other[1].reshape(4, 4), one[1], rtol=1e-5, atol=1e-7)


LOG = strategies.floats(-1e4, 0, width=32)


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
@hypothesis.settings(max_examples=15)
@given(seed=strategies.integers(0, 9999), extreme=strategies.tuples(LOG, LOG, LOG, LOG))
def test_extreme_log_probs_give_finite_values_and_gradients(settings, seed, extreme):
    rng = np.random.default_rng(seed)
    arrays = batch(seed=seed)
    logs = {0: extreme[0], 1: extreme[1], 5: extreme[2], 6: extreme[3]}
    arrays = tuple(np.where(rng.random(a.shape) < 0.5, np.float32(logs[i]), a) if i in logs else a
                   for i, a in enumerate(arrays))
    with jax.debug_nans(True):
        assert np.isfinite(call(arrays, settings)[0])
        assert np.isfinite(gradient(arrays, settings)).all()


def test_the_two_bounds_are_two():
    arrays = row((1.25, 0.75, 1.3), (1.0, -1.0, 1.0))
    np.testing.assert_allclose(gradient(arrays, TOKEN), [[-1.25, 0, 0]], atol=1e-6)


def test_metrics_are_over_the_loss_tokens_only():
    arrays = batch(seed=4)
    logprobs, old, advantages, table, entropy = arrays[:5]
    tokens = [(math.exp(logprobs[at] - old[at]), advantages[at], entropy[at])
              for at in zip(*np.nonzero(table))]
    want = {
        "policy/ratio_mean": np.mean([r for r, _, _ in tokens]),
        "policy/ratio_max": max(r for r, _, _ in tokens),
        "policy/clip_high": np.mean([r > 1.28 and a > 0 for r, a, _ in tokens]),
        "policy/clip_low": np.mean([r < 0.8 and a < 0 for r, a, _ in tokens]),
        "policy/kl": np.mean([r - 1 - math.log(r) for r, _, _ in tokens]),
        "policy/entropy": np.mean([e for _, _, e in tokens]),
        "policy/ess": np.mean([r for r, _, _ in tokens]) ** 2 / np.mean([r * r for r, _, _ in
                                                                         tokens]),
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
    _, old, advantages, _, entropy = batch()[:5]
    table = weights.sequence(np.ones_like(old, bool), np.arange(6), max_length=5)
    arrays = (old, old, advantages, table, entropy)
    metrics = values(call(arrays, settings)[1])
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == metrics["policy/kl"] == 0
    assert metrics["policy/ess"] == pytest.approx(1, abs=1e-6)
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
    arrays = (old, old, np.array([[-1.0], [-5.0]]) * np.ones((2, 4)), table, old, old, old)
    settings = algorithms.loss_settings(algorithm)
    assert call(arrays, settings)[0] == pytest.approx(want)
    assert sum(float(call([a[i:i + 1] for a in arrays], settings)[0])
               for i in range(2)) == pytest.approx(want)


@pytest.mark.parametrize("name", ["token", "corrected, all"])
def test_any_split_has_the_same_loss_gradient_and_metrics(name):
    settings = VARIANTS[name]
    with jax.enable_x64(True):
        arrays = tuple(a.astype(np.float64) for a in batch(seed=7))
        loss, metrics = call(arrays, settings)
        whole = gradient(arrays, settings)
        for cuts in ([2], [1, 2, 4]):  # row 1 is masked: an empty one too
            parts = list(zip(*(np.split(a, cuts) for a in arrays)))
            results = [call(part, settings) for part in parts]
            assert float(sum(x for x, _ in results)) == pytest.approx(float(loss), abs=1e-12)
            assert values(*(m for _, m in results)) == pytest.approx(values(metrics), abs=1e-12)
            split = np.concatenate([gradient(part, settings) for part in parts])
            np.testing.assert_allclose(split, whole, atol=1e-12)


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
@pytest.mark.parametrize("junk", [np.nan, -np.inf])
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


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_masking_everything_gives_zero_loss_and_zero_gradient(settings):  # B29
    junk, zeros = jnp.full((6, 5), jnp.nan), jnp.zeros((6, 5))
    arrays = (junk, junk, junk, zeros, junk, junk, junk)
    with jax.debug_nans(True):
        loss, metrics = eager(arrays, settings)
        slope = eager_gradient(arrays, settings)
    assert loss == 0 and (np.array(slope) == 0).all()
    assert all(float(m.weight) == 0 for m in metrics.values() if isinstance(m, reductions.Mean))
    assert all(float(m.value) == 0 for m in metrics.values() if isinstance(m, reductions.Max))


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
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
