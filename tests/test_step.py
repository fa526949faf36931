import dataclasses

import numpy as np
import pytest
import tiny

from dapo_jax import types
from dapo_jax.learner import advantages, algorithms, losses, packing, step

TABLE = tiny.table()
SHAPE = packing.PackShape(slots=4, rows=2, prompt_buckets=(8,), completion_buckets=(tiny.NEW,))


def prepare(samples, shape=SHAPE, algorithm=None, updates=1, table=TABLE, chosen=None):
    return step.prepare(samples, algorithm=algorithm or algorithms.dapo(), updates=updates, step=1,
                        table=table, shape=shape, max_length=tiny.NEW, chosen=chosen)


def hand_made(completions, *, group, reward, stopped=None, prompt=None, width=tiny.NEW):
    count = len(completions)
    tokens = np.zeros((count, width), np.int32)
    for row, own in zip(tokens, completions):
        row[:len(own)] = own
    length = np.array([len(own) for own in completions], np.int32)
    zeros = np.zeros(count, np.int32)
    reward = np.array(reward, np.float32)
    return types.Samples(
        tokens=tokens, loss_mask=np.arange(width) < length[:, None],
        logprobs=np.zeros(tokens.shape, np.float32), length=length, reward=reward, shaped=reward,
        stopped=np.ones(count, bool) if stopped is None else np.array(stopped),
        valid=np.ones(count, bool), group=np.array(group, np.int32),
        prompt=zeros if prompt is None else np.array(prompt, np.int32), visit=zeros, sample=zeros,
        born=zeros + 1)


@pytest.fixture
def given_loss(monkeypatch):
    """Algorithms whose advantage is minus the reward: a reward of 1 is a loss of 1 on policy."""
    monkeypatch.setitem(advantages.ADVANTAGES, "given", lambda rewards, *_, **__: -rewards)
    return lambda preset, **changes: dataclasses.replace(
        algorithms.PRESETS[preset](), advantage="given", **changes)


def loss_of(work, algorithm):
    settings = algorithms.loss_settings(algorithm)
    return sum(float(losses.policy_loss(
        b.logprobs, b.logprobs, b.advantages, b.weights, entropy=b.weights, settings=settings,
        reference=b.logprobs)[0]) for one in work for b in one.batches)


@pytest.mark.parametrize("slots,rows", [(2, 2), (1, 1), (2, 1), (4, 4)])
@pytest.mark.parametrize("preset,want", [("dapo", 1.8), ("grpo", 3.0)])
def test_dapo_means_over_tokens_and_grpo_over_samples(given_loss, preset, want, slots, rows):
    """B25, B35"""
    two = hand_made([[5] * 4, [6]], group=[0, 1], reward=[1, 5], prompt=[0, 1])
    shape = dataclasses.replace(SHAPE, slots=slots, rows=rows)
    algorithm = given_loss(preset)
    assert loss_of(prepare(two, shape, algorithm), algorithm) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("width", [4, 16])
def test_dr_grpo_divides_by_the_limit_whatever_the_padding_and_the_microbatch(
        given_loss, width, slots):
    """B30: (2 + 4) / (2 x 10)"""
    two = hand_made([[5] * 2, [6] * 4], group=[0, 1], reward=[1, 1], prompt=[0, 1], width=width)
    shape = dataclasses.replace(SHAPE, slots=slots, rows=1, completion_buckets=(width,))
    algorithm = given_loss("dr_grpo")
    work = step.prepare(two, algorithm=algorithm, updates=1, step=1, table=TABLE, shape=shape,
                        max_length=10)
    assert len(work[0].batches) == 2 // slots
    assert loss_of(work, algorithm) == pytest.approx(0.3, abs=1e-6)


