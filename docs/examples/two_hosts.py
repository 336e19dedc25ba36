"""Two hosts of four devices, with compression between the hosts alone.

    onebit-launch --processes 2 --devices-per-process 4 -- two_hosts.py

starts two processes on one machine that stand for two hosts. The mesh says which
devices share a host: its first axis is that of the hosts, its second that of the
devices in each. Inside a host, where the links are fast, gradients are averaged
exactly; between hosts each device sends the signs of its quarter of the parameters. The
last lines say what that saves on the link between the hosts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

jax.distributed.initialize()  # before anything looks at a device

shape = jax.process_count(), jax.local_device_count()
mesh = jax.make_mesh(shape, ("host", "device"), axis_types=(AxisType.Auto,) * 2)
exchange = onebit_jax.hierarchical(onebit_jax.sign_mean("host"), within="device")
tx = onebit_jax.onebit_adam(3e-2, exchange, onebit_jax.freeze_at(20))
run = onebit_jax.data_parallel(
    lambda params, x: jnp.mean((x @ (params["w"] - 0.1)) ** 2), tx, mesh
)
params, state = run.init({"w": np.zeros((256, 64), np.float32)})

by_rows = NamedSharding(mesh, PartitionSpec(("host", "device")))
rng = np.random.default_rng(jax.process_index())  # each host has data of its own


def next_batch():
    """The array of all hosts, of which this one makes its rows."""
    own = rng.normal(size=(64 // jax.process_count(), 256)).astype(np.float32)
    return jax.make_array_from_process_local_data(by_rows, own)


for _ in range(60):
    params, state, loss = run.step(params, state, next_batch())
    loss.block_until_ready()  # virtual devices share threads: one step at a time

onebit_jax.assert_replicas_identical(params, mesh)
if jax.process_index() == 0:
    print(f"{shape[0]} hosts of {shape[1]} devices, loss {loss:.4f}")
    for stage, transfers in onebit_jax.stage_costs(tx, params, mesh.shape).items():
        # A ring over all devices leaves each host once, from one of its devices;
        # between hosts alone each device has a ring of its own.
        rings = {("host", "device"): 1, ("host",): shape[1], ("device",): 0}
        number = sum(
            rings[transfer.axes] * onebit_jax.sent_bytes([transfer], mesh.shape)
            for transfer in transfers
        )
        print(f"{stage}: a host sends {number:,} bytes a step to the other")
