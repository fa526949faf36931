"""Shapes of known models by name, for random weights of a real size."""

from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax import config
from dapo_jax.models import families
from dapo_jax.models.spec import ModelSpec, RopeScaling


def spec(name: str, **chosen: Any) -> ModelSpec:
    """The shape of a known model; `chosen` are fields of the spec that a name does not decide.
    ConfigError names what is known."""
    if name not in PRESETS:
        raise config.ConfigError(f"config.model.preset is {name!r}; known are "
                                 f"{', '.join(PRESETS)}{config.near(name, PRESETS)}")
    make, numbers = PRESETS[name]
    layers, d_model, ff, heads, kv_heads, head_size, *more = numbers
    return make(*more, layers=layers, d_model=d_model, ff=ff, heads=heads, kv_heads=kv_heads,
                head_size=head_size, **chosen)


def _qwen2(tied: bool, vocab: int, **shape: Any) -> ModelSpec:
    return ModelSpec(vocab=vocab, family="qwen2", context=32768, tied=tied, norm_eps=1e-6,
                     rope_base=1e6, **families.FAMILIES["qwen2"].features, **shape)


def _qwen3(tied: bool, **shape: Any) -> ModelSpec:
    return ModelSpec(vocab=151936, family="qwen3", context=40960, tied=tied, norm_eps=1e-6,
                     rope_base=1e6, **families.FAMILIES["qwen3"].features, **shape)


def _llama3(tied: bool, factor: float, **shape: Any) -> ModelSpec:
    return ModelSpec(vocab=128256, context=131072, tied=tied, norm_eps=1e-5, rope_base=5e5,
                     rope_scaling=RopeScaling("llama3", factor), **shape)


def _gemma3(
    vocab: int, window: int, scalar: float, factor: float, context: int, *, layers: int,
    **shape: Any,
) -> ModelSpec:
    scaling = RopeScaling("linear", factor) if factor != 1 else None
    family = families.FAMILIES["gemma3"]
    return ModelSpec(
        vocab=vocab, layers=layers, family="gemma3", context=context, norm_eps=1e-6,
        query_scalar=scalar, rope_base=1e6, rope_scaling=scaling, local_rope_base=1e4,
        sliding_window=window, sliding=families.sliding_layers(layers, family.period),
        **family.features, **shape)


# Layers, width, feed-forward width, heads, kv heads, head size; then what the maker asks for.
PRESETS: Mapping[str, tuple[Callable[..., ModelSpec], tuple]] = {
    "qwen2.5-0.5b": (_qwen2, (24, 896, 4864, 14, 2, 64, True, 151936)),
    "qwen2.5-1.5b": (_qwen2, (28, 1536, 8960, 12, 2, 128, True, 151936)),
    "qwen2.5-3b": (_qwen2, (36, 2048, 11008, 16, 2, 128, True, 151936)),
    "qwen2.5-7b": (_qwen2, (28, 3584, 18944, 28, 4, 128, False, 152064)),
    "qwen2.5-14b": (_qwen2, (48, 5120, 13824, 40, 8, 128, False, 152064)),
    "qwen2.5-32b": (_qwen2, (64, 5120, 27648, 40, 8, 128, False, 152064)),
    "qwen3-0.6b": (_qwen3, (28, 1024, 3072, 16, 8, 128, True)),
    "qwen3-1.7b": (_qwen3, (28, 2048, 6144, 16, 8, 128, True)),
    "qwen3-4b": (_qwen3, (36, 2560, 9728, 32, 8, 128, True)),
    "qwen3-8b": (_qwen3, (36, 4096, 12288, 32, 8, 128, False)),
    "qwen3-14b": (_qwen3, (40, 5120, 17408, 40, 8, 128, False)),
    "qwen3-32b": (_qwen3, (64, 5120, 25600, 64, 8, 128, False)),
    "llama3.2-1b": (_llama3, (16, 2048, 8192, 32, 8, 64, True, 32.0)),
    "llama3.2-3b": (_llama3, (28, 3072, 8192, 24, 8, 128, True, 32.0)),
    "llama3.1-8b": (_llama3, (32, 4096, 14336, 32, 8, 128, False, 8.0)),
    "llama3.1-70b": (_llama3, (80, 8192, 28672, 64, 8, 128, False, 8.0)),
    "gemma3-270m": (_gemma3, (18, 640, 2048, 4, 1, 256, 262144, 512, 256.0, 1.0, 32768)),
    "gemma3-1b": (_gemma3, (26, 1152, 6912, 4, 1, 256, 262144, 512, 256.0, 1.0, 32768)),
    "gemma3-4b": (_gemma3, (34, 2560, 10240, 8, 4, 256, 262208, 1024, 256.0, 8.0, 131072)),
    "gemma3-12b": (_gemma3, (48, 3840, 15360, 16, 8, 256, 262208, 1024, 256.0, 8.0, 131072)),
    "gemma3-27b": (_gemma3, (62, 5376, 21504, 32, 16, 128, 262208, 1024, 168.0, 8.0, 131072)),
}
