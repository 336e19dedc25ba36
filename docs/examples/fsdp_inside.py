"""A model sharded by jit on an explicit mesh, compressed between its replicas.

The `data` axis of 8 devices is split into `replica` (2) and `data` (4): parameters,
moments and errors stay sharded over `data`, and one bit a value crosses `replica`.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual devices; not on real ones


def loss_fn(params, x):
    """Fully sharded: each weight is gathered where it is used."""
    up, down = (jax.reshard(params[name], P()) for name in ("up", "down"))
    return jnp.mean((jnp.tanh(x @ up) @ down - jnp.sin(x)) ** 2)


def params_on(mesh):
    """Weights, divided over `data` along their first axis."""
    shapes = {"up": (32, 64), "down": (64, 32)}
    make = jax.nn.initializers.lecun_normal()
    weights = {k: make(jax.random.key(len(k)), s) for k, s in shapes.items()}
    return jax.device_put(weights, NamedSharding(mesh, P("data", None)))


batches = [jax.random.normal(jax.random.key(i), (64, 32)) for i in range(20)]

# Before: jit, one axis.
mesh = jax.make_mesh((8,), ("data",))
adam = optax.adam(3e-3)


@jax.jit
def step(params, state, x):
    """New parameters, new state, and the loss."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, state = adam.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


before = []
with jax.set_mesh(mesh):
    params = params_on(mesh)
    state = adam.init(params)
    for x in batches:
        x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
        params, state, loss = step(params, state, x)
        before.append(float(loss))

# After: the same loss, and the axis split.
mesh = jax.make_mesh((2, 4), ("replica", "data"))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("replica"), onebit_jax.freeze_at(10)
)
run = onebit_jax.data_parallel(loss_fn, tx, mesh, axis="replica")
params, state = run.init(params_on(mesh))
after = []
for x in batches:
    x = jax.device_put(x, NamedSharding(mesh, P(("replica", "data"), None)))
    params, state, loss = run.step(params, state, x)
    after.append(float(loss))

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after, {params['up'].sharding}")
