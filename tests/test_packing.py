import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from dapo_jax import config, types
from dapo_jax.learner import packing, weights

SHAPE = packing.PackShape(slots=2, rows=3, prompt_buckets=(2, 4), completion_buckets=(3, 6))


def make(lengths, group, *, prompts=None, width=6, seed=0):
    """Samples of the given lengths; every token id is another number."""
    n = len(lengths)
    lengths = np.array(lengths, np.int32).reshape(n)
    mask = np.arange(width) < lengths[:, None]
    rng = np.random.default_rng(seed)
    empty = types.no_samples(width)
    columns = {f.name: np.zeros(n, getattr(empty, f.name).dtype)
               for f in dataclasses.fields(types.Samples)}
    columns |= {
        "tokens": (np.arange(n * width).reshape(n, width) + 1000).astype(np.int32),
        "loss_mask": mask, "logprobs": np.where(mask, -rng.random((n, width)), 0).astype("f4"),
        "length": lengths, "stopped": np.ones(n, bool), "valid": np.ones(n, bool),
        "group": np.array(group, np.int32), "reward": rng.random(n).astype("f4"),
        "prompt": np.array(group if prompts is None else prompts, np.int32)}
    return types.Samples(**columns)


def table(lengths=(2, 3, 4, 1, 2, 4), demonstrations=()):
    return types.PromptTable(
        tokens=tuple(np.arange(n, dtype=np.int32) + 10 * (i + 1) for i, n in enumerate(lengths)),
        records=({},) * len(lengths), demonstrations=demonstrations)


def pack(samples, *, weight=None, shape=SHAPE, prompts=None):
    n = len(samples)
    if weight is None:
        weight = weights.token(samples.loss_mask, samples.group, max_length=6)
    return packing.pack(samples, prompts=prompts or table(), weights=weight, shape=shape,
                        advantages=np.arange(n, dtype=np.float32) + 0.5,
                        fresh=np.arange(n) % 2 == 0)


def learned(samples, mask_overlong):
    """The loss mask of those that are learned from."""
    return samples.loss_mask & packing.learned(samples, mask_overlong)[:, None]


def facts(prompt, tokens, logprobs, advantages, weight, fresh, at):
    """What makes one token's loss: everything it attends to, and its own numbers."""
    return (tuple(prompt.tolist()), tuple(tokens[:at + 1].tolist()), float(logprobs[at]),
            float(advantages), float(weight[at]), float(fresh))


def facts_of_samples(samples, weight, prompts):
    return collections.Counter(
        facts(prompts.tokens[samples.prompt[i]], samples.tokens[i], samples.logprobs[i], i + 0.5,
              weight[i], i % 2 == 0, t)
        for i in range(len(samples)) for t in np.flatnonzero(weight[i]))


def facts_of_batches(batches):
    return collections.Counter(
        facts(b.prompt_tokens[s, :b.prompt_length[s]], b.tokens[s, r], b.logprobs[s, r],
              b.advantages[s, r, t], b.weights[s, r], b.fresh[s, r, t], t)
        for b in batches for s, r, t in np.argwhere(b.weights > 0))


@strategies.composite
def cases(draw):
    n = draw(strategies.integers(0, 14))
    group = draw(strategies.lists(strategies.integers(0, 5), min_size=n, max_size=n))
    lengths = draw(strategies.lists(strategies.integers(1, 6), min_size=n, max_size=n))
    shape = packing.PackShape(slots=draw(strategies.integers(1, 4)),
                              rows=draw(strategies.integers(1, 4)),
                              prompt_buckets=draw(strategies.sampled_from([(4,), (1, 2, 4)])),
                              completion_buckets=draw(strategies.sampled_from([(8,), (2, 6)])))
    return make(lengths, group), draw(strategies.integers(0, 9)), shape


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_every_loss_token_occurs_once_with_all_it_depends_on(case):
    samples, seed, shape = case
    holes = np.random.default_rng(seed).random(samples.loss_mask.shape) < 0.8
    weight = weights.group(samples.loss_mask & holes, samples.group, max_length=6)
    batches = pack(samples, weight=weight, shape=shape)
    assert facts_of_batches(batches) == facts_of_samples(samples, weight, table())
    total = sum(b.weights.sum(dtype=np.float64) for b in batches)
    assert total == pytest.approx(weight.sum(dtype=np.float64), abs=1e-12)
    for b in batches:
        slots, rows, width = b.tokens.shape
        assert (slots, rows) == (shape.slots, shape.rows)
        assert (b.prompt_tokens.shape[1], width) in packing.shapes(shape)
        assert (b.weights.sum(axis=(1, 2)) > 0).any() and (b.prompt_length >= 1).all()
        assert {a.dtype.name for a in (b.prompt_tokens, b.prompt_length, b.tokens)} == {"int32"}
        assert {a.dtype.name for a in (b.logprobs, b.advantages, b.weights, b.fresh)} == {"float32"}


