"""What an update makes of samples of several turns: replies are read and never learned."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from test_step import hand_made

from dapo_jax import types
from dapo_jax.learner import algorithms, losses, packing, step

TABLE = tiny.table()
WIDTH = 8
SHAPE = packing.PackShape(slots=1, rows=4, prompt_buckets=(8,), completion_buckets=(WIDTH,))
# Model tokens 11 to 19, tool tokens 90 to 92; 2 ends a turn.
ROWS = [[11, 12, 90, 91, 13, 2], [14, 2, 92, 15, 90, 16, 2], [17, 2], [18, 19, 90, 91, 13]]


def samples(**changes):
    made = hand_made(ROWS, group=[0] * 4, reward=[0, 1, 1, 0], width=WIDTH)
    mask = made.loss_mask & (made.tokens < 90)
    return dataclasses.replace(made, loss_mask=mask, logprobs=np.where(mask, -1.0, 0.0).astype(
        np.float32), **changes)


def prepared(made, algorithm, discount=1.0):
    (work,) = step.prepare(made, algorithm=algorithm, updates=1, step=1, table=TABLE, shape=SHAPE,
                           max_length=WIDTH, discount=discount)
    (batch,) = work.batches
    return batch


@pytest.mark.parametrize("preset", sorted(set(algorithms.PRESETS) - {"sft"}))
def test_what_the_tool_wrote_changes_neither_loss_nor_gradient(preset):  # B48
    algorithm = algorithms.PRESETS[preset]()
    algorithm = dataclasses.replace(algorithm, kl_coef=0.1, entropy_coef=0.01)
    batch, settings = prepared(samples(), algorithm), algorithms.loss_settings(algorithm)
    assert (batch.weights[0] > 0).tolist() == [
        (np.array(row + [99] * (WIDTH - len(row))) < 90).tolist() for row in ROWS]
    rng = np.random.default_rng(0)
    given = {name: rng.normal(-2, 0.3, batch.tokens.shape).astype(np.float32)
             for name in ("now", "old", "reference", "entropy")}
    told = batch.weights == 0

    def loss(now, old, reference, entropy):
        return losses.policy_loss(now, old, batch.advantages, batch.weights, entropy=entropy,
                                  settings=settings, reference=reference)

    both = jax.value_and_grad(loss, has_aux=True)
    (value, metrics), slope = both(*given.values())
    for junk in (7.0, np.nan):
        changed = {name: np.where(told, junk, one).astype(np.float32)
                   for name, one in given.items()}
        (other, more), other_slope = both(*changed.values())
        assert float(value) == float(other) and value != 0
        np.testing.assert_array_equal(slope, other_slope)
        assert not slope[told].any() and slope[~told].all()
        jax.tree.map(np.testing.assert_array_equal, metrics, more)


def test_of_a_response_only_what_the_model_wrote_is_counted_and_credited():  # B48
    """Model [11, 12], tool [90, 91], model [13, 2]; beside one of a single turn, half as good."""
    made = hand_made([[11, 12, 90, 91, 13, 2], [17, 2]], group=[0] * 2, reward=[1, 0.5], width=6)
    mask = made.loss_mask & (made.tokens < 90)
    assert mask.tolist() == [[True, True, False, False, True, True], [True] * 2 + [False] * 4]
    made = dataclasses.replace(made, loss_mask=mask)
    batch = prepared(made, dataclasses.replace(algorithms.dapo(), advantage="dr_grpo"))
    for row, own in ((0, 11), (1, 17)):
        (at,) = np.flatnonzero(batch.tokens[0, :, 0] == own)
        weights, values = batch.weights[0, at, :6], batch.advantages[0, at]
        np.testing.assert_allclose(weights, mask[row] / (4 + 2), rtol=1e-6)  # not 6 + 2
        credited = weights * np.broadcast_to(values, (WIDTH,))[:6]
        np.testing.assert_allclose(credited, mask[row] / 6 * (0.25, -0.25)[row], rtol=1e-6)


def test_a_sample_cut_off_is_masked_in_every_turn():  # B48
    cut = samples(stopped=np.array([True, False, True, True]))
    batch = prepared(cut, dataclasses.replace(algorithms.dapo(), mask_overlong=True))
    assert (batch.weights > 0).sum() == 4 + 2 + 3
    np.testing.assert_allclose(batch.weights[batch.weights > 0], 1 / 9, rtol=1e-6)
    kept = [row for row, one in enumerate(ROWS) if row != 1]
    found = {int(row[0]): int((weight > 0).sum())
             for row, weight in zip(batch.tokens[0], batch.weights[0]) if weight.any()}
    assert found == {ROWS[row][0]: sum(token < 90 for token in ROWS[row]) for row in kept}


def test_a_turn_is_credited_with_later_rewards_against_the_same_turn_of_its_group():
    rewards = np.array([[0, 1, 0], [0.5, 0, 2], [1, 0, 0], [0, 0, 0]], np.float32)
    made = types.Episodes(**vars(samples()), turn_rewards=rewards)
    algorithm = dataclasses.replace(algorithms.dapo(), advantage="dr_grpo")
    batch = prepared(made, algorithm, discount=0.5)
    first = np.array([0.5, 1.0, 1.0, 0.0])  # own reward, half the next turn's, a quarter after it
    second = np.array([1.0, 1.0, 0.0])  # of rows 0, 1 and 3, which have a second turn
    first, second = first - first.mean(), second - second.mean()
    want = [[first[0]] * 2 + [0] * 2 + [second[0]] * 2, [first[1]] * 2 + [0, second[1], 0, 0, 0],
            [first[2]] * 2, [first[3]] * 2 + [0] * 2 + [second[2]]]
    for row, values in zip(batch.tokens[0], batch.advantages[0]):
        own = next(at for at, one in enumerate(ROWS) if one[0] == row[0])
        np.testing.assert_allclose(values, want[own] + [0] * (WIDTH - len(ROWS[own])), atol=1e-6)


def test_without_a_discount_all_turns_have_the_samples_advantage():
    batch = prepared(samples(), dataclasses.replace(algorithms.dapo(), advantage="dr_grpo"))
    for row, values, weight in zip(batch.tokens[0], batch.advantages[0], batch.weights[0]):
        reward = {11: 0, 14: 1, 17: 1, 18: 0}[int(row[0])]
        np.testing.assert_allclose(values[weight > 0], reward - 0.5, atol=1e-6)


def test_whitening_counts_tokens_that_are_learned():
    algorithm = algorithms.reinforce_baseline()
    batch = prepared(samples(), algorithm)
    values, used = batch.advantages[0], batch.weights[0] > 0
    assert np.mean(values[used]) == pytest.approx(0, abs=1e-6)
    assert np.std(values[used]) == pytest.approx(1, abs=1e-4)  # over deviation + 1e-6
