"""Write a safetensors file one tensor at a time, whole or not at all."""

import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", BFLOAT16: "BF16"}


def write(
    path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], values: Iterable[np.ndarray], *,
    dtype: npt.DTypeLike, metadata: Mapping[str, str],
) -> None:
    """Write tensors of one type, `values` in the order of `shapes`; the host holds one of them.

    The file appears under its name when it is complete and on the disk.
    """
    dtype = np.dtype(dtype)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_header(shapes, dtype, metadata))
            for (name, shape), value in zip(shapes.items(), values, strict=True):
                assert tuple(value.shape) == tuple(shape), (name, value.shape, shape)
                value = np.ascontiguousarray(value, dtype)
                file.write(value.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets only its owner read
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype,
            metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
