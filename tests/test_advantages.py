import numpy as np
import pytest
import reference
from hypothesis import given, settings, strategies

from dapo_jax.learner import advantages

RELATIVE = sorted(set(advantages.ADVANTAGES) - {"ones"})


def compute(name, rewards, group, *, valid=None, lengths=None, ddof=1, **how):
    n = len(rewards)
    return advantages.ADVANTAGES[name](
        np.array(rewards, np.float32), np.array(group, np.int32),
        valid=np.ones(n, bool) if valid is None else np.array(valid, bool),
        lengths=np.full(n, 5, np.int32) if lengths is None else np.array(lengths, np.int32),
        settings=advantages.Settings(ddof=ddof, **how))


def expected(name, rewards, group, valid, lengths, ddof=1, leave_one_out=False):
    batch, baseline = (rewards, group, valid), {"leave_one_out": leave_one_out}
    return {
        "grpo": lambda: reference.grpo_advantages(*batch, ddof=ddof, **baseline),
        "dr_grpo": lambda: reference.centred_advantages(*batch, **baseline),
        "rloo": lambda: reference.centred_advantages(*batch, leave_one_out=True),
        "reinforce_baseline": lambda: reference.whitened_advantages(*batch, lengths, **baseline),
        "reinforce_baseline_sample": lambda: reference.whitened_advantages(
            *batch, [1] * len(rewards), **baseline),
        "group_batch": lambda: reference.batch_scaled_advantages(*batch, ddof=ddof, **baseline),
        "ones": lambda: [float(v) for v in valid],
    }[name]()


@strategies.composite
def batches(draw):
    n = draw(strategies.integers(1, 12))
    column = lambda of: draw(strategies.lists(of, min_size=n, max_size=n))  # noqa: E731
    return (column(strategies.sampled_from([-1.0, 0.0, 0.25, 1.0])),
            column(strategies.integers(0, 3)), column(strategies.booleans()),
            column(strategies.integers(1, 9)))


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
@settings(max_examples=40, deadline=None)
@given(batch=batches(), ddof=strategies.integers(0, 1), leave_one_out=strategies.booleans())
def test_equals_the_loops_of_the_papers_for_ragged_groups(name, batch, ddof, leave_one_out):
    rewards, group, valid, lengths = batch
    how = {"ddof": ddof, "leave_one_out": leave_one_out}
    got = compute(name, rewards, group, valid=valid, lengths=lengths, **how)
    assert got.dtype == np.float32 and np.isfinite(got).all()
    want = np.array(expected(name, *batch, **how))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    bounded = compute(name, rewards, group, valid=valid, lengths=lengths, clip=0.8, **how)
    want = want if name == "ones" else np.clip(want, -0.8, 0.8)
    np.testing.assert_allclose(bounded, want, rtol=1e-6, atol=1e-6)


