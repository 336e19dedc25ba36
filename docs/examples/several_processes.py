"""Several processes that train together.

    onebit-launch --processes 2 -- several_processes.py

starts the program twice on one machine. `jax.distributed.initialize()` finds the others
by what the launcher, Slurm or `mpirun` tells it, and the mesh is made of the devices of
all of them. Each process reads its own rows and makes of them its part of one array; a
process's own array is refused as a batch, as each would train on another. Started again
with the folder of a checkpoint, it goes on from there:

    onebit-launch --processes 2 -- several_processes.py /shared/checkpoint
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

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
folder = pathlib.Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None
if folder and folder.exists():
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=everywhere)}
    saved = {"params": shapes, "state": onebit_jax.saved_state(tx, shapes, mesh, mesh)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, saved)
    params, state = restored["params"], restored["state"]

by_rows = NamedSharding(mesh, PartitionSpec("data"))
rng = np.random.default_rng(jax.process_index())  # each process has data of its own
for _ in range(60):
    own = rng.normal(size=(64 // jax.process_count(), 64)).astype(np.float32)
    batch = jax.make_array_from_process_local_data(by_rows, own)
    params, state, loss = run.step(params, state, batch)

onebit_jax.assert_replicas_identical(params, mesh)
if folder:
    # All processes save, each its part, into a folder that all hosts share.
    with ocp.StandardCheckpointer() as checkpointer:
        saved = {"params": params, "state": state}
        checkpointer.save(folder, saved, force=True)
steps = {stage: int(n) for stage, n in onebit_jax.steps_by_stage(state).items()}
if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {workers} workers, loss {loss:.4f}")
    print(f"steps: {steps}")