def facts_of_packed(batches):
    """As `facts_of_batches`, by what a token is told to see: keys of its number."""
    found = collections.Counter()
    for b in batches:
        for s, r, t in np.argwhere(b.weights > 0):
            after, segment = b.packed.after[s, r], b.packed.segment[s]
            mine = after == after[t]
            start = np.flatnonzero(mine)[0]
            assert mine[start:t + 1].all()  # a sample stands in one piece
            prompt = b.prompt_tokens[s, segment == segment[after[t]]]
            own = (row[s, r, start:] for row in (b.tokens, b.logprobs))
            found[facts(prompt, *own, b.advantages[s, r, t], b.weights[s, r, start:],
                        b.fresh[s, r, t], t - start)] += 1
    return found


PACKED = packing.PackShape(slots=2, rows=2, prompt_buckets=(9,), completion_buckets=(8,),
                           packed=True)


@settings(max_examples=60, deadline=None)
@given(case=cases(), tokens=strategies.sampled_from([0, 25, 60, 200]))
def test_packed_rows_hold_every_loss_token_with_all_it_depends_on(case, tokens):
    samples, seed, _ = case
    samples = dataclasses.replace(samples, prompt=samples.group % 3)  # groups that share a prompt
    holes = np.random.default_rng(seed).random(samples.loss_mask.shape) < 0.8
    weight = weights.group(samples.loss_mask & holes, samples.group, max_length=6)
    shape = dataclasses.replace(PACKED, tokens=tokens)
    batches = pack(samples, weight=weight, shape=shape)
    assert facts_of_packed(batches) == facts_of_samples(samples, weight, table())
    for b in batches:
        slots = packing.slots_of(shape, 9, 8)
        assert (b.prompt_tokens.shape, b.tokens.shape) == ((slots, 9), (slots, 2, 8))
        assert (b.weights.sum(axis=(1, 2)) > 0).any() and b.packed.after.max() < 9
        for segment, after in zip(b.packed.segment, b.packed.after):
            # Of one prompt a row holds one sample, whose tokens follow each other.
            for row in after:
                runs = [n for n, m in zip(row, np.append(-2, row[:-1])) if n != m and n >= 0]
                assert len(runs) == len(set(runs))
            ends = np.flatnonzero(np.diff(np.append(segment, -1)) != 0)
            assert set(after[after >= 0]) <= set(ends)


def places(samples, shape):
    return packing.places(samples.group, samples.prompt, samples.length, prompts=table(),
                          shape=shape)


@settings(max_examples=40, deadline=None)
@given(case=cases(), packed=strategies.booleans())
def test_padding_is_the_share_of_positions_without_content(case, packed):
    samples, _, shape = case
    samples = dataclasses.replace(samples, prompt=samples.group % 3)
    shape = PACKED if packed else shape
    held = positions = 0
    for batch in pack(samples, shape=shape):
        for slot in range(len(batch.tokens)):
            used = batch.weights[slot] > 0
            held += batch.prompt_length[slot] * used.any() + used.sum()
            positions += batch.prompt_tokens[slot].size + used.size
    got = packing.padding(places(samples, shape))
    assert got == pytest.approx(1 - held / positions) if positions else np.isnan(got)


