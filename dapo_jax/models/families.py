"""The families of models, and the names that their parameters go by in files. All of it is data:
reading and writing, in both formats, walk the same table."""

import dataclasses
import functools
import math
import pathlib
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dapo_jax import config
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one family have in common."""

    model_type: str  # in config.json
    architecture: str  # likewise, the class of the causal language model
    features: Mapping[str, Any]  # fields of ModelSpec
    head_size: int | None = None  # where config.json is silent; None: D / H
    tied: bool = False  # likewise
    period: int = 0  # of every so many layers the last is full and the others slide; 0: none


_GEMMA = {"post_norms": True, "unit_offset": True, "scale_embedding": True,
          "activation": "gelu_tanh"}
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", {}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {"qk_norm": True}, head_size=128),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _GEMMA, head_size=256, tied=True, period=2),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _GEMMA | {"qk_norm": True},
                     head_size=256, tied=True, period=6),
}


def sliding_layers(layers: int, period: int) -> tuple[bool, ...]:
    """Of every `period` layers the last is full."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


# ----------------------------------------------------------------------------------------- names


@dataclasses.dataclass(frozen=True)
class _Row:
    """A parameter and its names; {n} is the layer."""

    path: tuple[str, ...]
    hf: str
    gguf: str
    # Leading axes of the parameter that a linear map consumes, where files hold [out, in] with
    # the axes of each side merged. None: files hold the parameter as it is.
    inputs: int | None = None


def _attention(leaf: str, hf: str, gguf: str, inputs: int | None = None) -> _Row:
    return _Row(("blocks", "attention", leaf), f"model.layers.{{n}}.{hf}", f"blk.{{n}}.{gguf}",
                inputs)


def _mlp(leaf: str, hf: str, gguf: str, inputs: int | None = None) -> _Row:
    return dataclasses.replace(_attention(leaf, hf, gguf, inputs), path=("blocks", "mlp", leaf))


_ROWS = (
    _Row(("embedding",), "model.embed_tokens.weight", "token_embd.weight"),
    _attention("norm", "input_layernorm.weight", "attn_norm.weight"),
    _attention("query", "self_attn.q_proj.weight", "attn_q.weight", 1),
    _attention("key", "self_attn.k_proj.weight", "attn_k.weight", 1),
    _attention("value", "self_attn.v_proj.weight", "attn_v.weight", 1),
    _attention("query_bias", "self_attn.q_proj.bias", "attn_q.bias", 0),
    _attention("key_bias", "self_attn.k_proj.bias", "attn_k.bias", 0),
    _attention("value_bias", "self_attn.v_proj.bias", "attn_v.bias", 0),
    _attention("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    _attention("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    _attention("out", "self_attn.o_proj.weight", "attn_output.weight", 2),
    _mlp("gate", "mlp.gate_proj.weight", "ffn_gate.weight", 1),
    _mlp("up", "mlp.up_proj.weight", "ffn_up.weight", 1),
    _mlp("down", "mlp.down_proj.weight", "ffn_down.weight", 1),
    _Row(("norm",), "model.norm.weight", "output_norm.weight"),
    _Row(("head",), "lm_head.weight", "output.weight", 1),
)
# One name, `post_attention_layernorm`, means two things.
_PLAIN = (_mlp("norm", "post_attention_layernorm.weight", "ffn_norm.weight"),)
_POST = (
    _attention("post_norm", "post_attention_layernorm.weight", "post_attention_norm.weight"),
    _mlp("norm", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    _mlp("post_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file and the parameter, or a layer's part of one, that it holds."""

    path: tuple[str, ...]
    layer: int | None  # None: the whole parameter
    shape: tuple[int, ...]  # of that parameter or part
    inputs: int | None  # see _Row

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        if self.inputs is None:
            return self.shape
        outputs = math.prod(self.shape[self.inputs:])
        return (outputs, math.prod(self.shape[:self.inputs])) if self.inputs else (outputs,)

    @property
    def order(self) -> tuple[int, ...]:
        """For each axis in the file's order (merged ones apart), its place in `shape`."""
        axes = tuple(range(len(self.shape)))
        return axes if self.inputs is None else axes[self.inputs:] + axes[:self.inputs]

    def split(self, values: np.ndarray) -> np.ndarray:
        """A file's values with merged axes apart, still in the file's order; a view."""
        return values.reshape([self.shape[axis] for axis in self.order])

    def arrange(self, values: np.ndarray) -> np.ndarray:
        """The part of the parameter that a file's values are; a view."""
        return self.split(values).transpose(np.argsort(self.order))

    def flatten(self, part: np.ndarray) -> np.ndarray:
        """The inverse of `arrange`; contiguous."""
        return np.ascontiguousarray(part.transpose(self.order).reshape(self.file_shape))


@functools.lru_cache(maxsize=8)
def tensors(spec: ModelSpec, naming: str) -> Mapping[str, Tensor]:
    """Every tensor that a model's file holds, by its name; `naming` is "hf" or "gguf"."""
    return types.MappingProxyType(dict(_tensors(spec, naming)))


def _tensors(spec: ModelSpec, naming: str) -> Iterator[tuple[str, Tensor]]:
    made = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    shapes = {tuple(key.key for key in path): leaf.shape
              for path, leaf in jax.tree_util.tree_leaves_with_path(made)}
    rows = {row.path: row for row in _ROWS + (_POST if spec.post_norms else _PLAIN)}
    for path in sorted(shapes, key=list(rows).index):
        row, shape = rows[path], shapes[path]
        if path[0] != "blocks":
            yield getattr(row, naming), Tensor(path, None, shape, row.inputs)
            continue
        for layer in range(spec.layers):
            name = getattr(row, naming).format(n=layer)
            yield name, Tensor(path, layer, shape[1:], row.inputs)


def check(
    wanted: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], *, where: pathlib.Path,
    family: str, allowed: Collection[str] = (),
) -> None:
    """ConfigError unless a file's tensors (name to shape) are those wanted, the optional `allowed`
    ones aside."""
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(found.keys() - wanted.keys() - set(allowed))
    if missing or extra:
        raise config.ConfigError(
            f"{where}: tensors that this {family} model needs and the file lacks: "
            f"{_listing(missing)}; tensors of the file that it has no place for: "
            f"{_listing(extra)}")
    for name, tensor in wanted.items():
        if tuple(found[name]) != tensor.file_shape:
            raise config.ConfigError(
                f"{where}: tensor {name} has shape {tuple(found[name])}, and {tensor.file_shape} "
                "is what the model's own description asks for")


def _listing(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Values on their way into a parameter."""

    tensor: Tensor
    values: np.ndarray  # as `Tensor.split` leaves them; bfloat16, float16 or float32
