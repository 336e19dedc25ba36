"""A step under `jax.pmap`, run by `worker_step` instead."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

batches = [jax.random.normal(jax.random.key(i), (64, 32)) for i in range(20)]
make = jax.nn.initializers.lecun_normal()
start = {
    "up": make(jax.random.key(0), (32, 64)),
    "down": make(jax.random.key(1), (64, 32)),
}
adam = optax.adam(3e-3)


def loss_fn(params, x):
    """A worker's loss."""
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(x)) ** 2)


def plain(params, state, x):
    """Before."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    loss, gradients = jax.lax.pmean((loss, gradients), "data")
    updates, state = adam.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(10)
)


@onebit_jax.worker_step(mesh, "data")
def step(params, state, x):
    """After: no `pmean`, as the optimizer exchanges and the loss comes as a mean."""
    value_and_grad = onebit_jax.local_value_and_grad(loss_fn, "data")
    loss, gradients = value_and_grad(params, x)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


plain = jax.pmap(plain, axis_name="data")
params, state = jax.tree.map(lambda x: jnp.stack([x] * 8), (start, adam.init(start)))
before = []
for x in batches:
    params, state, loss = plain(params, state, x.reshape(8, -1, 32))
    before.append(float(loss[0]))

params, state = start, onebit_jax.init(tx, start, mesh)
after = []
for x in batches:
    params, state, loss = step(params, state, x)  # whole batches, one set of weights
    after.append(float(loss))

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after")