def test_packing_leaves_less_padding_and_a_microbatch_fewer_tokens_than_its_budget():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 192)
    samples = make(lengths, np.repeat(np.arange(24), 8), prompts=np.repeat(np.arange(24) % 6, 8))
    spread = packing.PackShape(slots=2, rows=8, prompt_buckets=(4,), completion_buckets=(6,))
    tight = packing.PackShape(slots=1, rows=8, prompt_buckets=(20,), completion_buckets=(20,),
                              packed=True)
    plain, packed = (places(samples, shape) for shape in (spread, tight))
    total = lengths.sum()
    held = total + 4 * sum(len(table().tokens[g]) for g in range(6))
    assert packing.padding(plain) == pytest.approx(1 - held / (24 * (4 + 8 * 6)))
    assert packing.padding(packed) < 0.6 * packing.padding(plain)
    assert np.isnan(packing.padding([]))
    # By a budget of tokens: short slots share a microbatch in greater number.
    budget = dataclasses.replace(SHAPE, tokens=60, completion_buckets=(3, 6), rows=2)
    batches = pack(make([2] * 9 + [6] * 4, list(range(13)), prompts=[0] * 13), shape=budget)
    shapes = [(b.prompt_tokens.shape[1], *b.tokens.shape) for b in batches]
    assert [s for _, s, *_ in shapes] == [7, 4, 4]  # 60 // (2 + 2 * 3), 60 // (2 + 2 * 6)
    assert all(s * (p + r * t) <= 60 for p, s, r, t in shapes)


def test_a_budget_that_holds_no_slot_for_each_device_is_refused():
    shape = dataclasses.replace(SHAPE, tokens=60, parts=4)
    assert packing.slots_of(shape, 2, 3) == 4
    with pytest.raises(config.ConfigError, match="microbatch_tokens = 60 .* at least 88"):
        packing.slots_of(shape, 4, 6)


def test_what_no_packed_slot_holds_is_refused():
    with pytest.raises(ValueError, match="prompt of 10 tokens"):
        pack(make([1], [0]), prompts=table((10,)), shape=PACKED)
    with pytest.raises(ValueError, match="completion of 6 tokens"):
        pack(make([6], [0]), shape=dataclasses.replace(PACKED, completion_buckets=(5,)))


