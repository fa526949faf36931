"""A run that does nothing but save: four processes that change a state, agree on it and write it.

    python tests/saving.py DIR ADDRESS INDEX STEPS

Restores what is in DIR, or begins. It leaves as a run does: 0 done, 143 after a signal, 2 where the
disk is full. DIR/steps has a line for each step, DIR/end.npz the state at the end.
"""

import dataclasses
import pathlib

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax import command_line, config, types
from dapo_jax.runtime import checkpoint, processes
from dapo_jax.runtime import mesh as mesh_lib

COUNT = 4


def rows(count):
    """Carried samples, another number of them at every step."""
    return types.Samples(**{name: np.full((count, *column.shape[1:]), count, column.dtype)
                            for name, column in vars(types.no_samples(5)).items()})


def fresh(mesh):
    """Parameters and moments of which each process holds a quarter, and host state."""
    rng, zero = np.random.default_rng(0), np.int32(0)
    split = NamedSharding(mesh, PartitionSpec("data"))
    params = {name: mesh_lib.put(rng.normal(size=(64, 64)).astype(np.float32), split)
              for name in ("w", "moment")}
    train = types.TrainState(params, (), mesh_lib.put(zero, mesh_lib.replicated(mesh)))
    order = types.EpochOrder(np.arange(4, dtype=np.int32), zero, zero)
    return types.RunState(train=train, controller=None, demonstrations=order, buffer=rows(0),
                          step=np.asarray(0, np.int32))


@jax.jit
def changed(train):
    """Every number, by itself and by how often it was changed."""
    number = train.updates + 1
    params = {name: leaf * np.float32(0.99) + number / 7 for name, leaf in train.params.items()}
    return types.TrainState(params, (), number)


def stepped(state, workdir):
    number = int(state.step) + 1
    if processes.main():
        try:
            with open(workdir / "steps", "a") as file:
                file.write(f"{number}\n")
        except OSError as error:
            raise config.ConfigError(f"{workdir} cannot be written: {error.strerror}") from error
    return dataclasses.replace(state, train=changed(state.train), buffer=rows(number % 3),
                               step=np.asarray(number, np.int32))


def agreed(state, signals):
    """The first signal that any process got, or 0; Parted if host states differ."""
    same = processes.digests(dataclasses.replace(state, train=None))
    found = processes.gather((same, signals[:1]), what=f"after step {int(state.step)}", seconds=60)
    processes.check_same([digests for digests, _ in found], where="here")
    return next((number for _, got in found for number in got), 0)


def write_end(state, workdir, mesh):
    whole = jax.jit(lambda tree: tree, out_shardings=mesh_lib.replicated(mesh))(state.train)
    if processes.main():
        np.savez(workdir / "end.npz", **whole.params, updates=whole.updates,
                 rows=state.buffer.tokens)


def main(arguments):
    try:
        return run(arguments)
    except config.ConfigError as error:
        processes.leave(error, seconds=10)
        raise


def run(arguments):
    workdir, address, index, steps = arguments
    workdir, number = pathlib.Path(workdir), 0
    processes.start(processes.Cluster("manual", address, COUNT, int(index), heartbeat_seconds=10,
                                      join_seconds=120))
    mesh = mesh_lib.make(config.Mesh(data=COUNT))
    with command_line.caught_signals() as signals:
        manager = checkpoint.open_manager(workdir, keep=1)
        state = fresh(mesh)
        if checkpoint.latest(manager) is not None:
            state = checkpoint.restore(manager, state)
        while int(state.step) < int(steps) and not number:
            state = stepped(state, workdir)
            number = agreed(state, signals)
            if int(state.step) % 2 == 0 or number:
                checkpoint.save(manager, state)
        checkpoint.close(manager)
    if number:
        return 128 + number
    write_end(state, workdir, mesh)
    return command_line.DONE


if __name__ == "__main__":
    command_line.leave(main)
