"""What the decoder has to compute and to read, counted from its shape: the work of a roofline.

Products only (norms, rotations and the softmax are left out); a multiply and an add are two
operations. Recomputation in the backward pass is not counted: it is no progress.
"""

import numpy as np

from dapo_jax.models.spec import ModelSpec


def block_parameters(spec: ModelSpec) -> int:
    """Parameters of the matrices of all blocks."""
    heads = 2 * spec.heads * spec.head_size + 2 * spec.kv_heads * spec.head_size
    return spec.layers * spec.d_model * (heads + 3 * spec.ff)


def forward(spec: ModelSpec, *, tokens: int, keys: int, logits: int) -> float:
    """Operations to run `tokens` tokens that see `keys` keys in all and need `logits` logits.

    `keys` is the sum over tokens of the keys that each attends to (a sliding window is not taken
    off).
    """
    attention = 2 * spec.layers * spec.heads * spec.head_size
    return 2.0 * (block_parameters(spec) * tokens + attention * keys
                  + spec.d_model * spec.vocab * logits)


def rollout(spec: ModelSpec, prompts: np.ndarray, lengths: np.ndarray) -> float:
    """Operations to sample completions of `lengths` i64[n, G] after prompts of `prompts` i64[n]
    tokens, each prompt run once. The last token of a completion is never run."""
    run = np.maximum(lengths - 1, 0)
    keys = np.sum(prompts * (prompts + 1) // 2)
    keys += np.sum(run * prompts[:, None] + run * (run + 1) // 2)
    return forward(spec, tokens=int(prompts.sum() + run.sum()), keys=int(keys),
                   logits=int(len(prompts) + run.sum()))


def update(spec: ModelSpec, prompts: np.ndarray, lengths: np.ndarray) -> float:
    """Operations of a gradient over the same completions: a forward and twice as much back. The
    logits exist at each token of a completion."""
    more = lengths.sum() - (len(prompts) + np.maximum(lengths - 1, 0).sum())
    return 3 * (rollout(spec, prompts, lengths) + 2.0 * spec.d_model * spec.vocab * float(more))


def cache_bytes(spec: ModelSpec, tokens: int, *, bytes_per_number: int) -> int:
    """Bytes of the keys and values of `tokens` tokens."""
    return 2 * spec.layers * spec.kv_heads * spec.head_size * tokens * bytes_per_number


def decode_bytes(spec: ModelSpec, *, slots: float, rows: float, prompt: int, mean_tokens: float,
                 bytes_per_number: int) -> float:
    """Bytes that one decode step has to read: weights, the prompts' keys and values once a slot,
    and of `rows` live rows in all what they wrote so far (`mean_tokens` each)."""
    weights = (block_parameters(spec) + spec.d_model * spec.vocab) * bytes_per_number
    held = slots * prompt + rows * mean_tokens
    return weights + cache_bytes(spec, 1, bytes_per_number=bytes_per_number) * held