def test_idle_rows_and_slots_weigh_nothing():
    (batch,) = pack(make([3, 2], [1, 1]))
    np.testing.assert_array_equal((batch.weights > 0).sum(axis=-1), [[3, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(batch.prompt_length, [3, 1])
    assert (batch.prompt_tokens[1] == 0).all() and (batch.tokens[1] == 0).all()
    np.testing.assert_array_equal(batch.fresh, [[[1] * 3, [0] * 3, [0] * 3], [[0] * 3] * 3])


def test_a_slot_serves_one_group_and_a_large_group_takes_several():
    samples = make([1, 1, 1, 1, 1], [4, 2, 4, 4, 4])  # prompts of 2 and 4 tokens
    first, second = pack(samples)
    start = samples.tokens[:, 0].tolist()
    assert first.tokens[:, :, 0].tolist() == [[start[0], *start[2:4]], [start[4], 0, 0]]
    assert second.tokens[:, :, 0].tolist() == [[start[1], 0, 0], [0, 0, 0]]


def test_slots_of_like_length_share_a_microbatch_of_the_smallest_buckets():
    # Prompt lengths 2, 3, 4, 1: buckets 2, 4, 4, 2.
    samples = make([6, 1, 5, 2], [0, 1, 2, 3])
    short, long = pack(samples)
    assert (short.prompt_tokens.shape, short.tokens.shape) == ((2, 4), (2, 3, 3))
    assert (long.prompt_tokens.shape, long.tokens.shape) == ((2, 4), (2, 3, 6))
    assert short.tokens[:, 0, 0].tolist() == samples.tokens[[3, 1], 0].tolist()
    assert long.tokens[:, 0, 0].tolist() == samples.tokens[[0, 2], 0].tolist()
    (only,) = pack(make([3, 1], [0, 3]))
    assert (only.prompt_tokens.shape, only.tokens.shape) == ((2, 2), (2, 3, 3))


def test_rows_and_tails_without_weight_are_not_content():
    samples = make([6, 3, 6], [0, 0, 1])
    weight = np.zeros((3, 6), np.float32)
    weight[0, 1], weight[1, 0] = 0.25, 0.75
    (batch,) = pack(samples, weight=weight)
    assert batch.tokens.shape == (2, 3, 3) and (batch.weights > 0).sum() == 2
    assert pack(samples, weight=np.zeros((3, 6), np.float32)) == []
    assert pack(types.no_samples(6)) == []


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"completion of 6 tokens .* \(3, 5\)"):
        pack(make([6], [0]), shape=dataclasses.replace(SHAPE, completion_buckets=(3, 5)))
    with pytest.raises(ValueError, match=r"prompt of 5 tokens .* \(2, 4\)"):
        pack(make([6], [0]), prompts=table((5,)))
    with pytest.raises(ValueError, match=r"group 7 holds samples of several prompts: \[0, 1\]"):
        pack(make([1, 1], [7, 7], prompts=[0, 1]))
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        pack(make([1], [0]), prompts=table((0,)))


def test_one_token_tables_are_not_spread_over_a_wider_bucket():
    samples = make([1, 1], [0, 0], width=1)
    (batch,) = pack(samples)
    assert (batch.weights > 0).sum() == 2 and batch.weights.sum() == 1


def test_a_pad_id_that_is_also_the_stop_id_is_trained_and_kept():  # B44
    samples = make([3, 5, 1], [0, 0, 0], width=5)
    tokens = np.array([[5, 7, 2, 2, 2], [5, 7, 9, 4, 6], [2, 2, 2, 2, 2]], np.int32)
    samples = dataclasses.replace(samples, tokens=tokens, stopped=np.array([True, False, True]))
    prompts = dataclasses.replace(table(), tokens=(np.array([2, 8, 2], np.int32),))
    mask = learned(samples, False)
    assert mask.astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    (batch,) = pack(samples, prompts=prompts,
                    weight=weights.token(mask, samples.group, max_length=5))
    assert batch.prompt_length[0] == 3 and batch.prompt_tokens[0, :3].tolist() == [2, 8, 2]
    np.testing.assert_array_equal(batch.weights[0, :, :5] > 0, mask)
    assert learned(samples, True).sum(axis=1).tolist() == [3, 0, 1]


def test_invalid_samples_are_never_learned_from():  # B28
    samples = dataclasses.replace(make([2, 6, 1], [0, 0, 1]),
                                  stopped=np.array([True, False, True]),
                                  valid=np.array([True, True, False]))
    assert learned(samples, False).sum(axis=1).tolist() == [2, 6, 0]
    kept = learned(samples, True)
    assert kept.sum(axis=1).tolist() == [2, 0, 0] and samples.length[:2].sum() == 8
    assert weights.token(kept, samples.group, max_length=6).sum() == 1


@settings(max_examples=60, deadline=None)
@given(group=strategies.lists(strategies.integers(0, 9), max_size=20),
       updates=strategies.integers(1, 6))
def test_updates_take_whole_groups_in_order(group, updates):
    samples = make([1] * len(group), group)
    parts = packing.split_updates(samples, updates)
    assert sorted(i for part in parts for i in part) == list(range(len(group)))
    groups = [list(dict.fromkeys(samples.group[part].tolist())) for part in parts]
    assert [g for part in groups for g in part] == list(dict.fromkeys(group))
    sizes = [len(part) for part in groups]
    assert len(parts) <= updates and all(sizes)
    assert len(set(sizes[:-1])) <= 1 and (not sizes or sizes[-1] <= sizes[0])
    if len(set(group)) % updates == 0 and group:
        assert len(parts) == updates


def test_demonstrations_become_samples():
    rows = (np.array([5, 2]), np.array([6, 7, 2]), np.array([2]))
    got = packing.from_demonstrations(table(demonstrations=rows), np.array([1, 0]), width=4, step=3)
    assert got.tokens.tolist() == [[6, 7, 2, 0], [5, 2, 0, 0]]
    assert got.loss_mask.sum(axis=1).tolist() == got.length.tolist() == [3, 2]
    assert got.prompt.tolist() == [1, 0] and got.group.tolist() == [0, 1]
    assert got.valid.all() and got.stopped.all() and (got.born == 3).all()
    like = types.no_samples(4)
    for field in dataclasses.fields(types.Samples):
        assert getattr(got, field.name).dtype == getattr(like, field.name).dtype, field.name
    assert len(types.concatenate(got, like)) == 2


def test_missing_or_long_demonstrations_are_refused():
    with pytest.raises(config.ConfigError, match="demonstrations"):
        packing.from_demonstrations(table(), np.array([0]), width=4, step=0)
    rows = (np.arange(2), np.arange(5))
    with pytest.raises(config.ConfigError, match="prompt 1: .* 5 tokens, more than the 4"):
        packing.from_demonstrations(table(demonstrations=rows), np.array([0, 1]), width=4, step=0)
