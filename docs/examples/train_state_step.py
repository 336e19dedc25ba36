"""A step of Flax's TrainState, run by eight workers."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

model = nn.Sequential([nn.Dense(64), jnp.tanh, nn.Dense(32)])
start = model.init(jax.random.key(0), jnp.zeros((1, 32)))
batches = [jax.random.normal(jax.random.key(i), (64, 32)) for i in range(20)]


def loss_fn(params, x):
    """The loss of a batch, or of a worker's part of it."""
    return jnp.mean((model.apply(params, x) - jnp.sin(x)) ** 2)


@jax.jit
def plain(train, x):
    """Before."""
    loss, gradients = jax.value_and_grad(loss_fn)(train.params, x)
    return train.apply_gradients(grads=gradients), {"loss": loss}


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@onebit_jax.worker_step(mesh, "data", carried=1)
def step(train, x):
    """After."""
    value_and_grad = onebit_jax.local_value_and_grad(loss_fn, "data")
    loss, gradients = value_and_grad(train.params, x)
    return train.apply_gradients(grads=gradients), {"loss": loss}


train = TrainState.create(apply_fn=model.apply, params=start, tx=optax.adam(3e-3))
before = []
for x in batches:
    train, told = plain(train, x)
    before.append(float(told["loss"]))

tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(10)
)
state = onebit_jax.init(tx, start, mesh)  # each worker's part on its device
train = TrainState(jnp.int32(0), model.apply, start, tx, state)
after = []
for x in batches:
    train, told = step(train, x)
    after.append(float(told["loss"]))

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after {train.step} steps")
