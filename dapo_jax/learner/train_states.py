"""The state that updates change, and the shapes that their programs are compiled for."""

import jax
import jax.numpy as jnp

from dapo_jax import config, types
from dapo_jax.learner import optim, packing
from dapo_jax.models import transformer
from dapo_jax.models.spec import ModelSpec
from dapo_jax.runtime import mesh as mesh_lib


def batch_structs(mesh: mesh_lib.AnyMesh, pack: packing.PackShape, prompt: int, width: int
                  ) -> types.TrainBatch:
    """Shapes of one microbatch, as packed on the host."""
    def make(shape: tuple[int, ...], dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.batch_sharding(mesh))
    slots = packing.slots_of(pack, prompt, width)
    prompts, tokens = make((slots, prompt), jnp.int32), make((slots, pack.rows, width), jnp.int32)
    one = make(tokens.shape, jnp.float32)
    return types.TrainBatch(prompts, make((slots,), jnp.int32), tokens, one, one, one, one,
                            packed=types.Packed(prompts, tokens) if pack.packed else None)


def state_structs(spec: ModelSpec, optimizer: optim.Optimizer, mesh: mesh_lib.AnyMesh,
                  adapter: config.Lora = config.Lora()) -> types.TrainState:
    """Shapes and shardings of the train state."""
    params = mesh_lib.trained_structs(mesh, spec, adapter)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    state = jax.eval_shape(lambda tree: new_state(tree, optimizer), params)
    return types.TrainState(
        params,
        mesh_lib.structs(state.opt_state, mesh_lib.like_params(mesh, shardings, state.opt_state)),
        mesh_lib.structs(state.updates, mesh_lib.replicated(mesh)))


def reference_structs(spec: ModelSpec, mesh: mesh_lib.AnyMesh, adapter: config.Lora = config.Lora()
                      ) -> types.Tree:
    """Shapes and shardings of the reference model's parameters; see `reference_params`. Under an
    adapter they are those of its base, which is the reference unless another is asked for."""
    if adapter.rank:
        return mesh_lib.model_structs(mesh, spec)
    shapes = jax.eval_shape(
        lambda: reference_params(spec, transformer.init(spec, jax.random.key(0))))
    return mesh_lib.structs(shapes, mesh_lib.param_shardings(mesh, spec))


def reference_params(spec: ModelSpec, params: types.Tree) -> types.Tree:
    """A copy of the parameters whose kernels are in the compute dtype, as the model uses them;
    norms, which are computed in float32, stay as they are."""
    def held(path: tuple, leaf: jax.Array) -> jax.Array:
        # A copy: what jit hands through unchanged is the same buffer, and that one is donated.
        leaf, norm = jnp.copy(leaf), path[-1].key.endswith("norm")
        return leaf if norm else leaf.astype(spec.compute_dtype)
    return jax.tree_util.tree_map_with_path(held, params)


def new_state(params: types.Tree, optimizer: optim.Optimizer) -> types.TrainState:
    """The state before the first update."""
    return types.TrainState(params, optimizer.transform.init(params), jnp.int32(0))
