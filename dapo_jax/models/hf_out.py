"""Write a Hugging Face folder's weights and config.json, a tensor at a time."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dapo_jax import config, types
from dapo_jax.models import families, hf, safetensors_file
from dapo_jax.models.spec import ModelSpec

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16),
          "bfloat16": safetensors_file.BFLOAT16}
LARGEST = 4 * 2 ** 30  # bytes of a file, as others write them


def weights(
    folder: pathlib.Path, spec: ModelSpec, fetch: Callable[[families.Tensor], np.ndarray], *,
    dtype: str, largest: int = LARGEST,
) -> None:
    """Write every parameter; `fetch` gives a tensor's part of one, in the parameter's own order.

    One file, or several of at most `largest` bytes (or one tensor) with an index.
    """
    tensors = families.tensors(spec, "hf")
    size = DTYPES[dtype].itemsize
    groups = list(_groups(tensors, largest // size))
    names = [hf.SINGLE] if len(groups) == 1 else [
        f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups):
        # transformers refuses a file that does not say what it was written for.
        safetensors_file.write(
            folder / name, {n: tensors[n].file_shape for n in group},
            (tensors[n].flatten(fetch(tensors[n])) for n in group), dtype=DTYPES[dtype],
            metadata={"format": "pt"})
    if len(groups) > 1:
        total = size * sum(math.prod(tensor.shape) for tensor in tensors.values())
        places = {n: name for name, group in zip(names, groups) for n in group}
        json_file(folder / hf.INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def adapter(folder: pathlib.Path, spec: ModelSpec, tree: types.Tree, cfg: config.Lora, *,
            base: str, dtype: str = "float32") -> None:
    """Write a LoRA adapter (models/lora.py, host arrays) as PEFT reads it; `base` names the model
    that it adapts."""
    arrays = {}
    for name, tensor in families.tensors(spec, "hf").items():
        part, leaf = tensor.path[-2:] if len(tensor.path) > 2 else ("", "")
        if leaf not in tree["blocks"].get(part, {}):
            continue
        pair, at = tree["blocks"][part][leaf], f"base_model.model.{name.removesuffix('.weight')}"
        arrays[f"{at}.lora_A.weight"] = pair["a"][tensor.layer].reshape(-1, cfg.rank).T
        arrays[f"{at}.lora_B.weight"] = pair["b"][tensor.layer].reshape(cfg.rank, -1).T
    safetensors_file.write(
        folder / "adapter_model.safetensors", {name: a.shape for name, a in arrays.items()},
        map(np.ascontiguousarray, arrays.values()), dtype=DTYPES[dtype],
        metadata={"format": "pt"})
    json_file(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": cfg.rank, "lora_alpha": cfg.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in arrays}),
        "fan_in_fan_out": False, "inference_mode": True})


def _groups(tensors: Mapping[str, families.Tensor], limit: int) -> Iterator[list[str]]:
    group: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(name)
        used += size
    yield group


def json_file(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Write JSON as such folders have it."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
