"""Low-rank adapters (arXiv 2106.09685) as pure functions on the parameter tree.

An adapter holds, for each matrix W that the patterns name, {"a", "b"}: [N, inputs..., r] and
[N, r, outputs...] in float32, where W is [N, inputs..., outputs...]. The adapted matrix is
W + alpha / r * A B. `merge` makes it, for sampling and export; `attach` leaves W alone and lets the
decoder compute y W + (y A) B, for training: no gradient of W is made or summed, and none is sent
between devices.
"""

import fnmatch
import math

import jax
import jax.numpy as jnp

from dapo_jax import config, types
from dapo_jax.models import families, transformer
from dapo_jax.models.spec import ModelSpec


def targets(spec: ModelSpec, patterns: tuple[str, ...]) -> dict[str, int]:
    """The matrices that the patterns name ("mlp.*", "attention.query"), each with the number of its
    input axes. ConfigError for a pattern that names none."""
    known = {".".join(tensor.path[1:]): tensor.inputs
             for tensor in families.tensors(spec, "hf").values() if tensor.layer == 0
             and tensor.inputs}
    chosen: dict[str, int] = {}
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            raise config.ConfigError(f"config.lora.patterns: {pattern!r} names no matrix of the "
                                     f"model; there are {', '.join(known)}")
        chosen |= {name: known[name] for name in found}
    return chosen


def check_rank(spec: ModelSpec, cfg: config.Lora) -> None:
    """ConfigError for a rank that none of the adapted matrices has room for."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))["blocks"]
    largest = 0
    for path, inputs in targets(spec, cfg.patterns).items():
        part, name = path.split(".")
        axes = shapes[part][name].shape[1:]
        largest = max(largest, min(math.prod(axes[:inputs]), math.prod(axes[inputs:])))
    if cfg.rank > largest:
        raise config.ConfigError(
            f"config.lora.rank = {cfg.rank} is more than the {largest} that the matrices of "
            f"config.lora.patterns = {cfg.patterns!r} can have, so that the adapter would be "
            "larger than they are: use a smaller rank, or 0 to train all parameters")


def init(spec: ModelSpec, cfg: config.Lora, key: jax.Array) -> types.Tree:
    """A new adapter, which changes nothing: A is uniform within the root of 1 / inputs, B is 0."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))["blocks"]
    adapter: types.Tree = {}
    for number, (path, inputs) in enumerate(sorted(targets(spec, cfg.patterns).items())):
        part, name = path.split(".")
        layers, *axes = shapes[part][name].shape
        bound = math.prod(axes[:inputs]) ** -0.5
        a = jax.random.uniform(jax.random.fold_in(key, number),
                               (layers, *axes[:inputs], cfg.rank), minval=-bound, maxval=bound)
        b = jnp.zeros((layers, cfg.rank, *axes[inputs:]), jnp.float32)
        adapter.setdefault("blocks", {}).setdefault(part, {})[name] = {"a": a, "b": b}
    return adapter


def logical_axes(spec: ModelSpec, cfg: config.Lora) -> types.Tree:
    """The adapter's tree with a tuple of logical axis names at each leaf, as transformer's."""
    names = transformer.logical_axes(spec)["blocks"]
    tree: types.Tree = {}
    for path, inputs in targets(spec, cfg.patterns).items():
        part, name = path.split(".")
        layers, *axes = names[part][name]
        tree.setdefault("blocks", {}).setdefault(part, {})[name] = {
            "a": (layers, *axes[:inputs], "rank"), "b": (layers, "rank", *axes[inputs:])}
    return tree


def attach(params: types.Tree, adapter: types.Tree, cfg: config.Lora) -> types.Tree:
    """Parameters that prompts and rows are run with; the sampler wants them merged."""
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * _scale(cfg) if path[-1].key == "b" else leaf, adapter)
    return params | {"lora": scaled}


def merge(params: types.Tree, adapter: types.Tree, cfg: config.Lora) -> types.Tree:
    """Parameters with the adapter added in, in the parameters' own types."""
    blocks = {part: dict(matrices) for part, matrices in params["blocks"].items()}
    for part, matrices in adapter["blocks"].items():
        for name, pair in matrices.items():
            matrix = blocks[part][name]
            # A layer at a time: the sum is wider than a bfloat16 matrix.
            blocks[part][name] = jax.lax.map(
                lambda layer: _added(layer[0], layer[1], layer[2], cfg),
                (matrix, pair["a"], pair["b"]))
    return params | {"blocks": blocks}


def _added(matrix: jax.Array, a: jax.Array, b: jax.Array, cfg: config.Lora) -> jax.Array:
    low = jnp.matmul(a.reshape(-1, cfg.rank), b.reshape(cfg.rank, -1))
    return (matrix + _scale(cfg) * low.reshape(matrix.shape)).astype(matrix.dtype)


def _scale(cfg: config.Lora) -> float:
    return cfg.alpha / cfg.rank
