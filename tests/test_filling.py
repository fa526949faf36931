"""What several processes fill, each the slots of its own devices, is what one fills."""

import dataclasses

import jax
import numpy as np
import pytest
from test_packing import facts_of_batches, facts_of_packed, facts_of_samples, make, table

from dapo_jax.learner import algorithms, filling, packing, rows, stacks, step

PARTS = 4
SLOTS = packing.PackShape(slots=8, rows=2, prompt_buckets=(2, 4), completion_buckets=(3, 6),
                          parts=PARTS)
BUDGET = dataclasses.replace(SLOTS, tokens=120)
PACKED = packing.PackShape(slots=4, rows=2, prompt_buckets=(9,), completion_buckets=(8,),
                           parts=PARTS, packed=True)
PROCESSES = ((0, 2), (1,), (3,))  # the parts of each, in no order of theirs


def samples(seed=0, count=60):
    rng = np.random.default_rng(seed)
    made = make(rng.integers(1, 7, count), np.sort(rng.integers(0, 25, count)), seed=seed)
    holes = made.loss_mask & (rng.random(made.loss_mask.shape) < 0.8)
    return dataclasses.replace(made, prompt=made.group % 6, loss_mask=holes,
                               shaped=made.reward)


def prepared(shape, scheme="token", updates=3):
    algorithm = dataclasses.replace(algorithms.dapo(), weights=scheme)
    return step.prepare(samples(), algorithm=algorithm, updates=updates, step=0, table=table(),
                        shape=shape, max_length=6)


def together(parts, axis=0):
    """One batch of the parts of all: of each its own slots, by a plain loop."""
    whole = jax.tree.map(np.zeros_like, parts[0])
    for own, batch in zip(PROCESSES, parts, strict=True):
        for target, leaf in zip(jax.tree.leaves(whole), jax.tree.leaves(batch), strict=True):
            each = leaf.shape[axis] // PARTS
            for part in own:
                here = (slice(None),) * axis + (slice(part * each, (part + 1) * each),)
                target[here] = leaf[here]
    return whole


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("shape", [SLOTS, BUDGET, PACKED], ids=["slots", "budget", "packed"])
@pytest.mark.parametrize("scheme", ["token", "microbatch_token"])
def test_what_each_process_fills_is_together_what_one_fills(shape, scheme):
    whole = prepared(shape, scheme)
    apart = [prepared(dataclasses.replace(shape, own=own), scheme) for own in PROCESSES]
    assert len(whole) == 3
    for number, one in enumerate(whole):
        works = [of[number] for of in apart]
        assert {work.tokens for work in works} == {one.tokens}
        assert {packing.padding(work.places) for work in works} == {packing.padding(one.places)}
        for index, batch in enumerate(one.batches):
            parts = [work.batches[index] for work in works]
            assert any((batch.weights != part.weights).any() for part in parts)
            same(together(parts), batch)
    assert sum(len(one.batches) for one in whole) > 3


def test_stacks_of_parts_are_together_the_stacks_of_all():
    sizes = {shape: 2 for shape in packing.shapes(SLOTS)}
    whole, *apart = ([stack for one in prepared(shape, updates=2)
                      for stack in stacks.stacked(one.batches, sizes)] for shape in (
        SLOTS, *(dataclasses.replace(SLOTS, own=own) for own in PROCESSES)))
    assert max(int(stack.count) for stack in whole) == 2
    for wanted, *parts in zip(whole, *apart, strict=True):
        assert {int(part.count) for part in parts} == {int(wanted.count)}
        same(together([part.batch for part in parts], axis=1), wanted.batch)


@pytest.mark.parametrize("shape", [SLOTS, PACKED], ids=["slots", "packed"])
def test_slots_of_others_are_idle_and_every_token_is_in_one_process(shape):
    made = samples()
    weight = made.loss_mask.astype(np.float32) / 7
    facts = facts_of_packed if shape.packed else facts_of_batches
    count = sum((facts(packing.pack(
        made, prompts=table(), advantages=np.arange(len(made), dtype=np.float32) + 0.5,
        weights=weight, fresh=np.arange(len(made)) % 2 == 0,
        shape=dataclasses.replace(shape, own=own))) for own in PROCESSES), start=facts([]))
    assert count == facts_of_samples(made, weight, table())


def test_a_sample_that_no_own_slot_holds_is_not_read():
    """Two prompts of 1 and 2 tokens; the second slot is another process's."""
    columns = tuple(np.array([[1, 2], [3, 4]], dtype) for dtype in ("i4", "f4", "f4", "f4", "f4"))
    layout = rows.in_slots([np.array([0]), np.array([1])], np.array([2, 1]))
    place = rows.Place(layout, slots=2, rows=1, prompt=2, completion=3, held=6)
    both = filling.slots(place, columns, [np.array([8]), np.array([9, 7])])
    assert both.prompt_tokens.tolist() == [[8, 0], [9, 7]] and both.prompt_length.tolist() == [1, 2]
    assert both.tokens.tolist() == [[[1, 2, 0]], [[3, 4, 0]]]
    own = dataclasses.replace(place, layout=layout.take(layout.slot < 1))
    one = filling.slots(own, tuple(column[:1] for column in columns), [np.array([8])])
    assert one.tokens.tolist() == [[[1, 2, 0]], [[0, 0, 0]]]
    assert one.prompt_length.tolist() == [1, 1]
