"""A checkpoint of eight workers, restored with Orbax and gone on with by four.

The optimizer's state is saved whole: beside the moments it holds each worker's errors,
what its signs have left out so far. On a machine with other devices it is restored as
it was saved, and then converted. `abstract_state` has the shapes and the placement for
the first step, `resize` does the second: the mean of the workers' errors, which is yet
to reach the parameters, and the servers' errors stay what they were. All that has to be
remembered of the old mesh is its shape.
"""

import tempfile

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

tx = onebit_jax.onebit_adam(
    1e-2, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(20)
)


def loss_fn(params, x):
    """Squared distance of the outputs from those of weights of 0.5."""
    return jnp.mean((x @ (params["w"] - 0.5)) ** 2)


def train(mesh, params, state, steps):
    """Parameters and state after some steps; prints the last loss."""
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    for step in steps:
        batch = jax.random.normal(jax.random.key(step), (64, 64))
        params, state, loss = run.step(params, state, batch)
        loss.block_until_ready()  # virtual devices share threads: one step at a time
    print(f"{mesh.size} workers, step {step + 1}: loss {loss:.4f}")
    return params, state


def print_errors(state):
    """Prints the norms of the workers' mean error and of the servers' errors."""
    errors = state[0].exchange  # the first of what onebit_adam chains
    # Leaves from 16,384 values on have theirs in worker_error.
    workers = jnp.linalg.norm(jnp.mean(errors.small_error.value, axis=0))
    servers = jnp.linalg.norm(jnp.ravel(errors.server_error.value))
    print(f"errors: workers' mean {workers:.4f}, servers' {servers:.4f}")


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
run = onebit_jax.data_parallel(loss_fn, tx, mesh)
params, state = train(mesh, *run.init({"w": jnp.zeros((64, 64))}), range(60))
print_errors(state)
folder = tempfile.mkdtemp() + "/checkpoint"
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, {"params": params, "state": state})

# Later, on a machine with half of the devices.
old_mesh = AbstractMesh((8,), ("data",))
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
everywhere = NamedSharding(mesh, PartitionSpec())
shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=everywhere)}
saved = onebit_jax.abstract_state(tx, shapes, mesh, saved_on=old_mesh)
with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(folder, {"params": shapes, "state": saved})
params = restored["params"]
state = onebit_jax.resize(restored["state"], tx, params, old_mesh, mesh)
print_errors(state)
params, state = train(mesh, params, state, range(60, 120))
