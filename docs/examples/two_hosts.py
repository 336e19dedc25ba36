"""An Optax script on hosts of several devices: all of it.

    onebit-launch --processes 2 --devices-per-process 4 -- two_hosts.py --out FOLDER

starts two processes on one machine that stand for two hosts. The mesh says which
devices share a host: its first axis is that of the hosts, its second that of the
devices in each. Inside a host, where the links are fast, gradients are averaged
exactly; between hosts each device sends the signs of its quarter of the parameters.

It has a schedule, weight decay of matrices alone, a warm-up of 8 bits, clipping,
accumulation, skipped steps, and checkpoints in a folder that all hosts share. The same
command goes on from the newest, with another number of hosts, too. The last lines say
what is sent on the link between the hosts.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import onebit_jax
from onebit_jax import hierarchical, quantized_mean, sign_mean

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--updates", type=int, default=60)
flags = parser.parse_args()

jax.distributed.initialize()  # before anything looks at a device

ROWS, MICRO_BATCHES = 96, 2  # of a micro-batch, which all devices share; of an update
AXES = "host", "device"
hosts, devices = jax.process_count(), jax.local_device_count()
mesh = jax.make_mesh((hosts, devices), AXES, axis_types=(AxisType.Auto,) * 2)
tx = onebit_jax.onebit_adamw(
    optax.warmup_cosine_decay_schedule(0.0, 3e-2, 10, 200),  # counts updates
    hierarchical(sign_mean("host"), within="device"),
    onebit_jax.freeze_at(20),
    weight_decay=0.01,
    mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    warmup_exchange=hierarchical(quantized_mean("host", 8), within="device"),
)
tx = optax.chain(onebit_jax.clip_by_worker_norm(10.0, AXES), tx)
tx = onebit_jax.accumulate(tx, MICRO_BATCHES, AXES)
tx = onebit_jax.skip_nonfinite(tx, AXES)


def loss_fn(params, x):
    """Squared outputs of a layer whose best weights are 0.1."""
    return jnp.mean((x @ (params["w"] - 0.1) + params["b"]) ** 2)


run = onebit_jax.data_parallel(loss_fn, tx, mesh)
start = {"w": np.zeros((512, 128), np.float32), "b": np.ones(128, np.float32)}
params, state = run.init(start)

manager, first = None, 0
if flags.out:
    # Not asynchronous, as the next step takes the memory of what is saved.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    manager = ocp.CheckpointManager(flags.out.absolute(), options=options)
    first = manager.latest_step() or 0
if manager and first:
    wanted = ocp.args.Composite(mesh=ocp.args.JsonRestore())
    shape = manager.restore(first, args=wanted)["mesh"]
    saved_on = AbstractMesh(tuple(shape), AXES)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    abstract = onebit_jax.abstract_state(tx, shapes, mesh, saved_on=saved_on)
    wanted = ocp.args.StandardRestore({"params": shapes, "state": abstract})
    restored = manager.restore(first, args=ocp.args.Composite(arrays=wanted))["arrays"]
    params, state = restored["params"], restored["state"]
    if saved_on.shape != mesh.shape:
        state = onebit_jax.resize(state, tx, params, saved_on, mesh)

by_rows = NamedSharding(mesh, PartitionSpec(AXES))
for update in range(first, flags.updates):
    rng = np.random.default_rng((update, jax.process_index()))  # each host's own data
    for _ in range(MICRO_BATCHES):
        own = rng.normal(size=(ROWS // hosts, 512)).astype(np.float32)
        batch = jax.make_array_from_process_local_data(by_rows, own)
        params, state, loss = run.step(params, state, batch)
        loss.block_until_ready()  # on virtual devices: wait, or they may hang
    if (update + 1) % 20 and update + 1 < flags.updates:
        continue
    if manager:
        saved = ocp.args.StandardSave({"params": params, "state": state})
        shape = ocp.args.JsonSave([hosts, devices])
        manager.save(update + 1, args=ocp.args.Composite(arrays=saved, mesh=shape))
    if jax.process_index() == 0:
        print(f"update {update + 1}, loss {loss:.4f}")

onebit_jax.assert_replicas_identical(params, mesh)
if jax.process_index() == 0:
    print(f"{hosts} hosts of {devices} devices")
    for stage, transfers in onebit_jax.stage_costs(tx, params, mesh.shape).items():
        # A ring over all devices leaves each host once, from one of its devices;
        # between hosts alone each device has a ring of its own.
        rings = {AXES: 1, ("host",): devices, ("device",): 0}
        number = sum(
            rings[transfer.axes] * onebit_jax.sent_bytes([transfer], mesh.shape)
            for transfer in transfers
        )
        print(f"{stage}: a host sends {number:,} bytes an update")
