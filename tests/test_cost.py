"""Counted work against a loop over products, and against what the compiler counts."""

import jax
import numpy as np
import pytest
import tiny

from dapo_jax.models import cost, transformer

SPEC = tiny.SPEC


def by_hand(prompt, lengths):
    """Operations of one prompt and its completions, product by product."""
    heads, kv, size = SPEC.heads, SPEC.kv_heads, SPEC.head_size

    def token(keys):
        total = 0
        for _ in range(SPEC.layers):
            for rows, columns in ((SPEC.d_model, heads * size), (SPEC.d_model, kv * size),
                                  (SPEC.d_model, kv * size), (heads * size, SPEC.d_model),
                                  (SPEC.d_model, SPEC.ff), (SPEC.d_model, SPEC.ff),
                                  (SPEC.ff, SPEC.d_model)):
                total += 2 * rows * columns
            total += 2 * 2 * heads * size * keys  # scores and mix
        return total

    head = 2 * SPEC.d_model * SPEC.vocab
    total = sum(token(place + 1) for place in range(prompt)) + head
    for length in lengths:
        total += sum(token(prompt + place + 1) + head for place in range(length - 1))
    return total


@pytest.mark.parametrize("prompts, lengths", [([3], [[1]]), ([3], [[4, 2]]),
                                              ([5, 1], [[6, 6], [1, 3]])])
def test_the_work_of_a_rollout_is_the_sum_of_its_products(prompts, lengths):
    wanted = sum(by_hand(prompt, row) for prompt, row in zip(prompts, lengths, strict=True))
    assert cost.rollout(SPEC, np.array(prompts), np.array(lengths)) == wanted


def test_an_update_is_three_forwards_with_logits_at_every_token():
    prompts, lengths = np.array([5, 1]), np.array([[6, 6], [1, 3]])
    head = 2 * SPEC.d_model * SPEC.vocab
    forward = sum(by_hand(prompt, row) for prompt, row in zip(prompts, lengths, strict=True))
    forward += head * (lengths.size - len(prompts))  # the first token of each further completion
    assert cost.update(SPEC, prompts, lengths) == 3 * forward


def test_the_blocks_parameters_are_those_of_the_tree():
    shapes = jax.eval_shape(lambda: transformer.init(SPEC, jax.random.key(0)))
    matrices = sum(leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
                   if leaf.ndim > 2)
    assert cost.block_parameters(SPEC) == matrices


def test_a_decode_step_reads_weights_once_prompts_once_a_slot_and_rows_each():
    token = 2 * SPEC.layers * SPEC.kv_heads * SPEC.head_size * 2
    weights = 2 * (cost.block_parameters(SPEC) + SPEC.d_model * SPEC.vocab)
    read = cost.decode_bytes(SPEC, slots=3, rows=12, prompt=7, mean_tokens=4.0, bytes_per_number=2)
    assert read == weights + token * (3 * 7 + 12 * 4)
