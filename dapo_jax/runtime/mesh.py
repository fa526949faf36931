"""The only seam between host and device: the mesh, its shardings, `put` and `fetch`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dapo_jax import config, types
from dapo_jax.models import lora, transformer
from dapo_jax.models.spec import ModelSpec

AnyMesh = Mesh | AbstractMesh  # of devices, or of their numbers alone
AXES = ("data", "fsdp", "tensor")
# Logical axis of a parameter -> mesh axis; anything else is not split.
RULES = {"embed": "fsdp", "heads": "tensor", "ff": "tensor", "vocab": "tensor"}


def make(cfg: config.Mesh, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of the configured shape over the first devices there are, some of every process."""
    here = jax.devices() if devices is None else []
    devices = devices or here
    rest = cfg.fsdp * cfg.tensor
    data = len(devices) // rest if cfg.data == -1 else cfg.data
    count = data * rest
    if not 1 <= count <= len(devices):
        raise config.ConfigError(
            f"config.mesh asks for {cfg.data} x {cfg.fsdp} x {cfg.tensor} devices "
            f"(data x fsdp x tensor); {len(devices)} are here")
    if idle := {one.process_index for one in here} - {one.process_index for one in devices[:count]}:
        raise config.ConfigError(
            f"config.mesh takes the first {count} of {len(devices)} devices, and none of process "
            f"{', '.join(map(str, sorted(idle)))}: take all devices, or start fewer processes")
    return Mesh(np.asarray(devices[:count]).reshape(data, cfg.fsdp, cfg.tensor), AXES)


def resplit(mesh: Mesh, sizes: Sequence[int]) -> Mesh:
    """The same devices in the same order as another (data, fsdp, tensor); the mesh itself if () is
    given. ConfigError where that takes another number of devices."""
    if not sizes:
        return mesh
    if math.prod(sizes) != mesh.size:
        raise config.ConfigError(
            f"config.rollout.mesh = {tuple(sizes)} is for {math.prod(sizes)} devices, but "
            f"config.mesh has {mesh.size}: a sampler splits the same devices in another way")
    return Mesh(mesh.devices.reshape(*sizes), AXES)


def batch_parts(mesh: AnyMesh) -> int:
    """Number of pieces the slots of a batch are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def own_parts(mesh: AnyMesh) -> tuple[int, ...] | None:
    """Which of these pieces devices of this process hold; None: it is the only process."""
    if jax.process_count() == 1 or isinstance(mesh, AbstractMesh):
        return None
    owners = [{device.process_index for device in piece}
              for piece in mesh.devices.reshape(batch_parts(mesh), -1)]
    return tuple(part for part, here in enumerate(owners) if jax.process_index() in here)


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Slots, the first axis, over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: AnyMesh, spec: ModelSpec) -> types.Tree:
    """A sharding for every parameter; an axis that its mesh axis does not divide stays whole."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return tree_shardings(mesh, shapes, transformer.logical_axes(spec))


def tree_shardings(mesh: AnyMesh, shapes: types.Tree, names: types.Tree) -> types.Tree:
    """A sharding for every leaf of `shapes` from its axes' logical names, such as an adapter's."""
    return jax.tree.map(lambda leaf, axes: _param_sharding(mesh, leaf.shape, axes), shapes, names)


def model_structs(mesh: AnyMesh, spec: ModelSpec) -> types.Tree:
    """Shapes and shardings of the model's parameters."""
    shapes = jax.eval_shape(lambda: transformer.init(spec, jax.random.key(0)))
    return structs(shapes, param_shardings(mesh, spec))


def trained_structs(mesh: AnyMesh, spec: ModelSpec, adapter: config.Lora) -> types.Tree:
    """Shapes and shardings of what an update changes: the adapter or, of rank 0, all parameters."""
    if not adapter.rank:
        return model_structs(mesh, spec)
    shapes = jax.eval_shape(lambda: lora.init(spec, adapter, jax.random.key(0)))
    return structs(shapes, tree_shardings(mesh, shapes, lora.logical_axes(spec, adapter)))


def _param_sharding(mesh: AnyMesh, shape: tuple[int, ...], axes: tuple[str, ...]) -> NamedSharding:
    parts = (RULES.get(axis) for axis in axes)
    return NamedSharding(mesh, PartitionSpec(*(
        part if part and size % mesh.shape[part] == 0 else None
        for size, part in zip(shape, parts, strict=True))))


