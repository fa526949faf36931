"""GGUF files of a small Llama, and of any tensors."""

import gguf as package
import numpy as np


def source(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under GGUF names, linear maps [out, in], rotations in halves of a head."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (40, 32), "output_norm": (32,), "output": (40, 32)}
    for layer in range(2):
        block = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
                 "attn_output": (32, 32), "ffn_norm": (32,), "ffn_gate": (64, 32),
                 "ffn_up": (64, 32), "ffn_down": (32, 64)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()}


def paired(weight: np.ndarray, size: int = 8) -> np.ndarray:
    """llama.cpp's order of rows: rotation i of a head stands in its rows 2 i and 2 i + 1."""
    result = np.empty_like(weight)
    for head in range(0, len(weight), size):
        for i in range(size // 2):
            result[head + 2 * i] = weight[head + i]
            result[head + 2 * i + 1] = weight[head + size // 2 + i]
    return result


def write(path, tensors: dict[str, np.ndarray], architecture: str = "llama",
          kinds: dict | None = None, tokenizer: dict | None = None, **keys):
    """A GGUF file of `tensors`; `kinds` quantises some, `tokenizer` are keys of its vocabulary,
    `keys` changes metadata (None: without)."""
    writer = package.GGUFWriter(path, architecture)
    numbers = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 64,
               "attention__head_count": 4, "attention__head_count_kv": 2,
               "rope__dimension_count": 8, "rope__freq_base": 5000.0,
               "attention__layer_norm_rms_epsilon": 1e-6} | keys
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in numbers.items()}
    named |= {f"tokenizer.ggml.{key}": value for key, value in (tokenizer or {}).items()}
    for key, value in named.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array, type(None): lambda *_: None}[type(value)]
        add(key, value)
    for name, weight in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = paired(weight)
        kind = (kinds or {}).get(name)
        data = weight if kind is None else package.quants.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
