"""A loop written by hand for this workload: what the same machine does without a system around it.

It runs a prompt once for its group, draws by one number a token, scans microbatches of one prompt,
and does nothing else: no padding, no end of text, no stored log-probs, no metrics but the loss.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workload as W

GROUPED = W.HEADS // W.KV_HEADS
OPTIMIZER = optax.chain(optax.clip_by_global_norm(W.NORM), optax.adamw(W.RATE, weight_decay=0.0))


def params():
    given = W.weights()

    def layer(one):
        attention = [one[name].reshape(W.WIDTH, -1) for name in "qkv"]
        return {"in": np.concatenate(attention, 1), "out": one["o"].reshape(-1, W.WIDTH),
                "gates": np.concatenate([one["gate"], one["up"]], 1), "down": one["down"],
                "norm1": one["norm1"], "norm2": one["norm2"]}
    return jax.tree.map(jnp.asarray, {"table": given["embedding"], "norm": given["norm"],
                                      "layers": [layer(one) for one in given["layers"]]})


def norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + W.EPS) * scale


def rotate(x, position):
    frequency = W.ROPE ** (-np.arange(0, W.SIZE, 2) / W.SIZE).astype(np.float32)
    angle = (position[..., None] * frequency)[..., None, :]
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def heads(layer, x, position):
    """Queries [..., K, G, E], keys and values [..., K, E]."""
    y = norm(x, layer["norm1"]) @ layer["in"]
    query, key, value = jnp.split(y, [W.HEADS * W.SIZE, (W.HEADS + W.KV_HEADS) * W.SIZE], -1)
    shape = x.shape[:-1]
    query = rotate(query.reshape(*shape, W.HEADS, W.SIZE), position) * W.SIZE ** -0.5
    key = rotate(key.reshape(*shape, W.KV_HEADS, W.SIZE), position)
    return (query.reshape(*shape, W.KV_HEADS, GROUPED, W.SIZE), key,
            value.reshape(*shape, W.KV_HEADS, W.SIZE))


def onward(layer, x, mixed):
    """The rest of a block, given what attention mixed."""
    x = x + mixed.reshape(*x.shape[:-1], -1) @ layer["out"]
    gate, up = jnp.split(norm(x, layer["norm2"]) @ layer["gates"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ layer["down"]


def causal(scores):
    size = scores.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((size, size), bool)), scores, -1e30)


def prompt_block(layer, x):
    """Prompts [..., P, D] through a block, and their keys and values [..., P, K, E]."""
    query, key, value = heads(layer, x, jnp.arange(x.shape[-2], dtype=jnp.float32))
    shares = jax.nn.softmax(causal(jnp.einsum("...qkge,...pke->...kgqp", query, key)), -1)
    return onward(layer, x, jnp.einsum("...kgqp,...pke->...qkge", shares, value)), key, value


def rows_block(layer, x, key, value):
    """Rows [..., R, T, D] of prompts whose keys and values are given."""
    count = key.shape[-3]
    query, own, own_value = heads(layer, x, count + jnp.arange(x.shape[-2], dtype=jnp.float32))
    before = jnp.einsum("...rqkge,...pke->...rkgqp", query, key)
    after = causal(jnp.einsum("...qkge,...tke->...kgqt", query, own))
    shares = jax.nn.softmax(jnp.concatenate([before, after], -1), -1)
    mixed = (jnp.einsum("...rkgqp,...pke->...rqkge", shares[..., :count], value)
             + jnp.einsum("...kgqt,...tke->...qkge", shares[..., count:], own_value))
    return onward(layer, x, mixed)


def logprobs(tree, prompts, rows):
    """[R, T] of rows [R, T] after a prompt [P]: no axis of 1, which makes sums slow on CPU."""
    x, y = tree["table"][prompts], tree["table"][rows[..., :-1]]
    for layer in tree["layers"]:
        x, key, value = prompt_block(layer, x)
        y = rows_block(layer, y, key, value)
    last = jnp.broadcast_to(x[-1], (len(y), 1, W.WIDTH))
    logits = norm(jnp.concatenate([last, y], 1), tree["norm"]) @ tree["table"].T
    chosen = jnp.take_along_axis(logits, rows[..., None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, -1)


def loss(tree, prompts, rows, advantages):
    new = logprobs(tree, prompts, rows)
    ratio, advantages = jnp.exp(new - jax.lax.stop_gradient(new)), advantages[..., None]
    cut = jnp.clip(ratio, 1 - W.CLIP_LOW, 1 + W.CLIP_HIGH)
    return -jnp.minimum(ratio * advantages, cut * advantages).sum() / (W.SAMPLES * W.NEW)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(tree, moments, prompts, rows, advantages):
    def add(sums, batch):
        found = jax.value_and_grad(loss)(tree, *batch)
        return jax.tree.map(jnp.add, sums, found), None
    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, tree))
    (value, grads), _ = jax.lax.scan(add, zeros, (prompts, rows, advantages))
    steps, moments = OPTIMIZER.update(grads, moments, tree)
    return optax.apply_updates(tree, steps), moments, value


def draw(logits, key):
    """By inverse cumulative mass: first among 64 blocks, then inside one."""
    mass = jnp.exp(logits - logits.max(-1, keepdims=True)).reshape(*logits.shape[:-1], 64, -1)
    blocks = jnp.cumsum(mass.sum(-1), -1)
    point = jax.random.uniform(key, (*blocks.shape[:-1], 1)) * blocks[..., -1:]
    block = jnp.minimum((blocks <= point).sum(-1, keepdims=True), 63)
    start = jnp.where(block > 0, jnp.take_along_axis(blocks, jnp.maximum(block - 1, 0), -1), 0)
    inside = jnp.cumsum(jnp.take_along_axis(mass, block[..., None], -2)[..., 0, :], -1)
    width = mass.shape[-1]
    return block[..., 0] * width + jnp.minimum((inside <= point - start).sum(-1), width - 1)


@jax.jit
def sample(tree, prompts, key):
    """[B, R, T] tokens; caches have time last, or before the head's numbers, as products want."""
    x, held, table = tree["table"][prompts], [], tree["table"].T
    for layer in tree["layers"]:
        x, keys, values = prompt_block(layer, x)
        held.append((keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)))
    size = (W.PROMPTS, W.GROUP, W.KV_HEADS)
    caches = [(jnp.zeros((*size, W.SIZE, W.NEW)), jnp.zeros((*size, W.NEW, W.SIZE)))
              for _ in held]

    def one(carry, at):
        token, caches, key = carry
        key, own = jax.random.split(key)
        x, new = tree["table"][token], []
        position = jnp.full(token.shape, W.PROMPT + at, jnp.float32)
        for layer, (keys, values), (mine, my_values) in zip(tree["layers"], held, caches):
            query, key_now, value_now = heads(layer, x, position)
            mine = jax.lax.dynamic_update_slice_in_dim(mine, key_now[..., None], at, 4)
            my_values = jax.lax.dynamic_update_slice_in_dim(my_values, value_now[..., None, :], at,
                                                            3)
            new.append((mine, my_values))
            before = jnp.einsum("brkge,bkep->bkrgp", query, keys).transpose(0, 2, 1, 3, 4)
            after = jnp.where(jnp.arange(W.NEW) <= at,
                              jnp.einsum("brkge,brket->brkgt", query, mine), -1e30)
            shares = jax.nn.softmax(jnp.concatenate([before, after], -1), -1)
            first = shares[..., :W.PROMPT].transpose(0, 2, 1, 3, 4)
            mixed = (jnp.einsum("bkrgp,bkpe->bkrge", first, values).transpose(0, 2, 1, 3, 4)
                     + jnp.einsum("brkgt,brkte->brkge", shares[..., W.PROMPT:], my_values))
            x = onward(layer, x, mixed)
        return (draw(norm(x, tree["norm"]) @ table, own), new, key), token
    key, own = jax.random.split(key)
    logits = norm(x[:, -1], tree["norm"]) @ table
    first = draw(jnp.broadcast_to(logits[:, None], (W.PROMPTS, W.GROUP, W.VOCAB)), own)
    _, tokens = jax.lax.scan(one, (first, caches, key), jnp.arange(W.NEW))
    return jnp.moveaxis(tokens, 0, 2)


