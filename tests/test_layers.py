import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import head, layers

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("letters, y, kernel", [
    ("srtd,df->srtf", (2, 1, 5, 3), (3, 4)), ("srtd,dhe->srthe", (1, 2, 5, 3), (3, 2, 4)),
    ("srthe,hed->srtd", (2, 1, 5, 2, 4), (2, 4, 3))])
def test_a_product_and_its_gradients_are_those_of_matrices(letters, y, kernel):
    inside = len(y) - 3
    y, kernel = (RNG.normal(size=shape).astype("f4") for shape in (y, kernel))
    value, back = jax.vjp(lambda *args: layers.product(letters, *args), y, kernel)
    bar = RNG.normal(size=value.shape).astype("f4")
    flat = y.reshape(-1, np.prod(y.shape[3:]))
    square = kernel.reshape(np.prod(kernel.shape[:inside]), -1)
    down = bar.reshape(len(flat), -1)
    for got, want in zip((value, *back(bar)), (flat @ square, down @ square.T, flat.T @ down)):
        np.testing.assert_allclose(np.reshape(got, want.shape), want, atol=1e-5)


def test_a_norm_is_that_of_each_vector_whatever_the_axes_around_it():
    x, scale = RNG.normal(size=(6, 8)).astype("f4"), RNG.normal(size=8).astype("f4")
    want = np.array([row / np.sqrt((row ** 2).mean() + 1e-5) * scale for row in x])
    for shape in ((6, 8), (1, 6, 8), (2, 1, 3, 8), (6, 1, 1, 8)):
        got = layers.rms_norm(x.reshape(shape), scale, eps=1e-5)
        assert got.shape == shape
        np.testing.assert_allclose(got.reshape(6, 8), want, atol=1e-6)
    assert layers.rms_norm(x[0], scale, eps=1e-5).shape == (8,)


def test_an_entropy_and_its_gradient_are_those_of_the_sum_written_out():
    scaled = RNG.normal(size=(1, 3, 50)).astype("f4") * 3

    def plain(z):
        p = jnp.exp(z) / jnp.exp(z).sum(axis=-1, keepdims=True)
        return -(p * jnp.log(p)).sum(axis=-1)
    bar = RNG.normal(size=(1, 3)).astype("f4")
    for got, want in zip(*((value, back(bar)[0]) for value, back in (
            jax.vjp(head.entropy, scaled), jax.vjp(plain, scaled)))):
        np.testing.assert_allclose(got, want, atol=1e-5)
