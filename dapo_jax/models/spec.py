"""What a decoder is made of. Frozen and hashable: a static argument of every jitted function."""

import dataclasses
from typing import Any

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
    family: str = "llama"  # whose names its weights go by outside (models/families.py)
    context: int = 2048  # tokens it was made for; only written out, nothing here is bound by it
    tied: bool = True  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False  # an RMSNorm of each head's query and key, before their rotation
    post_norms: bool = False  # an RMSNorm of each part's result too, before it is added
    unit_offset: bool = False  # norms scale by 1 + w
    norm_eps: float = 1e-5
    activation: str = "silu"  # or "gelu_tanh"
    scale_embedding: bool = False  # by the root of D
    query_scalar: float | None = None  # scores are divided by its root; None: E
    attention_softcap: float | None = None  # c * tanh(scores / c)
    logit_softcap: float | None = None
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # tokens that one in a sliding layer sees, itself included
    sliding: tuple[bool, ...] = ()  # a fact a layer; empty: no layer slides
    local_rope_base: float | None = None  # of sliding layers, never scaled; None: as the others
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"  # what the backward pass recomputes of a block; see transformer.REMAT
    attention: str = "xla"  # the implementation; see attention.py


def from_scratch(model: config.Model, vocab: int, **chosen: Any) -> ModelSpec:
    """The spec that the configuration's own numbers describe; `chosen` are further fields."""
    return ModelSpec(
        vocab=vocab, layers=model.layers, d_model=model.d_model, heads=model.heads,
        kv_heads=model.kv_heads, head_size=model.head_size, ff=model.ff,
        rope_base=model.rope_base, norm_eps=model.norm_eps, tied=model.tied, **chosen)
