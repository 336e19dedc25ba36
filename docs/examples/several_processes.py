"""Several processes that train together.

    onebit-launch --processes 2 -- several_processes.py

starts the program twice on one machine. `jax.distributed.initialize()` finds the others
by what the launcher, Slurm or `mpirun` tells it, and the mesh is made of the devices of
all of them. Each process reads its own rows and makes of them its part of one array; a
process's own array is refused as a batch, as each would train on another.

With `--out FOLDER`, which all hosts must share, it saves a checkpoint every 20 steps,
and the same command again goes on from the newest.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--steps", type=int, default=60)
flags = parser.parse_args()

jax.distributed.initialize()  # before anything looks at a device

workers = jax.device_count()  # of all processes
mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-2, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(20)
)
run = onebit_jax.data_parallel(
    lambda params, x: jnp.mean((x @ (params["w"] - 0.1)) ** 2), tx, mesh
)
params, state = run.init({"w": np.zeros((64, 64), np.float32)})

# All processes call the manager, and each saves and restores its part.
manager, first = None, 0
if flags.out:
    # Not asynchronous, as the next step takes the memory of what is saved.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    manager = ocp.CheckpointManager(flags.out.absolute(), options=options)
    first = manager.latest_step() or 0
if manager and first:
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=everywhere)}
    saved = {"params": shapes, "state": onebit_jax.abstract_state(tx, shapes, mesh)}
    restored = manager.restore(first, args=ocp.args.StandardRestore(saved))
    params, state = restored["params"], restored["state"]

by_rows = NamedSharding(mesh, PartitionSpec("data"))
for step in range(first, flags.steps):
    rng = np.random.default_rng((step, jax.process_index()))  # each has its own data
    own = rng.normal(size=(64 // jax.process_count(), 64)).astype(np.float32)
    batch = jax.make_array_from_process_local_data(by_rows, own)
    params, state, loss = run.step(params, state, batch)
    if (step + 1) % 20 == 0 or step + 1 == flags.steps:
        if manager:
            saved = ocp.args.StandardSave({"params": params, "state": state})
            manager.save(step + 1, args=saved)
        if jax.process_index() == 0:
            print(f"step {step + 1}, loss {loss:.4f}")

onebit_jax.assert_replicas_identical(params, mesh)
if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {workers} workers")