def test_microbatch_means_depend_on_the_microbatches_and_token_means_do_not(given_loss):
    """10 tokens of loss 2 and 100 of loss 1."""
    two = hand_made([[5] * 10, [6] * 100], group=[0, 1], reward=[2, 1], prompt=[0, 1], width=100)
    found = {}
    for scheme in ("token", "microbatch_token"):
        algorithm = given_loss("dapo", weights=scheme)
        found[scheme] = [loss_of(prepare(two, dataclasses.replace(
            SHAPE, slots=slots, rows=1, completion_buckets=(100,)), algorithm), algorithm)
            for slots in (1, 2)]
    np.testing.assert_allclose(found["token"], 120 / 110, rtol=1e-6)
    np.testing.assert_allclose(found["microbatch_token"], [1.5, 120 / 110], rtol=1e-6)


def test_a_masked_sample_is_in_neither_sum_nor_count(given_loss):  # B28
    two = hand_made([[5] * 2, [6] * 6], group=[0, 0], reward=[1, 1], stopped=[True, False])
    algorithm = given_loss("dapo", mask_overlong=True)
    work = prepare(two, algorithm=algorithm)
    assert loss_of(work, algorithm) == pytest.approx(1.0, abs=1e-6)
    assert work[0].tokens == 8  # reported throughput counts what was processed


def test_with_everything_masked_there_is_no_update():  # B29, B59
    four = hand_made([[5] * 6] * 4, group=[0, 0, 1, 1], reward=[1, 0, 1, 0], stopped=[False] * 4)
    work = prepare(four, algorithm=dataclasses.replace(algorithms.dapo(), mask_overlong=True),
                   updates=2)
    assert work == []
    assert step.learn("no program is called", "the state", work) == ("the state", [])


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_advantages_do_not_depend_on_the_microbatch(rows, slots):  # B19
    four = hand_made([[5, 2]] * 4, group=[0, 0, 1, 1], reward=[1, 0, 0, 0], prompt=[0, 0, 1, 1])
    four = dataclasses.replace(four, tokens=four.tokens + np.arange(4, dtype=np.int32)[:, None])
    (work,) = prepare(four, dataclasses.replace(SHAPE, rows=rows, slots=slots))
    found = {int(b.tokens[s, r, 0]) - 5: b.advantages[s, r, 0]
             for b in work.batches for s, r in np.argwhere(b.weights[..., 0] > 0)}
    np.testing.assert_allclose([found[i] for i in range(4)], [0.70711, -0.70711, 0, 0], atol=1e-5)


def test_a_stop_token_that_also_pads_is_trained_and_padding_is_not():  # B44
    table = types.PromptTable((np.array([2, 8, 2], np.int32),), ({},), ())
    three = hand_made([[5, 7, 2], [5, 7, 9, 4, 6], [2]], group=[0] * 3, reward=[1, 0, 0],
                      stopped=[True, False, True], width=5)
    (work,) = prepare(three, dataclasses.replace(SHAPE, rows=3), table=table)
    (batch,) = work.batches
    assert (batch.weights[0, :, :5] > 0).astype(int).tolist() == [
        [1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]
    assert batch.prompt_length[0] == 3 and batch.prompt_tokens[0, :3].tolist() == [2, 8, 2]


def test_only_the_first_update_of_fresh_groups_tells_of_the_sampler():
    four = hand_made([[5] * 3, [6] * 2, [7] * 5, [8]], group=[0, 1, 2, 3], reward=[1, 0, 1, 0])
    four = dataclasses.replace(four, born=np.array([0, 1, 1, 1], np.int32))
    fresh = [[int(b.fresh[b.weights > 0].sum()) for b in work.batches]
             for work in prepare(four, updates=2)]
    assert fresh == [[2], [0]]  # of the first two groups, the one that this step sampled


def test_whole_groups_go_to_each_update_and_weigh_by_it():
    six = hand_made([[5] * 3, [6] * 1] * 3, group=[4, 4, 1, 1, 9, 9], reward=[1, 0] * 3)
    works = prepare(six, updates=3)
    assert [work.tokens for work in works] == [4, 4, 4]
    for work in works:
        weights = np.concatenate([b.weights[b.weights > 0] for b in work.batches])
        np.testing.assert_allclose(weights, 0.25)
