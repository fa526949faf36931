import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import config, types
from dapo_jax.dynamic_sampling import filter as filters

TASK, SHAPED = config.Filter(), config.Filter(metric="shaped")
NAMES = {filters.INVALID: "invalid", filters.ALL_ZERO: "all_zero", filters.ALL_ONE: "all_one",
         filters.INFORMATIVE: "informative"}


def rows(group: list[int], reward: list[float], *, shaped: list[float] | None = None,
         valid: list[bool] | None = None) -> types.Samples:
    n = len(group)
    zero = np.zeros(n, np.int32)
    return types.Samples(
        tokens=np.arange(n, dtype=np.int32)[:, None], loss_mask=np.ones((n, 1), bool),
        logprobs=np.zeros((n, 1), np.float32), length=zero + 1, stopped=np.ones(n, bool),
        reward=np.array(reward, np.float32), valid=np.array(valid or [True] * n, bool),
        shaped=np.array(reward if shaped is None else shaped, np.float32),
        group=np.array(group, np.int32), prompt=zero, visit=zero,
        sample=np.arange(n, dtype=np.int32), born=zero)


def kinds(samples: types.Samples, cfg: config.Filter = TASK, **options: int) -> dict[int, str]:
    classes = filters.informative(samples, cfg, **options)
    return dict(zip(classes.group.tolist(), (NAMES[kind] for kind in classes.kind.tolist()),
                    strict=True))


def test_the_filter_looks_at_the_task_reward_unless_told_otherwise():  # B01
    samples = rows([0] * 4 + [1] * 4, [0, 0, 0, 0, 1, 0, 1, 1],
                   shaped=[0, 0, -0.5, -1.0, 1, 0, 1, 1])
    assert kinds(samples) == {0: "all_zero", 1: "informative"}
    assert kinds(samples, SHAPED) == {0: "informative", 1: "informative"}


def test_every_column_of_the_kept_rows_stays_aligned():  # B10
    samples = rows([0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 0, 1, 1, 1, 1, 0])
    classes = filters.informative(samples, TASK)
    kept = filters.keep(samples, classes.group[classes.kind == filters.INFORMATIVE])
    assert kept.tokens[:, 0].tolist() == kept.sample.tolist() == [2, 3, 6, 7]
    assert kept.reward.tolist() == [0, 1, 1, 0] and {len(c) for c in vars(kept).values()} == {4}
    assert np.mean(kept.reward) == 0.5 and np.mean(samples.reward) == 0.75


def test_invalid_samples_count_neither_for_nor_against_their_group():
    samples = rows([0, 0, 0, 1, 1, 1, 2, 2], [1, 1, 0, 1, 0, 0, 0, 0],
                   valid=[True, True, False, True, True, False, True, False])
    assert kinds(samples) == {0: "all_one", 1: "informative", 2: "invalid"}
    assert filters.keep(samples, np.array([1])).sample.tolist() == [3, 4]


def test_a_group_with_one_valid_sample_is_invalid_unless_one_is_enough():
    samples = rows([3, 4, 4, 5], [1.0, 1, 0, 0], valid=[True, True, False, False])
    assert kinds(samples) == {3: "invalid", 4: "invalid", 5: "invalid"}
    assert kinds(samples, least=1) == {3: "all_one", 4: "all_one", 5: "invalid"}


def test_groups_of_unequal_size_are_judged_each_by_itself():
    assert kinds(rows([7, 7, 7, 2, 2], [1, 0, 0, 1, 0])) == {2: "informative", 7: "informative"}
    assert kinds(rows([7, 7, 7, 2, 2], [1, 1, 1, 1, 0])) == {2: "informative", 7: "all_one"}


@pytest.mark.parametrize("spread,kind", [(0.0, "all_one"), (1e-7, "all_one"), (0.1, "all_one"),
                                         (0.11, "informative")])
def test_rewards_that_differ_by_no_more_than_the_tolerance_are_equal(spread, kind):
    assert kinds(rows([0, 0], [0.5, 0.5 + spread]),
                 config.Filter(tolerance=float(np.float32(0.6) - np.float32(0.5)))) == {0: kind}


def test_equal_groups_are_named_by_their_task_reward_whatever_the_metric():
    samples = rows([0, 0, 1, 1], [1, 1, 0, 0], shaped=[-1, -1, 2, 2])
    assert kinds(samples, SHAPED) == {0: "all_one", 1: "all_zero"}


def test_no_rows_no_groups():
    assert kinds(types.no_samples(1)) == {}


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.4, 0.6, 1.0]), st.booleans()),
                min_size=1, max_size=24), st.randoms())
def test_classes_equal_a_plain_loop_in_any_row_order(table, random):
    expected = {}
    for group in {row[0] for row in table}:
        rewards = [reward for g, reward, valid in table if g == group and valid]
        if len(rewards) < 2:
            expected[group] = "invalid"
        elif max(rewards) - min(rewards) > 1e-6:
            expected[group] = "informative"
        else:
            expected[group] = "all_one" if sum(rewards) / len(rewards) >= 0.5 else "all_zero"
    random.shuffle(table)
    group, reward, valid = (list(column) for column in zip(*table, strict=True))
    assert kinds(rows(group, reward, valid=valid)) == expected
