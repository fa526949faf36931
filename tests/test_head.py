import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import head

S, L, D, V = 2, 7, 8, 50


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return ({"embedding": rng.normal(size=(V, D)).astype("f4")},
            rng.normal(size=(S, L, D)).astype("f4"), rng.integers(0, V, (S, L)).astype("i4"))


def naive(params, hidden, targets, temperature, cap=None):
    kernel = params["head"] if "head" in params else params["embedding"].T
    raw = hidden @ kernel
    logp = jax.nn.log_softmax((cap * jnp.tanh(raw / cap) if cap else raw) / temperature, axis=-1)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize(("chunk", "cap", "tied"), [
    (1, None, True), (4, 2.0, True), (6, None, False), (1000, 2.0, False)])
def test_log_probs_entropies_and_gradients_do_not_depend_on_the_chunk(case, chunk, cap, tied):
    params, hidden, targets = case
    if not tied:
        params = params | {"head": params["embedding"].T + 0.5}
    weight = np.random.default_rng(1).normal(size=(2, S, L)).astype("f4")

    def total(stats):
        return lambda p, h: sum((w * s).sum() for w, s in zip(weight, stats(p, h)))

    chunked = lambda p, h: head.token_stats(  # noqa: E731
        p, h, targets, temperature=0.7, chunk=chunk, entropy_gradient=True, softcap=cap)
    plain = lambda p, h: naive(p, h, targets, 0.7, cap)  # noqa: E731
    for got, want in zip(jax.jit(chunked)(params, hidden), plain(params, hidden)):
        np.testing.assert_allclose(got, want, atol=1e-5)
    got, want = (jax.jit(jax.grad(total(f), argnums=(0, 1)))(params, hidden)
                 for f in (chunked, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def test_entropy_passes_a_gradient_only_where_asked(case):
    params, hidden, targets = case
    grad = jax.grad(lambda h, on: head.token_stats(
        params, h, targets, temperature=1.0, chunk=8, entropy_gradient=on)[1].sum())
    assert not np.any(grad(hidden, False)) and np.any(grad(hidden, True))


def test_an_untied_head_is_used_in_place_of_the_embedding(case):
    params, hidden, targets = case
    kernel = np.random.default_rng(2).normal(size=(D, V)).astype("f4")
    untied = params | {"head": kernel}
    np.testing.assert_allclose(head.logits(untied, hidden), hidden @ kernel, atol=1e-5)
    got = head.token_stats(untied, hidden, targets, temperature=1.0, chunk=3)
    np.testing.assert_allclose(got[0], naive(untied, hidden, targets, 1.0)[0], atol=1e-5)


def test_temperature_stands_inside_the_softmax():  # B36
    params = {"embedding": np.array([[2.0], [0.0]], "f4")}
    logp, _ = head.token_stats(params, np.ones((1, 1, 1), "f4"), np.zeros((1, 1), "i4"),
                               temperature=0.5, chunk=1)
    assert float(logp[0, 0]) == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize("logits,want", [
    ([0.0] * 4, np.log(4)), ([0.0, -1e30], 0.0), ([np.log(3.0), 0.0], 0.562335)])
def test_entropy_has_the_values_computed_by_hand(logits, want):
    assert float(head.entropy(jnp.array(logits, jnp.float32))) == pytest.approx(want, abs=1e-6)


def test_logits_of_a_whole_batch_never_exist():
    """Log-probs and entropies of a vocabulary of 150,000 take an eighth of the naive head's peak,
    their gradients included."""
    tokens, vocab = 4096, 150_000
    chunk = head.chunk_size(vocab)
    assert chunk == 256
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((vocab, 16), jnp.float32), ((1, tokens, 16), jnp.float32), ((1, tokens), jnp.int32))]

    def temporary(stats):
        loss = lambda kernel, hidden, targets: sum(  # noqa: E731
            x.sum() for x in stats({"embedding": kernel}, hidden, targets))
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    chunked = temporary(lambda *a: head.token_stats(
        *a, temperature=1.0, chunk=chunk, entropy_gradient=True))
    whole = temporary(lambda *a: naive(*a, 1.0))
    assert whole >= 4 * tokens * vocab and chunked < whole / 8


@pytest.mark.parametrize("vocab,expected", [(64, 1024), (65_536, 1024), (65_537, 512),
                                            (151_936, 256), (10 ** 9, 1)])
def test_a_chunk_takes_256_MiB_at_most(vocab, expected):
    assert head.chunk_size(vocab) == expected
