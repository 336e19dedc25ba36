"""An Equinox model, trained with 1-bit Adam by eight workers.

An Equinox model is a tree of arrays and of functions such as its activations.
`eqx.partition` takes the arrays that learn out of it, and `data_parallel` trains them
as it trains any tree of parameters; `eqx.combine` puts the model together again, in the
loss and after training.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

model = eqx.nn.MLP(64, 4, width_size=256, depth=2, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, batch):
    """A worker's own loss."""
    model = eqx.combine(params, static)
    x, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels)
    return jnp.mean(losses)


def batch_of(step):
    """Features with labels: the quadrant of the first two."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(20)
)
run = onebit_jax.data_parallel(loss_fn, tx, mesh)
params, state = run.init(params)
for step in range(100):
    params, state, loss = run.step(params, state, batch_of(step))
    loss.block_until_ready()  # virtual devices share threads: one step at a time

model = eqx.combine(params, static)  # the model again, for evaluation
x, labels = batch_of(-1)
accuracy = jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=1) == labels)
compressed = onebit_jax.metrics(state)["compressed"]
print(f"loss {loss:.3f}, held-out accuracy {accuracy:.3f}, compressed {compressed}")
