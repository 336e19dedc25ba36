"""Trajectories of 1-bit Adam that a change of the code must not change by a bit.

`python tests/trajectories.py` runs all of them and says which are the same as in
`golden/trajectories.npz`, bit for bit; `--write` writes them there anew. Names after it
are of those alone.
"""

import argparse
import hashlib
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax

FILE = pathlib.Path(__file__).parent / "golden" / "trajectories.npz"
STEPS, FREEZE, WORKERS = 30, 10, 4
# A matrix; matrices of one leaf; a block cut short; a leaf of few values.
SHAPES = {"kernel": (18, 20), "heads": (2, 16, 18), "long": (150,), "bias": (4,)}
SPECS = {
    "kernel": P(None, "model"),
    "heads": P(None, "model"),
    "long": P("model"),
    "bias": P(),
}
EXCHANGES = {
    "sign_mean": lambda: onebit_jax.sign_mean("data", block_size=64, scale="mean_abs"),
    "sign_mean_rms": lambda: onebit_jax.sign_mean(
        "data", block_size=32, scale="rms", error_dtype="bfloat16"
    ),
    "count_mean": lambda: onebit_jax.count_mean(
        "data", block_size=64, scale="mean_abs"
    ),
    "exact_mean": lambda: onebit_jax.exact_mean("data"),
    "hierarchical": lambda: onebit_jax.hierarchical(
        onebit_jax.sign_mean("host", block_size=64, scale="mean_abs"), within="device"
    ),
    "hierarchical_count": lambda: onebit_jax.hierarchical(
        onebit_jax.count_mean("host", block_size=64, scale="mean_abs"), within="device"
    ),
    "per_shard": lambda: onebit_jax.per_shard(
        onebit_jax.sign_mean("data", block_size=64, scale="mean_abs"), SPECS
    ),
}
DTYPES = ("float32", "bfloat16")
FORMS = ("recommended", "published")
NAMES = [f"{e}-{f}-{d}" for e in EXCHANGES for f in FORMS for d in DTYPES]


def optimizer(exchange, form):
    freeze = onebit_jax.freeze_at(FREEZE)
    parts = onebit_jax.Compressed()
    if form == "published":
        parts = onebit_jax.Compressed.published()
    return onebit_jax.onebit_adamw(
        1e-2, exchange, freeze, weight_decay=0.01, compressed=parts
    )


def kept(state):
    """The part of a state that is compared: moments and errors."""
    adam = state[0]
    exchange = adam.exchange
    errors = jax.tree.leaves(exchange)
    if hasattr(exchange, "groups"):
        errors = by_parameter(exchange.groups)
    elif hasattr(exchange, "small_error"):
        own = in_shapes(SHAPES, np.asarray(exchange.small_error.value))
        errors = [own[name] for name in sorted(SHAPES)]
        if exchange.server_error.value is not None:
            errors.append(exchange.server_error.value)
    return [*jax.tree.leaves(adam.mu), *jax.tree.leaves(adam.nu), *errors]


def in_shapes(shapes, blocks):
    """Errors of small leaves, `(workers, blocks, block_size)`, as those of each leaf.

    Zeros where a leaf is exchanged exactly.
    """
    found, first, size = {}, 0, blocks.shape[-1]
    for name in sorted(shapes):
        number = math.prod(shapes[name])
        found[name] = np.zeros((len(blocks), *shapes[name]), blocks.dtype)
        if number >= size // 32 + 2:
            last = first + -(-number // size)
            flat = blocks[:, first:last].reshape(len(blocks), -1)[:, :number]
            found[name], first = flat.reshape(found[name].shape), last
    return found


def by_parameter(groups):
    """The errors of shards as the file has them: whole, those of servers last."""
    worker = {}
    for group, is_split in zip(groups, (False, True), strict=True):
        names = [name for name in sorted(SHAPES) if (SPECS[name] != P()) == is_split]
        error = np.asarray(group.small_error.value)
        axes = {
            n: [*SPECS[n], "model"].index("model") if is_split else 0 for n in names
        }
        shapes = {
            n: [
                s // 2 if is_split and i == axes[n] else s
                for i, s in enumerate(SHAPES[n])
            ]
            for n in names
        }
        shards = [in_shapes(shapes, error[:, k]) for k in range(error.shape[1])]
        for n in names:
            worker[n] = np.concatenate([x[n] for x in shards], axis=axes[n] + 1)
    servers = [np.asarray(group.server_error.value) for group in groups]
    return [*(worker[name] for name in sorted(worker)), *servers]


def mesh_of(exchange):
    shape, axes, workers = {
        "hierarchical": ((2, 2), ("host", "device"), ("host", "device")),
        "hierarchical_count": ((2, 2), ("host", "device"), ("host", "device")),
        "per_shard": ((WORKERS, 2), ("data", "model"), ("data",)),
    }.get(exchange, ((WORKERS,), ("data",), ("data",)))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types), workers


def gradients(step, dtype):
    """All workers' own, of which a row of the kernel wakes up after the freeze."""
    rng = np.random.default_rng(step)
    found = {}
    for name, shape in SHAPES.items():
        g = rng.normal(size=(WORKERS, *shape)) * np.exp(rng.normal(size=shape))
        g = (g + np.sin(step / 5)) * (1 + step / 10)
        if name == "kernel" and step < FREEZE + 5:
            g[:, 3] = 0
        found[name] = jnp.asarray(g.astype(np.float32)).astype(dtype)
    return found


def run(name):
    """Digests of the parameters after each step, and all values in the end."""
    exchange, form, dtype = name.split("-")
    mesh, workers = mesh_of(exchange)
    tx = optax.with_extra_args_support(optimizer(EXCHANGES[exchange](), form))
    specs = SPECS if exchange == "per_shard" else {k: P() for k in SHAPES}
    params = {
        k: jax.device_put(jnp.full(s, 0.5, dtype), NamedSharding(mesh, specs[k]))
        for k, s in SHAPES.items()
    }
    state = onebit_jax.init(tx, params, mesh)
    own = onebit_jax.state_specs(state)

    def step(grads, state, params):
        grads = jax.tree.map(lambda g: g[0], grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(workers), own, P()),
            out_specs=(P(), own),
            axis_names=set(workers),
        )
    )
    split = {k: NamedSharding(mesh, P(workers, *specs[k])) for k in SHAPES}
    digests = []
    for number in range(1, STEPS + 1):
        grads = jax.device_put(gradients(number, dtype), split)
        params, state = jax.block_until_ready(compiled(grads, state, params))
        digests.append(digest(jax.tree.leaves(params)))
    last = [np.asarray(x) for x in (*jax.tree.leaves(params), *kept(state))]
    digests.append(digest(last))
    return digests, np.concatenate([x.astype(np.float32).ravel() for x in last])


def digest(arrays):
    whole = b"".join(np.asarray(x).tobytes() for x in arrays)
    return hashlib.sha256(whole).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of trajectories; all without one")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    arrays = dict(np.load(FILE))
    print(f"written by jax {arrays['jax']}, this is {jax.__version__}")
    for name in arguments.names or NAMES:
        digests, values = run(name)
        differ = np.flatnonzero(arrays[f"{name}/digests"] != np.array(digests))
        where = f"differs from step {differ[0] + 1} on" if differ.size else "same"
        print(f"{name}: {where}", flush=True)
        arrays |= {f"{name}/digests": np.array(digests), f"{name}/values": values}
    if arguments.write:
        np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
