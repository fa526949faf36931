"""The real TPU compiler, for slices that are not here: bytes, operations and collectives of the
run's programs."""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax import config
from dapo_jax.planning import chips, collectives, programs
from dapo_jax.runtime import mesh as mesh_lib

# Fused with the products beside them, collectives could not be counted.
READABLE: dict[str, str | bool] = {"xla_tpu_enable_async_collective_fusion": "false"}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one compiled program, on each device."""

    arguments: int  # bytes
    temporary: int
    result: int  # of what it does not change in place
    flops: float  # as the compiler counts: the body of a loop once
    bytes: float
    sent: tuple[collectives.Collective, ...] | None = None  # None: not asked for, or not printable


def slice_mesh(chip: chips.Chip, shape: config.Mesh) -> Mesh:
    """The mesh over the chips of a slice; ConfigError where the compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise config.ConfigError(
            f"--chip={chip.name} is planned by the TPU compiler, which is not installed: "
            "pip install libtpu==0.0.52 (it needs no TPU), or plan for a GPU")
    # It asks a metadata server about the machine it runs on unless it is told.
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8",
                        "TPU_WORKER_HOSTNAMES": "localhost",
                        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies
    options = {"chip_config_name": "megacore"} if chip.name == "v4" else {}
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=chips.topology(chip, shape), **options)
    return mesh_lib.make(shape, list(found.devices))


def compiled(program: programs.Program, *, text: bool = False) -> Figures:
    """Figures of a program; `text`: its collectives too.

    Raises TooLarge where it does not fit the chip's memory.
    """
    assert isinstance(program.mesh, Mesh), "compiled only for a mesh of devices"
    try:
        with jax.set_mesh(program.mesh):
            made = program.function.lower(*program.arguments).compile(
                compiler_options=READABLE if text else None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TooLarge(str(error).splitlines()[0]) from error
        raise
    # For TPU there is an analysis of both, which their types leave open; a program that only moves
    # arrays has no operations there.
    memory: Any = made.memory_analysis()
    cost: Any = made.cost_analysis() or {}
    sent = _sent(made, program.mesh) if text else None
    return Figures(memory.argument_size_in_bytes, memory.temp_size_in_bytes,
                   memory.output_size_in_bytes - memory.alias_size_in_bytes,
                   cost.get("flops", 0.0), cost.get("bytes accessed", 0.0), sent)


def _sent(
    made: jax.stages.Compiled, mesh: mesh_lib.AnyMesh
) -> tuple[collectives.Collective, ...] | None:
    try:
        text = made.as_text()
        return None if text is None else collectives.found(text, dict(mesh.shape))
    except jax.errors.JaxRuntimeError:  # libtpu 0.0.52 cannot print some programs of large models
        return None


class TooLarge(Exception):
    """The compiler refused a program that needs more than the chip's memory."""


def by_layers(few: Figures, more: Figures, layers: tuple[int, int, int]) -> Figures:
    """Figures of a model of layers[2] layers from those of layers[0] and layers[1], for programs
    that write out each layer and so grow by the same with each."""
    a, b, n = layers

    def line(x: float, y: float) -> float:
        return x + (y - x) / (b - a) * (n - a)
    sent = None if few.sent is None or more.sent is None else tuple(
        collectives.by_layers(few.sent, more.sent, line))
    return Figures(
        int(line(few.arguments, more.arguments)), int(line(few.temporary, more.temporary)),
        int(line(few.result, more.result)), line(few.flops, more.flops),
        line(few.bytes, more.bytes), sent)
