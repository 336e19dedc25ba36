"""Two workers train a few steps; `python two_workers.py FILE` as two processes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

STEPS, FREEZE = 10, 2
# Leaves that are exchanged by themselves, together, and exactly.
SHAPES = {"large": (130, 130), "small": (9, 30), "row": (40,), "pair": (2,), "one": ()}


def loss_fn(params, targets):
    squares = (jnp.sum((params[k][None] - targets[k]) ** 2) for k in SHAPES)
    return sum(squares, start=jnp.float32(0))


def trained(mesh):
    """Parameters after steps of every stage, and how many steps each stage had."""
    tx = onebit_jax.onebit_adam(
        0.1,
        onebit_jax.count_mean("data", block_size=32),
        onebit_jax.freeze_at(FREEZE),
        compressed=onebit_jax.Compressed(growth=onebit_jax.GrowthByMeanSquares(2)),
    )
    run = onebit_jax.data_parallel(loss_fn, onebit_jax.skip_nonfinite(tx, "data"), mesh)
    params, state = run.init({k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
    by_workers = NamedSharding(mesh, PartitionSpec("data"))
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        targets = {
            k: rng.normal(1, 1, size=(2, *s)).astype(np.float32)
            for k, s in SHAPES.items()
        }
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, by_workers, x.__getitem__),
            targets,
        )
        params, state, _ = jax.block_until_ready(run.step(params, state, batch))
    return params, onebit_jax.steps_by_stage(state)


def main():
    jax.distributed.initialize()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    params, _ = trained(mesh)
    onebit_jax.assert_replicas_identical(params, mesh)
    if jax.process_index() == 0:
        np.savez(sys.argv[1], **jax.device_get(params))


if __name__ == "__main__":
    main()
