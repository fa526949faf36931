"""The small model that tests of device code share, and the data around it."""

import dataclasses
import functools

import jax
import numpy as np

from dapo_jax import config, types
from dapo_jax.models import head, transformer
from dapo_jax.models import spec as specs
from dapo_jax.rollout import draw
from dapo_jax.rollout import engine as engines
from dapo_jax.runtime import mesh as mesh_lib

SPEC = specs.ModelSpec(vocab=64, layers=2, d_model=32, heads=4, kv_heads=2, head_size=8, ff=48)
STOP = 2  # also the id that pads
ROWS, NEW = 4, 6


def params(spec=SPEC, seed=0):
    """Random parameters, norms and biases included, so that one left out is seen."""
    made = jax.jit(transformer.init, static_argnums=0)(spec, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def choose(path, leaf):
        if path[-1].key.endswith("norm"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        if path[-1].key.endswith("bias"):
            return rng.normal(size=leaf.shape).astype(leaf.dtype)
        return np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(choose, made)


def always(params, token):
    """Parameters that make one token certain: its embedding is the only long one."""
    table = np.zeros_like(params["embedding"])
    table[:] = 1.0
    table[token] = 50.0
    blocks = jax.tree.map(np.zeros_like, params["blocks"])
    return params | {"embedding": table, "blocks": blocks, "norm": np.ones_like(params["norm"])}


def gathered(spec, pieces):
    """The parameters on the host that pieces of files make up."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    tree = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), shapes)
    for piece in pieces:
        leaf = tree
        for key in piece.tensor.path:
            leaf = leaf[key]
        where = ... if piece.tensor.layer is None else piece.tensor.layer
        leaf[where] = piece.values.transpose(np.argsort(piece.tensor.order))
    return tree


def table(lengths=(4, 3, 7, 1, 5, 2, 6, 3), seed=0):
    """Prompts of mixed length; they hold the stop id too, as text may."""
    rng = np.random.default_rng(seed)
    return types.PromptTable(
        tokens=tuple(rng.integers(0, SPEC.vocab, n).astype(np.int32) for n in lengths),
        records=({"prompt": "", "answer": ""},) * len(lengths), demonstrations=())


def sampling(**changes):
    return dataclasses.replace(
        draw.Sampling(max_new_tokens=NEW, stop_ids=(STOP,), temperature=0.7), **changes)


def mesh(data=1, fsdp=1, tensor=1, devices=None):
    return mesh_lib.make(config.Mesh(data=data, fsdp=fsdp, tensor=tensor), devices)


def engine(spec=SPEC, how=None, *, on=None, **changes):
    options = {"rows": ROWS, "slots": (2, 4), "buckets": (8,)} | changes
    return engines.compile_engine(spec, how or sampling(), on or mesh(), **options)


@functools.partial(jax.jit, static_argnums=0)
def full_hidden(spec, tree, tokens):
    """Hidden states [B, L, D] of whole sequences i32[B, L], with no prompt and no cache: each is
    a row that continues a prompt of no tokens."""
    empty = np.zeros((spec.layers, len(tokens), spec.kv_heads, spec.head_size, 1), np.float32)
    cache = types.PromptCache(empty, empty.swapaxes(-1, -2), np.zeros(len(tokens), np.int32))
    return transformer.extend(spec, tree, tokens[:, None], cache)[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def full_logits(spec, tree, tokens):
    return head.logits(tree, full_hidden(spec, tree, tokens), softcap=spec.logit_softcap)


def plan(prompt, size, *, visit=0, group=None):
    prompt = np.array(prompt, np.int32)
    return types.Plan(prompt=prompt, visit=np.full(len(prompt), visit, np.int32),
                      group=np.arange(len(prompt), dtype=np.int32) if group is None
                      else np.array(group, np.int32),
                      size=np.broadcast_to(np.array(size, np.int32), prompt.shape))
