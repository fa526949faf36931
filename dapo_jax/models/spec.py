"""What a decoder is made of. Frozen and hashable: a static argument of every jitted function."""

import dataclasses

from dapo_jax import config


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotations (arXiv 2407.21783), or a plain division."""

    kind: str  # "linear" or "llama3"
    factor: float
    low_frequency: float = 1.0  # llama3 only, as the next two
    high_frequency: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Shape and options of one decoder."""

    vocab: int  # V
    layers: int  # N
    d_model: int  # D
    heads: int  # H
    kv_heads: int  # K, divides H
    head_size: int  # E, even
    ff: int  # F
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True
    compute_dtype: str = "float32"
    remat: bool = False


def from_scratch(model: config.Model, vocab: int, compute_dtype: str) -> ModelSpec:
    """The spec that the configuration's own numbers describe."""
    return ModelSpec(
        vocab=vocab, layers=model.layers, d_model=model.d_model, heads=model.heads,
        kv_heads=model.kv_heads, head_size=model.head_size, ff=model.ff,
        rope_base=model.rope_base, norm_eps=model.norm_eps, tied=model.tied,
        compute_dtype=compute_dtype, remat=model.remat)
