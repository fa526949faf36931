"""A Hugging Face folder: config.json and safetensors, one file or several with an index."""

import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  teaches numpy bfloat16, which safetensors asks it for
import numpy as np
import safetensors

from dapo_jax import config
from dapo_jax.models import families, hf_config, layers
from dapo_jax.models.spec import ModelSpec

LOG = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = ("BF16", "F16", "F32")
# Older Llama folders carry the frequencies of each layer, which follow from config.json.
_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder holds, its tensors not yet read."""

    path: pathlib.Path
    values: Mapping[str, Any]  # config.json
    shapes: Mapping[str, tuple[int, ...]]  # by name of tensor
    files: Mapping[str, tuple[str, ...]]  # file -> names of its tensors


def open(path: pathlib.Path) -> Folder:
    """Read config.json and the headers of every weight file; ConfigError names what is wrong."""
    if not path.is_dir():
        raise config.ConfigError(f"config.model.path = {path}: there is no such folder")
    values = json_file(path / "config.json")
    names = _weight_files(path)
    shapes: dict[str, tuple[int, ...]] = {}
    files = {}
    for name in sorted(set(names.values())) if names else [SINGLE]:
        found = _header(path / name)
        twice = shapes.keys() & found.keys()
        if twice:
            raise config.ConfigError(f"{path / name}: {sorted(twice)} stand in another file too")
        shapes |= found
        files[name] = tuple(found)
    place = {tensor: name for name, tensors in files.items() for tensor in tensors}
    wrong = sorted(tensor for tensor in names if place.get(tensor) != names[tensor])
    if wrong or (names and place.keys() - names.keys()):
        raise config.ConfigError(
            f"{path / INDEX}: does not fit the files: misplaced or absent {wrong}, not listed "
            f"{sorted(place.keys() - names.keys())}")
    return Folder(path, values, shapes, files)


def json_file(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; ConfigError names the file that is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise config.ConfigError(f"{path}: there is no such file; a model folder has one") from None
    except (OSError, ValueError) as error:
        raise config.ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise config.ConfigError(f"{path}: holds {type(values).__name__}, not an object")
    return values


def _weight_files(path: pathlib.Path) -> dict[str, str]:
    """Tensor -> file from the index; {} if there is a single file."""
    if (path / SINGLE).exists():
        return {}
    if not (path / INDEX).exists():
        others = sorted(f.name for f in path.iterdir()
                        if f.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf", ".msgpack"))
        raise config.ConfigError(
            f"{path}: no weights: there is neither {SINGLE} nor {INDEX}"
            + (f"; {others} are not read (pickles may run code), convert them" if others else ""))
    names = json_file(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise config.ConfigError(f"{path / INDEX}: weight_map is missing or empty")
    outside = sorted({name for name in names.values() if pathlib.Path(str(name)).name != name})
    if outside:
        raise config.ConfigError(f"{path / INDEX}: {outside} are not names of files beside it")
    return names


def _header(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, part in parts.items():
            if part.get_dtype() not in _TYPES:
                raise config.ConfigError(f"{path}: tensor {name} is {part.get_dtype()}; only "
                                         f"{', '.join(_TYPES)} are supported")
        return {name: tuple(part.get_shape()) for name, part in parts.items()}


def _opened(path: pathlib.Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, "numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise config.ConfigError(f"{path}: not a whole safetensors file ({error}); copy or "
                                 "download it again") from error


# ----------------------------------------------------------------------------------------- the use


def spec(folder: Folder, **chosen: object) -> ModelSpec:
    """The decoder that config.json describes, its tensors checked: each has a place and each
    parameter a tensor, all of the right shape."""
    result = hf_config.read(folder.values, path=folder.path / "config.json", **chosen)
    families.check(families.tensors(result, "hf"), folder.shapes, where=folder.path,
                   family=result.family, allowed=_spare(folder, result))
    return result


def _spare(folder: Folder, spec: ModelSpec) -> set[str]:
    """Tensors that repeat what is known, and are compared with it when they are read."""
    spare = {name for name in folder.shapes if _FREQUENCIES.fullmatch(name)}
    return spare | ({_HEAD} & folder.shapes.keys() if spec.tied else set())


def pieces(folder: Folder, spec: ModelSpec) -> Iterator[families.Piece]:
    """Every tensor in turn, in its own type; one file is open at a time."""
    wanted = families.tensors(spec, "hf")
    for name, tensors in folder.files.items():
        path = folder.path / name
        with _opened(path) as file:
            for tensor in tensors:
                if tensor in wanted:  # no name holds the values: the caller lets go of them
                    yield families.Piece(
                        wanted[tensor], wanted[tensor].split(file.get_tensor(tensor)))
                elif tensor == _HEAD:
                    _compare_head(folder, file.get_tensor(tensor))
                else:
                    _compare_frequencies(path, tensor, file.get_tensor(tensor), spec)


def _compare_head(folder: Folder, head: np.ndarray) -> None:
    """A tied model's second copy of the embedding is not used; say so if it is no copy."""
    name = "model.embed_tokens.weight"
    place = next(file for file, tensors in folder.files.items() if name in tensors)
    with _opened(folder.path / place) as file:
        if not np.array_equal(file.get_tensor(name), head):
            LOG.warning("%s: %s differs from %s and is left out, because tie_word_embeddings is "
                        "true", folder.path, _HEAD, name)


def _compare_frequencies(
    path: pathlib.Path, tensor: str, values: np.ndarray, spec: ModelSpec
) -> None:
    expected = layers.rope_frequencies(spec)
    if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-2):
        raise config.ConfigError(f"{path}: {tensor} is not what config.json's rope_theta gives")
