"""A cache of dequantised GGUF files, by content: parsing one takes seconds, this none.

It lies in DAPO_JAX_CACHE, else in XDG_CACHE_HOME/dapo_jax, else in ~/.cache/dapo_jax. Anything in
it may be deleted at any time; set DAPO_JAX_CACHE to nothing to do without.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors

from dapo_jax.models import safetensors_file

LOG = logging.getLogger(__name__)
FORMAT = 1  # raise it when what is stored changes
LARGEST = 8 * 2 ** 30  # bytes; beyond, a second copy of the model costs more than it gives
_METADATA = "gguf"


@dataclasses.dataclass(frozen=True)
class Store:
    """The converted file: what gguf.File needs."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def key(path: pathlib.Path) -> str:
    """A name for the file's content as this version converts it."""
    version = f"{FORMAT} {importlib.metadata.version('gguf')}"
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(version.encode()))
    return digest.hexdigest()[:40]


def _path(name: str) -> pathlib.Path | None:
    given = os.environ.get("DAPO_JAX_CACHE")
    if given == "":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(given) if given else pathlib.Path(base) / "dapo_jax"
    return folder / "gguf" / f"{name}.safetensors"


def load(name: str) -> Store | None:
    """What was saved under a key; None, with a message, if it is broken."""
    path = _path(name)
    if path is None or not path.exists():
        return None
    try:
        file = safetensors.safe_open(path, "numpy")
        metadata = json.loads(file.metadata()[_METADATA])
        shapes = {tensor: tuple(file.get_slice(tensor).get_shape())
                  for tensor in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        LOG.warning("%s: the converted file is broken (%s); converting again", path, error)
        return None
    return Store(metadata, shapes, file.get_tensor)


def save(
    name: str, *, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray], source: pathlib.Path,
) -> Store | None:
    """Convert and store; None, with a message, where that cannot be."""
    path = _path(name)
    if path is None or 4 * sum(math.prod(shape) for shape in shapes.values()) > LARGEST:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors_file.write(path, shapes, map(read, shapes), dtype=np.float32,
                               metadata={_METADATA: json.dumps(metadata)})
    except OSError as error:
        LOG.warning("%s: what was converted from %s cannot be kept: %s", path, source, error)
        return None
    return load(name)
