"""A Llama-like decoder as plain numpy loops in float64. Imports nothing of the package."""

import math

import numpy as np


def llama3_frequency(frequency, *, factor, low, high, context):
    """One frequency under Llama 3.1's rule, case by case."""
    wave = 2 * math.pi / frequency
    if wave < context / high:
        return frequency
    if wave > context / low:
        return frequency / factor
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def norm(x, scale, eps):
    return x / np.sqrt((x ** 2).mean() + eps) * scale


def rotate(x, position, frequencies):
    half = len(x) // 2
    result = np.empty_like(x)
    for i in range(half):
        turn = complex(x[i], x[i + half]) * np.exp(1j * position * frequencies[i])
        result[i], result[i + half] = turn.real, turn.imag
    return result


def head_of(part, name, y, number, eps):
    """One head's query, key or value, with a bias or a norm of its own where there is one."""
    x = y @ part[name][:, number]
    if f"{name}_bias" in part:
        x = x + part[f"{name}_bias"][number]
    return norm(x, part[f"{name}_norm"], eps) if f"{name}_norm" in part else x


def forward(params, tokens, *, frequencies, eps, head=None):
    """Logits [L, V] of one sequence. `params` is the nested dict of the decoder, layers stacked;
    `head` is a [D, V] kernel, or None where the embedding is used."""
    params = {k: v for k, v in params.items()}
    stream = [np.array(params["embedding"][t], np.float64) for t in tokens]
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    for n in range(len(attention["norm"])):
        part = {k: np.array(v[n], np.float64) for k, v in attention.items()}
        heads, kv_heads = part["query"].shape[1], part["key"].shape[1]
        keys, values = [], []
        for position, x in enumerate(stream):
            y = norm(x, part["norm"], eps)
            keys.append([rotate(head_of(part, "key", y, k, eps), position, frequencies)
                         for k in range(kv_heads)])
            values.append([head_of(part, "value", y, k, eps) for k in range(kv_heads)])
            total = np.zeros_like(x)
            for h in range(heads):
                query = rotate(head_of(part, "query", y, h, eps), position, frequencies)
                k = h * kv_heads // heads
                scores = np.array([query @ key[k] for key in keys]) / math.sqrt(len(query))
                mass = np.exp(scores - scores.max())
                mixed = sum(m * value[k] for m, value in zip(mass / mass.sum(), values))
                total += mixed @ part["out"][h]
            stream[position] = x + total
        part = {k: np.array(v[n], np.float64) for k, v in mlp.items()}
        for position, x in enumerate(stream):
            y = norm(x, part["norm"], eps)
            gate = y @ part["gate"]
            stream[position] = x + (gate / (1 + np.exp(-gate)) * (y @ part["up"])) @ part["down"]
    kernel = np.array(params["embedding"], np.float64).T if head is None else np.array(head, "f8")
    return np.array([norm(x, np.array(params["norm"], "f8"), eps) @ kernel for x in stream])
