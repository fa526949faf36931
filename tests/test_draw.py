import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings, strategies
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.rollout import draw
from dapo_jax.runtime import mesh as mesh_lib

ROOT = jax.random.key(0)
CLOSEST_TO_ONE = np.nextafter(np.float32(1), np.float32(0))
uniforms = jax.jit(lambda root, prompt, visit, sample, position: draw.uniforms(
    draw.row_keys(root, prompt, visit, sample), position))
invert = jax.jit(draw.invert)
drawn = jax.jit(draw.draw, static_argnums=2)


def numbers(count, seed=0):
    """Prompt, visit and sample number of rows; no two rows alike."""
    order = np.random.default_rng(seed).permutation(count)
    return (order % 7).astype(np.int32), (order // 7 % 3).astype(np.int32), order.astype(np.int32)


# ------------------------------------------------------------------------- whose number is it


def test_a_number_depends_on_its_own_row_and_on_nothing_else():  # promise 3
    prompt, visit, sample = numbers(24)
    want = np.asarray(uniforms(ROOT, prompt, visit, sample, 3))
    assert len(set(want.tolist())) == 24 and (want >= 0).all() and (want < 1).all()
    order = np.random.default_rng(5).permutation(24)
    np.testing.assert_array_equal(
        uniforms(ROOT, prompt[order], visit[order], sample[order], 3), want[order])
    for count in (1, 5):  # another batch size, other neighbours
        np.testing.assert_array_equal(
            uniforms(ROOT, prompt[:count], visit[:count], sample[:count], 3), want[:count])
    shaped = uniforms(ROOT, *(x.reshape(6, 4) for x in (prompt, visit, sample)), 3)
    np.testing.assert_array_equal(np.ravel(shaped), want)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_number_does_not_depend_on_the_device_count(devices):  # promise 3
    columns = numbers(24)
    sharding = mesh_lib.batch_sharding(tiny.mesh(data=devices))
    got = uniforms(ROOT, *mesh_lib.put(columns, sharding), 3)
    assert len(got.sharding.device_set) == devices
    np.testing.assert_array_equal(got, uniforms(ROOT, *columns, 3))


def test_each_part_of_a_row_s_identity_changes_its_number():
    base = {"prompt": 1, "visit": 2, "sample": 3}
    row = lambda **changes: draw.row_keys(  # noqa: E731
        changes.pop("root", ROOT), *(jnp.int32(x) for x in (base | changes).values()))
    keys = [row(), row(prompt=2), row(visit=3), row(sample=4), row(prompt=2, visit=1),
            row(root=jax.random.key(1))]
    found = {float(draw.uniforms(key, position)) for key in keys for position in (0, 1)}
    assert len(found) == 12
    turn = draw.row_keys(ROOT, jnp.int32(1), jnp.int32(2), jnp.int32(3), turn=1)
    assert float(draw.uniforms(turn, 0)) not in found


def sequences(seed, *, prompt=0, visit=0, samples=8):
    """Tokens [samples, 20] at uniform logits over 50 tokens."""
    row = draw.row_keys(jax.random.key(seed), *(np.broadcast_to(np.int32(x), (samples,))
                        for x in (prompt, visit)), np.arange(samples, dtype=np.int32))
    how = draw.Sampling(max_new_tokens=20, stop_ids=())
    logits = np.zeros((samples, 50), np.float32)
    return np.stack([drawn(logits, draw.uniforms(row, t), how)[0] for t in range(20)], axis=1)


def test_the_samples_of_a_group_differ_and_a_run_repeats():  # B57
    first = sequences(0)
    assert len({tuple(row) for row in first.tolist()}) == 8
    np.testing.assert_array_equal(first, sequences(0))
    np.testing.assert_array_equal(first[:3], sequences(0, samples=3))
    for other in (sequences(1), sequences(0, visit=1), sequences(0, prompt=1)):
        assert not set(map(tuple, first.tolist())) & set(map(tuple, other.tolist()))


# ------------------------------------------------------------------------------- what it picks


@pytest.mark.parametrize("vocab", [50, 128, 5000])
@pytest.mark.parametrize("power", [1.0, 12.0])
def test_tokens_come_as_often_as_their_mass_says(vocab, power):
    rng = np.random.default_rng(vocab)
    count, mass = 200_000, rng.random(vocab).astype("f4") ** power
    mass[rng.random(vocab) < 0.1] = 0
    # Stratified, so no cell can be off by more than the neighbouring draws: a sharper test than
    # independent numbers would allow.
    uniform = ((np.arange(count) + 0.5) / count).astype("f4")
    rows = 2000
    pick = jax.jit(lambda u: jax.lax.map(
        lambda part: draw.invert(jnp.broadcast_to(mass, (rows, vocab)), part), u))
    got = np.bincount(np.ravel(pick(uniform.reshape(-1, rows))), minlength=vocab)
    expected = count * mass.astype("f8") / mass.astype("f8").sum()
    assert got.sum() == count and (got[mass == 0] == 0).all()
    # One cell edge moves by the rounding of the sum: 1e-6 of all draws.
    assert np.abs(got - expected).max() <= 1.5
    chi_square = ((got - expected)[mass > 0] ** 2 / expected[mass > 0])[expected[mass > 0] > 5]
    assert chi_square.sum() < vocab


@strategies.composite
def sparse(draw_):
    vocab = draw_(strategies.sampled_from([1, 50, 127, 128, 129, 256, 300]))
    some = draw_(strategies.dictionaries(strategies.integers(0, vocab - 1), strategies.floats(
        np.float32(1e-30).item(), 1.0, width=32), min_size=1, max_size=vocab))
    mass = np.zeros(300, np.float32)
    for place, value in some.items():
        mass[place] = value
    return mass, vocab


@settings(max_examples=150)
@given(case=sparse(), uniform=strategies.floats(0, CLOSEST_TO_ONE.item(), width=32))
@example(case=(np.eye(300, dtype="f4")[0], 300), uniform=CLOSEST_TO_ONE.item())
@example(case=(np.eye(300, dtype="f4")[127], 300), uniform=0.0)
@example(case=(np.eye(300, dtype="f4")[128], 300), uniform=CLOSEST_TO_ONE.item())
@example(case=(np.eye(300, dtype="f4")[299], 300), uniform=0.0)
def test_a_token_without_mass_is_never_picked(case, uniform):
    mass, vocab = case
    token = int(invert(mass, np.float32(uniform)))
    assert 0 <= token < vocab and mass[token] > 0


def test_a_token_without_mass_is_never_picked_at_the_edge_of_a_cell():
    """There a target can be rounded to below the start of its block, or over its end."""
    rng = np.random.default_rng(0)
    near = jax.jit(lambda mass, uniform: draw.invert(
        jnp.broadcast_to(mass, (len(uniform), len(mass))), uniform))
    for _ in range(12):
        mass = rng.random(1000).astype("f4") ** 4
        mass[rng.random(1000) < 0.5] = 0
        blocks = np.pad(mass, (0, 24)).reshape(draw.BLOCKS, -1)
        ends = np.cumsum(blocks.sum(1))
        inside = np.asarray(jnp.cumsum(blocks, axis=1)) + np.append(0, ends[:-1])[:, None]
        uniform = (rng.choice(inside.ravel(), 4096) / ends[-1]).astype("f4")
        uniform += rng.integers(-3, 4, 4096).astype("f4") * np.spacing(uniform)
        token = np.asarray(near(mass, uniform.clip(0, CLOSEST_TO_ONE)))
        assert (mass[token] > 0).all()


@pytest.mark.parametrize("target,want", [
    (-1e-8, 1), (0.0, 1), (0.5, 1), (1.0, 3), (1.5, 3), (2.9, 3), (3.0, 3), (9.0, 3)])
def test_sums_that_rise_over_zeros_or_fall_still_give_a_token_with_mass(target, want):
    mass = np.array([0, 1, 0, 2, 0], "f4")
    sums = np.array([0, 1, 1 + 1e-6, 3, 3 - 1e-6], "f4")  # as a parallel sum may be rounded
    assert int(draw._first_above(sums, np.float32(target), mass)) == want


def test_the_token_that_reaches_the_mass_asked_for_is_the_last_one_kept():
    mass = np.array([2, 8, 1, 4, 1], "f4")  # exact in binary, 16 in all
    for top_p, kept in ((0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.875, [0, 1, 3])):
        got = np.asarray(draw.truncate(mass, top_k=0, top_p=top_p, min_p=0.0))
        assert np.flatnonzero(got).tolist() == kept


def kept_by_loops(mass, top_k, top_p, min_p):
    """Which tokens are left, one at a time from the largest; ties at the border stay together."""
    kept = [True] * len(mass)
    if top_k:
        floor = sorted(mass, reverse=True)[min(top_k, len(mass)) - 1]
        kept = [m >= floor for m in mass]
    if top_p < 1:
        left = sorted((m for m, on in zip(mass, kept) if on), reverse=True)
        total, seen, floor = sum(left), 0.0, 0.0
        for value in left:
            if seen >= top_p * total:
                break
            seen, floor = seen + value, value
        kept = [on and m >= floor for m, on in zip(mass, kept)]
    if min_p:
        likeliest = max(mass)
        kept = [on and m >= np.float32(min_p) * likeliest for m, on in zip(mass, kept)]
    return kept


@pytest.mark.parametrize("top_k,top_p,min_p", [
    (1, 1.0, 0.0), (3, 1.0, 0.0), (99, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.01, 0.0), (0, 0.99, 0.0),
    (4, 0.6, 0.0), (0, 1.0, 0.25), (0, 1.0, 1.0), (5, 0.9, 0.5)])
def test_truncation_keeps_what_a_plain_loop_keeps(top_k, top_p, min_p):
    rng = np.random.default_rng(0)
    mass = rng.random((20, 12)).astype("f4")
    mass[::3] = rng.integers(0, 4, mass[::3].shape) / 4  # exact ties, and zeros
    mass[:, 0] = 1
    got = np.asarray(draw.truncate(mass, top_k=top_k, top_p=top_p, min_p=min_p))
    want = np.array([kept_by_loops(row.tolist(), top_k, top_p, min_p) for row in mass])
    np.testing.assert_array_equal(got, np.where(want, mass, 0))


def test_truncated_tokens_are_never_drawn_but_count_in_the_log_prob():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(500, 40)).astype("f4") * 2
    how = draw.Sampling(max_new_tokens=1, stop_ids=(), temperature=0.7, top_k=5, top_p=0.9)
    token, logprob = drawn(logits, rng.random(500).astype("f4"), how)
    scaled = logits.astype("f8") / 0.7
    probability = np.exp(scaled) / np.exp(scaled).sum(1, keepdims=True)
    rank = (probability > np.take_along_axis(probability, np.asarray(token)[:, None], 1)).sum(1)
    assert rank.max() == 4 and len(set(rank.tolist())) > 3
    chosen = np.take_along_axis(probability, np.asarray(token)[:, None], 1)[:, 0]
    np.testing.assert_allclose(logprob, np.log(chosen), atol=1e-5)


