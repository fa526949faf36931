"""Operations and bytes of a program, counted in what is given to the compiler, where each loop says
how often it runs; XLA's own analysis counts a loop's body once."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dapo_jax.planning import programs


@dataclasses.dataclass(frozen=True)
class Work:
    """Of all devices together. Products only: norms, rotations and the softmax are left out."""

    flops: float
    bytes: float  # of operands and results of the products, the least they have to move
    saved: tuple[Any, ...] = ()  # what blocks hand to their backward passes


def counted(program: programs.Program, *, layers: int = 0, causal: bool = True) -> Work:
    """The program's work; a loop without a fixed length counts once. `layers`: of its scan over so
    many blocks, what each leaves for its backward pass, all layers together. `causal`: whether
    kernels of attention leave out what no token sees."""
    with jax.sharding.use_abstract_mesh(_abstract(program)):
        jaxpr = jax.make_jaxpr(program.function)(*program.arguments)
    flops, moved = _sum(jaxpr.jaxpr, 1, causal)
    return Work(flops, moved, _left_by_blocks(jaxpr.jaxpr, layers) or ())


def _left_by_blocks(jaxpr: core.Jaxpr, layers: int) -> tuple[Any, ...] | None:
    """Results of the first scan of that length that are no carry; None where there is none."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "scan" and params["length"] == layers:
            return tuple(out.aval for out in equation.outvars[params["num_carry"]:])
        for inside, _ in times_of(equation.primitive.name, params):
            if (found := _left_by_blocks(inside, layers)) is not None:
                return found
    return None


def _abstract(program: programs.Program) -> jax.sharding.AbstractMesh:
    mesh = program.mesh
    return mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh


def _sum(jaxpr: core.Jaxpr, times: int, causal: bool) -> tuple[float, float]:
    flops = moved = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            one = _product(equation)
        elif name == "pallas_call":
            one = _kernel(equation, causal)
        else:
            parts = times_of(name, params)
            inner = [_sum(inside, repeats, causal) for inside, repeats in parts]
            one = (sum(part[0] for part in inner), sum(part[1] for part in inner))
        flops, moved = flops + times * one[0], moved + times * one[1]
    return flops, moved


def times_of(name: str, params: dict) -> Iterator[tuple[core.Jaxpr, int]]:
    """The programs inside an equation, and how often each runs; of branches, the first alone."""
    repeats = params.get("length", 1) if name == "scan" else 1
    if name == "shard_map":
        repeats = math.prod(params["mesh"].shape.values())
    values = list(params.values())
    if name == "cond":
        values = params["branches"][-1:]
    for value in values:
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value, repeats


def _shaped(variables: Sequence[Any]) -> list[Any]:
    """Shape and type of each: those of arrays, though a variable's type does not say so."""
    return [variable.aval for variable in variables]


def _product(equation: core.JaxprEqn) -> tuple[float, float]:
    left, right = _shaped(equation.invars)
    (contracted, _), _ = equation.params["dimension_numbers"]
    (out,) = _shaped(equation.outvars)
    flops = 2.0 * out.size * math.prod(left.shape[axis] for axis in contracted)
    return flops, float(sum(x.size * x.dtype.itemsize for x in (left, right, out)))


def _kernel(equation: core.JaxprEqn, causal: bool) -> tuple[float, float]:
    """An attention kernel over all its leading axes: products of queries x keys, of the causal ones
    half of a token's own keys; one for the scores and one for the mix, and five such products
    backward, half of them in each of its two kernels, which are given more than three arrays.

    The kernels are those of models/attention.py; a window is not taken off.
    """
    shapes = [one for one in _shaped(equation.invars)
              if len(one.shape) >= 3 and jnp.issubdtype(one.dtype, jnp.floating)]
    query, keys = shapes[0].shape, shapes[1].shape
    products = 2 if len(shapes) <= 3 else 2.5
    seen = keys[-2] - query[-2] / 2 if causal else keys[-2]
    scores = math.prod(query[:-2]) * query[-2] * seen
    moved = sum(x.size * x.dtype.itemsize for x in shapes)
    return 2.0 * products * scores * query[-1], float(moved)
