"""What a block keeps for its backward pass changes memory alone."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from dapo_jax.models import decoder, transformer

SPEC = dataclasses.replace(tiny.SPEC, layers=6, d_model=16, ff=32)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 96)).astype(np.int32)


@pytest.fixture(scope="module")
def found():
    """remat -> flat gradient, and bytes that it takes beside arguments and result."""
    params = tiny.params(SPEC)
    length = np.full(len(TOKENS), TOKENS.shape[1], np.int32)

    def measured(remat):
        spec = dataclasses.replace(SPEC, remat=remat)
        total = lambda tree: (transformer.prefill(  # noqa: E731
            spec, tree, TOKENS, length)[0] ** 2).sum()
        program = jax.jit(jax.grad(total)).lower(params).compile()
        leaves = jax.tree.leaves(program(params))
        return (np.concatenate([np.ravel(leaf).astype("f8") for leaf in leaves]),
                program.memory_analysis().temp_size_in_bytes)
    return {remat: measured(remat) for remat in ("none", *decoder.REMAT)}


@pytest.mark.parametrize("remat", decoder.REMAT)
def test_a_gradient_does_not_depend_on_what_is_recomputed(found, remat):
    wanted, got = found["none"][0], found[remat][0]
    assert np.linalg.norm(wanted) > 1
    assert np.linalg.norm(got - wanted) <= 5e-6 * np.linalg.norm(wanted)


def test_recomputing_more_takes_less_memory(found):
    none, dots, full = (found[remat][1] for remat in ("none", "dots", "full"))
    assert full < dots < none and full < none / 2