def test_temperature_stands_inside_the_softmax():  # B36
    how = draw.Sampling(max_new_tokens=1, stop_ids=(), temperature=0.5)
    token, logprob = drawn(np.array([[2.0, 0.0]], "f4"), np.zeros(1, "f4"), how)
    assert int(token[0]) == 0 and float(logprob[0]) == pytest.approx(-0.01815, abs=1e-5)


def test_greedy_takes_the_first_of_the_likeliest_and_reports_temperature_one():
    how = draw.Sampling(max_new_tokens=1, stop_ids=(), temperature=0.0)
    token, logprob = drawn(np.array([[0.0, 1.0, 1.0]], "f4"), np.array([0.9], "f4"), how)
    assert int(token[0]) == 1
    assert float(logprob[0]) == pytest.approx(1 - np.log(1 + 2 * np.e), abs=1e-6)


# ------------------------------------------------------------------------- a real vocabulary

VOCAB = 151_936
RARE = 1e-6  # of the mass


def long_tailed():
    """Logits of a real vocabulary's size: a few likely tokens, 6 % of the mass on tokens rarer
    than one in a million, and every seventh token impossible."""
    rng = np.random.default_rng(0)
    logits = 0.5 * rng.normal(size=VOCAB)
    logits[rng.choice(VOCAB, 2000, replace=False)] += 6.4
    logits[::7] = -np.inf
    mass = np.exp(logits)
    return logits.astype("f4"), mass / mass.sum()


