"""What a step learns from: its selected samples, and groups of earlier steps again."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_select import configured, made
from test_step import SHAPE, hand_made, prepare

from dapo_jax import config, types
from dapo_jax.buffer import buffer, replay
from dapo_jax.learner import algorithms

RIGHT = configured(("reject_wrong", 0.5))


def intake(capacity=4, again=2, max_age=3, evict="oldest", strategies=()):
    cfg = config.Buffer(capacity=capacity, replay=again, max_age=max_age, evict=evict)
    return replay.Intake(strategies, cfg, seed=1)


def batch(step, groups=2, size=2):
    """Groups numbered on from step to step, whose log-probs tell rows apart."""
    samples = made(np.repeat(np.arange(groups) + 10 * step, size), born=step,
                   reward=np.arange(groups * size) % 2)
    rows = samples.group[:, None] + samples.sample[:, None] / 8
    return dataclasses.replace(samples, logprobs=np.broadcast_to(
        rows, samples.logprobs.shape).astype(np.float32))


def played(steps, how, kept=None, **options):
    """(kept, learned from, metrics) of each step."""
    kept, result = kept or replay.nothing(4), []
    for step in range(1, steps + 1):
        result.append(replay.learned_from(kept, batch(step, **options), how, step=step))
        kept = result[-1][0]
    return result


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(
        [*vars(first.samples).values(), first.chosen],
        [*vars(second.samples).values(), second.chosen]))


def test_with_nothing_configured_a_batch_passes_as_it_is():
    samples = batch(3)
    for kept in (None, replay.nothing(4)):
        after, learned, metrics = replay.learned_from(
            kept, samples, replay.Intake((), config.Buffer(), 0), step=3)
        assert after is kept and not metrics and learned.chosen.all()
        assert equal(learned, types.Selected(samples, np.ones(4, bool)))


def test_a_step_learns_from_its_own_groups_and_from_earlier_ones():
    first, second, third = played(3, intake())
    assert set(first[1].samples.group) == {10, 11} and first[2]["replay/groups"] == 0
    assert np.isnan(first[2]["replay/age"])
    assert set(second[1].samples.group) == {20, 21, 10, 11}
    assert second[2]["replay/age"] == 1 and second[2]["replay/groups"] == 2
    assert {30, 31} < set(third[1].samples.group) and len(third[1].samples) == 8
    assert set(third[0].samples.group) == {20, 21, 30, 31} and third[2]["replay/evicted"] == 2


def test_what_comes_again_is_as_it_was_sampled():
    (_, first, _), (_, second, _) = played(2, intake())
    old = second.samples.group < 20
    came = buffer_order(second.samples.take(old))
    was = buffer_order(first.samples)
    assert all(np.array_equal(a, b) for a, b in zip(vars(came).values(), vars(was).values()))
    assert set(came.born) == {1}


def buffer_order(samples):
    return samples.take(np.lexsort((samples.sample, samples.group)))


def test_only_samples_of_this_step_s_parameters_are_fresh():
    samples = hand_made([[3, 4], [5], [6], [7, 8]], group=[0, 0, 1, 1], reward=[1, 0, 1, 0])
    samples = dataclasses.replace(samples, born=np.array([1, 1, 0, 0], np.int32))
    work, = prepare(samples)
    fresh = np.concatenate([b.fresh[b.weights > 0] for b in work.batches])
    tokens = np.concatenate([b.tokens[b.weights > 0] for b in work.batches])
    assert dict(zip(tokens.tolist(), fresh.tolist())) == {3: 1, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0}


@pytest.mark.parametrize("max_age, ages", [(1, {1}), (2, {1, 2})])
def test_no_group_comes_back_older_than_the_bound(max_age, ages):
    seen = set()
    for step, (_, learned, metrics) in enumerate(played(8, intake(99, 99, max_age)), start=1):
        seen |= set((step - learned.samples.born).tolist())
        assert metrics["replay/expired"] == (2 if step > max_age + 1 else 0)
    assert seen == {0} | ages


def test_groups_without_a_chosen_sample_are_not_kept_and_others_whole():
    how = intake(strategies=RIGHT)
    samples = made([1, 1, 2, 2], reward=[0, 1, 0, 0], born=1)
    kept, learned, metrics = replay.learned_from(replay.nothing(4), samples, how, step=1)
    assert kept.samples.group.tolist() == [1, 1] and kept.chosen.tolist() == [False, True]
    assert len(learned.samples) == 4 and metrics["select/samples"] == metrics["select/groups"] == 1
    assert metrics["select/share"] == 0.25 and metrics["select/skipped"] == 0
    assert metrics["select/reward_mean"] == 1


def test_a_step_without_a_sample_to_learn_from_is_counted():
    wrong = made([1, 1], reward=[0, 0], born=1)
    how = intake(strategies=RIGHT)
    kept, learned, metrics = replay.learned_from(replay.nothing(4), wrong, how, step=1)
    assert metrics["select/skipped"] == 1 and not len(kept.samples)
    assert prepare(learned.samples, chosen=learned.chosen) == []
    full = replay.learned_from(replay.nothing(4), batch(1), how, step=1)[0]
    assert replay.learned_from(full, wrong, how, step=2)[2]["select/skipped"] == 0


@given(steps=st.integers(1, 6), capacity=st.integers(1, 5), again=st.integers(1, 5),
       evict=st.sampled_from(["oldest", "random", "least_spread"]))
def test_the_buffer_is_bounded_whole_and_repeatable(steps, capacity, again, evict):
    how = intake(capacity, min(again, capacity), evict=evict)
    one, other = played(steps, how), played(steps, how)
    for (kept, learned, metrics), (kept_2, learned_2, _) in zip(one, other):
        assert equal(kept, kept_2) and equal(learned, learned_2)
        assert buffer.groups(kept.samples) == metrics["replay/kept"] <= capacity
        assert metrics["replay/groups"] <= how.buffer.replay
        for part in (kept, learned):
            assert set(np.unique(part.samples.group, return_counts=True)[1]) <= {2}


def test_mini_batches_mix_old_groups_and_new():
    how, front = intake(99, 8), []
    for seed in range(20):
        full = played(2, dataclasses.replace(how, seed=seed), groups=8)[-1][1]
        front.append(np.mean(full.samples.born[:16] == 2))
    assert 0.4 < np.mean(front) < 0.6 and len(full.samples) == 32


def test_unchosen_samples_count_in_the_baseline_and_in_nothing_else():
    samples = hand_made([[3, 4], [5], [6], [7]], group=[0, 0, 0, 0], reward=[1, 0, 0, 0])
    chosen = np.array([True, False, True, False])
    algorithm = dataclasses.replace(algorithms.dr_grpo(), weights="token")
    work, = prepare(samples, algorithm=algorithm, chosen=chosen)
    held = [(b.tokens[b.weights > 0], b.advantages[b.weights > 0], b.weights[b.weights > 0])
            for b in work.batches]
    token, advantage, weight = (np.concatenate(column) for column in zip(*held))
    assert dict(zip(token.tolist(), advantage.tolist())) == {3: 0.75, 4: 0.75, 6: -0.25}
    assert weight.tolist() == pytest.approx([1 / 3] * 3) and work.tokens == 3


def test_a_rejection_sampling_batch_is_that_of_its_right_samples_as_demonstrations():
    samples = hand_made([[3, 4], [5], [6, 2, 1], [7]], group=[0, 0, 1, 1], reward=[1, 0, 1, 1])
    sft = algorithms.sft()
    work, = prepare(samples, algorithm=dataclasses.replace(sft, samples="rollout"),
                    chosen=samples.reward > 0, shape=SHAPE)
    alone, = prepare(samples.take(samples.reward > 0), algorithm=sft, shape=SHAPE)
    for one, other in zip(work.batches, alone.batches, strict=True):
        for name in ("tokens", "weights", "prompt_tokens", "prompt_length"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        used = one.weights > 0
        assert (one.advantages[used] == 1).all() and one.weights.sum() == pytest.approx(1)


def test_choosing_all_is_preparing_the_batch_as_it_is():
    samples = hand_made([[3, 4], [5], [6, 2, 1], [7]], group=[0, 0, 1, 1], reward=[1, 0, 1, 0])
    work, = prepare(samples, chosen=np.ones(4, bool))
    usual, = prepare(samples)
    assert work.tokens == usual.tokens
    for one, other in zip(work.batches, usual.batches, strict=True):
        for name in ("tokens", "logprobs", "advantages", "weights", "fresh", "prompt_tokens"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