def test_deviations_are_those_of_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    rewards, group = rng.random(12).astype("f4"), np.repeat(np.arange(3), 4)
    table = torch.tensor(rewards).reshape(3, 4)
    centred = table - table.mean(1, keepdim=True)
    lengths = rng.integers(1, 9, 12)
    tokens = np.repeat(centred.numpy().reshape(-1), lengths)
    for name, want in (
            ("grpo", centred / (table.std(1, keepdim=True) + 1e-6)),
            ("group_batch", centred / (table.std() + 1e-6)),
            ("reinforce_baseline", (centred - torch.tensor(tokens).mean()) / (
                torch.tensor(tokens).std(correction=0) + 1e-6))):
        np.testing.assert_allclose(compute(name, rewards, group, lengths=lengths),
                                   want.reshape(-1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_permuting_rows_permutes_the_result(name):
    rng = np.random.default_rng(0)
    columns = (rng.random(20), rng.integers(0, 4, 20) * 1000, rng.random(20) < 0.8,
               rng.integers(1, 9, 20))
    order = rng.permutation(20)
    whole = compute(name, columns[0], columns[1], valid=columns[2], lengths=columns[3])
    moved = compute(name, columns[0][order], columns[1][order], valid=columns[2][order],
                    lengths=columns[3][order])
    np.testing.assert_allclose(moved, whole[order], rtol=1e-6, atol=1e-7)


def test_groups_are_found_by_id_not_by_position():  # B17, B19
    got = compute("grpo", [1, 0, 0, 0], [7, 3, 7, 3])
    np.testing.assert_allclose(got, [0.70711, 0, -0.70711, 0], atol=1e-4)
    np.testing.assert_allclose(compute("grpo", [1, 0, 0, 0], [0, 0, 1, 1]),
                               [0.70711, -0.70711, 0, 0], atol=1e-4)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_gets_exactly_zero(name):  # B20
    got = compute(name, [1, 1, 0, 1], [0, 1, 1, 2])
    assert got[0] == 0 and got[3] == 0 and got[1] > 0 and got[2] < 0
    assert (compute(name, [1.0], [0]) == 0).all()


def test_the_deviation_is_the_one_asked_for():  # B21
    three_of_eight = [1, 1, 1, 0, 0, 0, 0, 0]
    close = lambda got, want: np.testing.assert_allclose(got, want, atol=1e-4)  # noqa: E731
    close(compute("grpo", [1, 0, 0, 0], [0] * 4), [1.5, -0.5, -0.5, -0.5])
    close(compute("grpo", [1, 0, 0, 0], [0] * 4, ddof=0), [1.73205] + [-0.57735] * 3)
    close(compute("grpo", three_of_eight, [0] * 8), [1.2076] * 3 + [-0.7246] * 5)
    close(compute("dr_grpo", three_of_eight, [0] * 8), [0.625] * 3 + [-0.375] * 5)
    close(compute("rloo", three_of_eight, [0] * 8), [0.7143] * 3 + [-0.4286] * 5)


def test_groups_may_differ_in_size():  # B22
    rewards, group = [1, 0, 0, 1, 0], [0, 0, 0, 1, 1]
    np.testing.assert_allclose(compute("dr_grpo", rewards, group),
                               [0.6667, -0.3333, -0.3333, 0.5, -0.5], atol=1e-4)
    np.testing.assert_allclose(compute("grpo", rewards, group),
                               [1.1547, -0.5774, -0.5774, 0.7071, -0.7071], atol=1e-4)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_an_invalid_sample_is_as_if_it_had_not_been_there(name):
    rewards, group, lengths = [1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1], [3, 1, 4, 1, 5, 9]
    valid = np.array([1, 1, 0, 1, 0, 1], bool)
    junk = np.where(valid, rewards, np.nan)
    got = compute(name, junk, group, valid=valid, lengths=lengths)
    alone = compute(name, *(np.array(c)[valid] for c in (rewards, group)),
                    lengths=np.array(lengths)[valid])
    np.testing.assert_allclose(got[valid], alone, rtol=1e-6)
    assert (got[~valid] == 0).all()


@pytest.mark.parametrize("name", RELATIVE)
def test_equal_rewards_give_zero_and_never_explode(name):
    got = compute(name, [0.1] * 7, [0] * 7, lengths=range(1, 8))
    np.testing.assert_allclose(got, 0, atol=1e-6)


def test_global_deviation_is_the_root_of_the_mean_group_variance():
    rewards, group = [1, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4
    scale = np.sqrt((3 / 16 + 1 / 4) / 2)
    centred = compute("dr_grpo", rewards, group)
    for name in ("reinforce_baseline_sample", "reinforce_baseline"):
        np.testing.assert_allclose(compute(name, rewards, group), centred / scale, rtol=1e-5)


def test_the_deviation_of_the_batch_holds_how_far_its_groups_lie_apart():
    rewards, group = [1, 1, 1, 0, 0, 0, 0, 1], [0] * 4 + [1] * 4
    np.testing.assert_allclose(compute("group_batch", rewards, group),
                               compute("dr_grpo", rewards, group) / np.sqrt(2 / 7), rtol=1e-5)


def test_with_unequal_lengths_token_weights_shift_the_mean_and_sample_weights_do_not():
    rewards, group, lengths = [1, 0, 1, 0], [0, 0, 1, 1], [9, 1, 9, 1]
    by_token = compute("reinforce_baseline", rewards, group, lengths=lengths)
    by_sample = compute("reinforce_baseline_sample", rewards, group, lengths=lengths)
    np.testing.assert_allclose(by_sample, [1, -1, 1, -1], rtol=1e-5)
    np.testing.assert_allclose(by_token, [1 / 3, -3, 1 / 3, -3], rtol=1e-5)


def test_no_samples_give_no_advantages():
    for name in advantages.ADVANTAGES:
        assert compute(name, [], []).shape == (0,)
