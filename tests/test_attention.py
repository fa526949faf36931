import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import attention

S, R, P, T, H, K, E = 2, 2, 5, 9, 4, 2, 8
SCALE = 0.4


def places(rng, *, packed):
    """Positions and segments of a packed or a plain microbatch, as models/packed.py makes them."""
    if not packed:
        length = np.array([3, 5])
        own = attention.Places(length[:, None, None] + np.arange(T)[None, None])
        return attention.Seen(own, own, attention.prompt_places(length, P))
    segment = np.array([[0, 0, 1, 1, -1], [0, 1, 1, 1, 2]])[:, None]
    position = np.array([[0, 1, 0, 1, 0], [0, 0, 1, 2, 0]])[:, None]
    mine = np.sort(rng.integers(0, 2, (S, R, T)), axis=-1)
    mine[..., -2:] = -1
    ends = np.array([[2, 2], [1, 3]])  # tokens of prompts 0 and 1
    own_position = np.zeros((S, R, T), int)
    for s, r, t in np.ndindex(S, R, T):
        start = np.flatnonzero(mine[s, r] == mine[s, r, t])[0]
        own_position[s, r, t] = ends[s, max(mine[s, r, t], 0)] + t - start
    own = attention.Places(own_position, mine)
    return attention.Seen(own, own, attention.Places(position, segment))


def arrays(rng):
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return (make(S, R, T, H, E), (make(S, R, K, E, T), make(S, R, K, T, E)),
            (make(S, K, E, P), make(S, K, P, E)))


def loop(query, own, prompt, seen, window, cap):
    """One token and head at a time, over a list of the keys it sees."""
    def at(x, s, r):
        return None if x is None else np.broadcast_to(x, (S, R, x.shape[-1]))[s, r]
    out = np.zeros_like(query)
    for s, r, t, h in np.ndindex(S, R, T, H):
        scores, values = [], []
        for part, keys, vals in ((seen.prompt, prompt[0][s], prompt[1][s]),
                                 (seen.own, own[0][s, r], own[1][s, r])):
            for u in range(vals.shape[1]):
                back = at(seen.query.position, s, r)[t] - at(part.position, s, r)[u]
                if back < 0 or (window and back >= window):
                    continue
                if (part.segment is not None
                        and at(part.segment, s, r)[u] != at(seen.query.segment, s, r)[t]):
                    continue
                score = SCALE * query[s, r, t, h] @ keys[h * K // H, :, u]
                scores.append(cap * np.tanh(score / cap) if cap else score)
                values.append(vals[h * K // H, u])
        mass = np.exp(np.array(scores) - max(scores))
        out[s, r, t, h] = mass @ np.array(values) / mass.sum()
    return out


def real(seen):
    """The queries that are no padding."""
    if seen.query.segment is None:
        return np.ones((S, R, T), bool)
    return seen.query.segment >= 0


CASES = [(True, None, None), (True, 3, 0.5), (False, 3, None)]


@pytest.mark.parametrize(("packed", "window", "cap"), CASES)
@pytest.mark.parametrize("name", ["xla", "blocked", "cudnn"])
def test_each_implementation_equals_a_loop_over_keys(monkeypatch, name, packed, window, cap):
    monkeypatch.setattr(attention, "BLOCK", 4)
    rng = np.random.default_rng(0)
    seen, (query, own, prompt) = places(rng, packed=packed), arrays(rng)
    how = attention.How(name, SCALE, cap)
    if name == "cudnn" and not cap:  # the library's call, by its form for any machine
        got = attention._cudnn(query, own, prompt, seen, window, how, implementation="xla")
    else:
        got = attention.attend(query, own, prompt, seen, window=window, how=how)
    want = loop(query, own, prompt, seen, window, cap)
    np.testing.assert_allclose(np.where(real(seen)[..., None, None], got - want, 0), 0, atol=2e-6)


@pytest.mark.parametrize(("packed", "cap"), [
    (True, 0.5), *(pytest.param(*case, marks=pytest.mark.slow)
                   for case in ((True, None), (False, 0.5), (False, None)))])
def test_the_tpu_kernel_equals_the_plain_form_with_its_gradients(packed, cap):
    rng = np.random.default_rng(1)
    seen, parts = places(rng, packed=packed), arrays(rng)
    weight = rng.normal(size=parts[0].shape).astype("f4") * real(seen)[..., None, None]

    def value(name, interpret):
        how = attention.How(name, SCALE, cap, interpret=interpret)

        def total(parts):
            mixed = attention.attend(*parts, seen, window=None, how=how)
            return (mixed * weight).sum(), mixed
        return jax.jit(jax.value_and_grad(total, has_aux=True))(parts)

    ((_, want), wanted), ((_, got), grads) = value("xla", False), value("tpu", True)
    np.testing.assert_allclose(got * (weight != 0), want * (weight != 0), atol=2e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize(("dtype", "cap", "size", "name"), [
    ("bfloat16", None, 8, "_cudnn"), ("float32", None, 8, "_blocked"),
    ("bfloat16", 0.5, 8, "_blocked"), ("bfloat16", None, 12, "_blocked")])
def test_what_cudnn_cannot_do_is_done_in_blocks(monkeypatch, dtype, cap, size, name):
    called = []
    for one in ("_cudnn", "_blocked"):
        monkeypatch.setattr(attention, one, lambda *args, one=one: called.append(one))
    query = jnp.zeros((1, 1, 2, 1, size), dtype)
    attention.attend(query, None, None, None, window=None, how=attention.How("cudnn", 1.0, cap))
    assert called == [name]


def test_blocks_of_queries_hold_no_array_of_queries_by_keys():
    length = 4096
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    args = (struct(1, 1, length, 2, 8), (struct(1, 1, 1, 8, length), struct(1, 1, 1, length, 8)))

    def temporary(name):
        at = attention.Places(jnp.arange(length)[None, None])
        run = jax.grad(lambda q, own: attention.attend(
            q, own, None, attention.Seen(at, at), window=None,
            how=attention.How(name, 1.0)).sum())
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    whole = 4 * 2 * length ** 2
    assert temporary("xla") >= whole
    assert temporary("blocked") < whole / 2


def test_auto_is_chosen_by_the_device():
    assert [attention.resolve("auto", backend) for backend in ("cpu", "gpu", "tpu")] == [
        "xla", "cudnn", "tpu"]
    assert attention.resolve("blocked", "tpu") == "blocked"
