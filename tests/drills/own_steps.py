"""Local steps between processes, a program for each stage, that take their time."""

import argparse
import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax


def flags_of_the_command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--heartbeat", type=int, default=100)
    return parser.parse_args()


def main(flags):
    jax.distributed.initialize(
        flags.coordinator,
        flags.processes,
        flags.process,
        heartbeat_timeout_seconds=flags.heartbeat,
    )
    mesh = jax.make_mesh((flags.processes,), ("data",), axis_types=(AxisType.Auto,))
    sync = onebit_jax.every(flags.interval)
    tx = onebit_jax.local_steps(optax.adam(1e-2), onebit_jax.sign_mean("data"), sync)
    run = onebit_jax.data_parallel(lambda p, x: jnp.mean((x @ p - 1) ** 2), tx, mesh)
    params, state = run.init(np.zeros((64, flags.width), np.float32))
    split = NamedSharding(mesh, PartitionSpec("data"))
    for step in range(1, 3 * flags.interval + 1):
        rng = np.random.default_rng((step, flags.process))
        own = rng.normal(size=(8, 64)).astype(np.float32)
        batch = jax.make_array_from_process_local_data(split, own)
        stage = "local" if step % flags.interval else "sync"
        params, state, loss = run.step(params, state, batch, stage=stage)
        jax.block_until_ready((params, state, loss))
        print(f"step {step}", flush=True)
        time.sleep(flags.pause)
    ended = hashlib.sha256(np.asarray(params).tobytes()).hexdigest()
    print(f"ended with {ended}", flush=True)


if __name__ == "__main__":
    main(flags_of_the_command_line())