def unsplit(mesh: AnyMesh, spec: ModelSpec) -> list[str]:
    """For each axis of the mesh that leaves a hundredth or more of the parameters that it is there
    to split whole, since it divides no axis of theirs, a sentence that says how much and names the
    largest."""
    structs = jax.tree_util.tree_leaves_with_path(model_structs(mesh, spec))
    names = jax.tree.leaves(transformer.logical_axes(spec), is_leaf=lambda x: isinstance(x, tuple))
    said = []
    for axis in (one for one in AXES if mesh.shape[one] > 1):
        meant = [(leaf.size, axis in leaf.sharding.spec, path)
                 for (path, leaf), axes in zip(structs, names, strict=True)
                 if axis in map(RULES.get, axes)]
        left = [(size, path) for size, split, path in meant if not split]
        share = sum(size for size, _ in left) / max(1, sum(size for size, *_ in meant))
        if share >= 0.01:
            largest = jax.tree_util.keystr(max(left, key=lambda one: one[0])[1], simple=True,
                                           separator=".")
            said.append(f"mesh.{axis} = {mesh.shape[axis]} does not divide {share:.0%} of the "
                        f"parameters that it is there to split ({largest} is the largest): each "
                        "device holds them whole")
    return said


def like_params(mesh: AnyMesh, params_shardings: types.Tree, tree: types.Tree) -> types.Tree:
    """Shardings for a tree of shapes that holds copies of the parameters, such as an optimizer's
    state: a leaf whose path ends in a parameter's path, and whose shape such a split fits, is split
    as that parameter is; others, such as sums over its rows, are whole on every device."""
    flat = {_path(path): sharding
            for path, sharding in jax.tree_util.tree_leaves_with_path(params_shardings)}
    depth = max(len(path) for path in flat)

    def choose(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = _path(path)
        for start in range(max(0, len(names) - depth), len(names)):
            if names[start:] in flat and _fits(leaf.shape, flat[names[start:]]):
                return flat[names[start:]]
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(choose, tree)


def _fits(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    return len(shape) == len(sharding.spec) and all(
        part is None or size % sharding.mesh.shape[part] == 0
        for size, part in zip(shape, sharding.spec))


def _path(path: tuple) -> tuple[str, ...]:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def put(tree: types.Tree, sharding: types.Tree) -> types.Tree:
    """Host arrays to the device, in one call. Each process gives the whole arrays, and the same."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    with jax.transfer_guard("allow"):  # it is asked for, as device_put is
        return jax.tree.map(_spread, tree, sharding)


def _spread(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Of several processes, each puts its own part: device_put would compare the whole arrays."""
    if isinstance(leaf, jax.Array):
        return leaf
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def fetch(tree: types.Tree) -> types.Tree:
    """Device arrays to the host, in one call; waits for them. Of several processes each must be
    able to see the whole arrays."""
    return jax.device_get(tree)


def ready(tree: types.Tree) -> bool:
    """Whether `fetch` would have nothing to wait for."""
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)  # jax gives it no type


def structs(tree: types.Tree, shardings: types.Tree) -> types.Tree:
    """Shapes with shardings, for compiling ahead of the data."""
    if isinstance(shardings, NamedSharding):
        sharding = shardings
        shardings = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        tree, shardings)


Build = Callable[..., Any]  # like `compiled`


def compiled(function: jax.stages.Wrapped, mesh: Mesh, *arguments: types.Tree
             ) -> jax.stages.Compiled:
    """A jitted function compiled for arguments of these shapes and shardings; the mesh is known
    inside, to parts that the compiler does not split by itself."""
    with jax.set_mesh(mesh):
        return function.lower(*arguments).compile()


def check_divides(mesh: AnyMesh, numbers: tuple[int, ...], name: str) -> None:
    """Refuse numbers of slots that the mesh cannot split evenly."""
    parts = batch_parts(mesh)
    bad = [number for number in numbers if number % parts]
    if bad:
        raise config.ConfigError(
            f"config.{name} holds {', '.join(map(str, bad))}; each must be a multiple of "
            f"data * fsdp = {parts} ({math.prod(mesh.devices.shape)} devices)")