def check(tree):
    tokens = jnp.asarray(W.checked())
    x = tree["table"][tokens]
    for layer in tree["layers"]:
        x, _, _ = prompt_block(layer, x)
    return W.mean_logprob(norm(x, tree["norm"]) @ tree["table"].T)


def main():
    given, tree = W.arguments(), params()
    result = {"peer": "hand-written loop", "versions": f"jax {jax.__version__}",
              "check": check(tree)}
    state, prompts, seeds = [tree, OPTIMIZER.init(tree)], jnp.asarray(W.prompts()), iter(range(999))
    rows, advantages = W.completions()
    shape = (W.PROMPTS, W.GROUP)
    fixed = jnp.asarray(rows.reshape(*shape, -1)), jnp.asarray(advantages.reshape(shape))

    def roll():
        return np.asarray(sample(state[0], prompts, jax.random.key(next(seeds))))

    def learn(rows, advantages):
        state[0], state[1], value = update(*state, prompts, rows, advantages)
        return float(value)

    def whole():
        rows = roll()
        rewards = np.array([W.reward(W.Words().decode(row)) for row in rows.reshape(W.SAMPLES, -1)],
                           np.float32).reshape(shape)
        centred = rewards - rewards.mean(1, keepdims=True)
        return learn(jnp.asarray(rows),
                     jnp.asarray(centred / (rewards.std(1, keepdims=True) + 1e-6)))
    calls = {"rollout": roll, "update": lambda: learn(*fixed), "step": whole}
    W.report(**result, **{part: W.seconds(calls[part], given.repeats) for part in given.parts})


main()