def test_tokens_of_a_real_vocabulary_pass_a_chi_square_test_and_the_tail_is_kept():
    logits, share = long_tailed()
    assert 0.05 < share[share < RARE].sum() < 0.2
    count = 200_000
    zeros = np.zeros(count, np.int32)
    numbers_ = uniforms(ROOT, zeros, zeros, np.arange(count, dtype=np.int32), 3)
    how = draw.Sampling(max_new_tokens=1, stop_ids=())
    one = lambda uniform: draw.draw(logits, uniform, how)[0]  # noqa: E731
    token = np.asarray(jax.jit(lambda u: jax.lax.map(one, u, batch_size=1000))(numbers_))
    got, expected = np.bincount(token, minlength=VOCAB), count * share
    assert (got[share == 0] == 0).all()
    order = np.argsort(share)
    cell = (np.cumsum(expected[order]) / 40).astype(int)  # rare tokens share cells of 40 draws
    found, wanted = (np.bincount(cell, weights=x[order]) for x in (got, expected))
    wanted, found = wanted[wanted > 5], found[wanted > 5]
    freedom = len(wanted) - 1
    assert freedom > 500
    assert ((found - wanted) ** 2 / wanted).sum() < freedom + 5 * np.sqrt(2 * freedom)
    rare = (share < RARE) & (share > 0)
    # As many different rare tokens as independent draws give: none of them is out of reach.
    hit = 1 - np.exp(-expected[rare])
    assert abs((got[rare] > 0).sum() - hit.sum()) < 5 * np.sqrt((hit * (1 - hit)).sum())


@pytest.mark.parametrize("devices", [2, 4])
def test_a_draw_does_not_depend_on_how_the_vocabulary_is_split(devices):
    logits = np.stack([np.roll(long_tailed()[0], 1000 * row) for row in range(8)])
    uniform = np.random.default_rng(1).random(8).astype("f4")
    how = draw.Sampling(max_new_tokens=1, stop_ids=())
    token, logprob = drawn(logits, uniform, how)
    split = NamedSharding(tiny.mesh(tensor=devices), PartitionSpec(None, "tensor"))
    placed = mesh_lib.put(logits, split)
    got, got_logprob = drawn(placed, mesh_lib.put(uniform, mesh_lib.replicated(split.mesh)), how)
    np.testing.assert_array_equal(got, token)
    np.testing.assert_allclose(got_logprob, logprob, atol=1e-5)
