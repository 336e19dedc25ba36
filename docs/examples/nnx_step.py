"""A Flax NNX model without nnx.Optimizer, its step run by eight workers."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

batches = [jax.random.normal(jax.random.key(i), (64, 32)) for i in range(20)]


def model_of():
    """A model of two layers."""
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
    return nnx.Sequential(first, jnp.tanh, last)


def loss_fn(model, x):
    """The loss of a batch, or of a worker's part of it."""
    return jnp.mean((model(x) - jnp.sin(x)) ** 2)


@nnx.jit
def plain(model, optimizer, x):
    """Before."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, gradients)
    return loss


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(10)
)


@onebit_jax.worker_step(mesh, "data")
def step(params, state, x):
    """After: the parameters are split from the model, and merged in the loss."""

    def loss_of(params):
        return loss_fn(nnx.merge(graph, params, rest, copy=True), x)

    loss, gradients = onebit_jax.local_value_and_grad(loss_of, "data")(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


model = model_of()
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
before = [float(plain(model, optimizer, x)) for x in batches]

model = model_of()
graph, params, rest = nnx.split(model, nnx.Param, ...)
state = onebit_jax.init(tx, params, mesh)
after = []
for x in batches:
    params, state, loss = step(params, state, x)
    after.append(float(loss))
nnx.update(model, jax.tree.map(jnp.copy, params))  # for evaluation

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after")
