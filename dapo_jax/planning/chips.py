"""The accelerators that can be planned for: what their makers publish, and the slices there are."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from dapo_jax import config
from dapo_jax.runtime import mesh as mesh_lib

GB, GIB = 10 ** 9, 2 ** 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one chip; rates are peaks, links count what one chip sends."""

    name: str
    memory: int  # bytes
    flops: float  # a second, dense bfloat16
    hbm: float  # bytes a second
    link: float  # bytes a second, one way, to the other chips of its slice or, GPU, of its node
    network: float  # bytes a second, one way, beyond the node; TPU: `link`
    node: int  # chips that `link` joins; 0: all of a slice
    source: str  # where the figures come from
    slices: Mapping[int, str] = dataclasses.field(default_factory=dict)  # chips -> topology
    link_name: str = "ICI"


def _cubes(most: int) -> dict[int, str]:
    """Topologies of the three-dimensional tori, a common one for each number of chips."""
    shapes = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
    return {size: shape for shape in shapes if (size := math.prod(_sizes(shape))) <= most}


def _squares() -> dict[int, str]:
    shapes = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
    return {math.prod(_sizes(shape)): shape for shape in shapes}


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split("x")]


_CLOUD = "cloud.google.com/tpu/docs/"  # its links in bits a second, of all of a chip's ports
_NVIDIA = "NVIDIA data sheets: "  # NVLink both ways together there: half of it here
CHIPS = {chip.name: chip for chip in (
    Chip("v4", 32 * GIB, 275e12, 1200e9, 300e9, 300e9, 0, _CLOUD + "v4", _cubes(1024)),
    Chip("v5e", 16 * GIB, 197e12, 819e9, 200e9, 200e9, 0, _CLOUD + "v5e", _squares()),
    Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, 600e9, 0, _CLOUD + "v5p", _cubes(1024)),
    Chip("v6e", 32 * GIB, 918e12, 1640e9, 400e9, 400e9, 0, _CLOUD + "v6e", _squares()),
    Chip("a100", 80 * GB, 312e12, 2039e9, 300e9, 25e9, 8, _NVIDIA + "A100 80GB SXM (NVLink 600 "
         "GB/s); DGX A100 (8 GPUs, an adapter of 200 Gb/s each)", link_name="NVLink"),
    Chip("h100", 80 * GB, 989e12, 3350e9, 450e9, 50e9, 8, _NVIDIA + "H100 SXM (NVLink 900 GB/s); "
         "DGX H100 (8 GPUs, an adapter of 400 Gb/s each)", link_name="NVLink"),
    Chip("h200", 141 * GB, 989e12, 4800e9, 450e9, 50e9, 8, _NVIDIA + "H200 SXM (NVLink 900 GB/s); "
         "DGX H200 (8 GPUs, an adapter of 400 Gb/s each)", link_name="NVLink"),
)}


def find(name: str) -> Chip:
    """The chip of that name; ConfigError names those that are known."""
    if name.lower() not in CHIPS:
        raise config.ConfigError(f"--chip={name}: known are {', '.join(CHIPS)}"
                                 f"{config.near(name, CHIPS)}")
    return CHIPS[name.lower()]


# What JAX calls them. Cards of the same name with other rates (PCIe, NVL) are left out.
KINDS = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
         "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
         "TPU v6 lite": "v6e", "TPU v6e": "v6e"}


def of_device(device: jax.Device) -> Chip | None:
    """The chip that a device is; None where its figures are not known."""
    return CHIPS.get(KINDS.get(device.device_kind, ""))


def mesh_shape(text: str) -> config.Mesh:
    """The mesh that a text such as "data:16,fsdp:16" names; axes left out are 1."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition(":")
        if axis not in mesh_lib.AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise config.ConfigError(
                f"--mesh={text}: {part.strip()!r} is not AXIS:SIZE with one of "
                f"{', '.join(mesh_lib.AXES)}, each named once, and a size from 1; such as "
                "--mesh=data:16,fsdp:16")
        sizes[axis] = int(size)
    return config.Mesh(**{axis: sizes.get(axis, 1) for axis in mesh_lib.AXES})


def topology(chip: Chip, mesh: config.Mesh) -> str:
    """The name of the slice that the mesh fills, such as v5p:4x8x8; "128 x h100" of GPUs.

    ConfigError where there is no slice of so many chips.
    """
    count = mesh.data * mesh.fsdp * mesh.tensor
    if count < 1:
        raise config.ConfigError(f"config.mesh.data = {mesh.data}: a plan needs a number; give "
                                 "--mesh=data:...,fsdp:...,tensor:...")
    if not chip.slices:
        if count > chip.node and count % chip.node:
            raise config.ConfigError(
                f"the mesh has {count} devices, which do not fill nodes of {chip.node} {chip.name}")
        return f"{count} x {chip.name}"
    if count not in chip.slices:
        known = ", ".join(f"{size} ({shape})" for size, shape in chip.slices.items())
        raise config.ConfigError(
            f"the mesh {mesh.data} x {mesh.fsdp} x {mesh.tensor} (data x fsdp x tensor) has "
            f"{count} devices, and there is no slice of {count} {chip.name}; there are {known}")
    return f"{chip.name}:{chip.slices[count]}"


def sampler_mesh(cfg: config.Config, trained: config.Mesh) -> config.Mesh:
    """How the sampler splits the devices of the trainer's mesh; ConfigError where it has another
    number of them."""
    sizes = cfg.rollout.mesh
    if not sizes:
        return trained
    count = trained.data * trained.fsdp * trained.tensor
    if math.prod(sizes) != count:
        raise config.ConfigError(
            f"config.rollout.mesh = {tuple(sizes)} is for {math.prod(sizes)} devices, but the mesh "
            f"has {count}: a sampler splits the same devices in another way")
    return config.Mesh(*sizes)


def shape_only(mesh: config.Mesh) -> jax.sharding.AbstractMesh:
    """A mesh without devices, which says how arrays are split."""
    return jax.sharding.AbstractMesh((mesh.data, mesh.fsdp, mesh.tensor), mesh_lib.AXES)
