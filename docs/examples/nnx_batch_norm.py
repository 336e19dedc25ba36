"""A Flax NNX model with BatchNorm, trained with 1-bit Adam by eight workers.

`nnx.Optimizer` cannot hold an optimizer of workers: `nnx.split` takes its state apart,
so that nothing tells any longer what differs from worker to worker. The model is split
instead, and `data_parallel` trains its parameters. Each worker normalises by its share
of the batch; the running statistics come back as auxiliary values, which are averaged
over the workers, and go into the next step as an argument.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices


class Classifier(nnx.Module):
    """Two layers with a BatchNorm between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.last = nnx.Linear(256, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits, (batch, 4), of features, (batch, 64)."""
        return self.last(nnx.relu(self.norm(self.first(x))))


model = Classifier(nnx.Rngs(0))
graph, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)


def loss_fn(params, batch, statistics):
    """A worker's own loss, and the statistics with its share of the batch in them."""
    # Copies: BatchNorm writes into the merged model, not into what was split off.
    model = nnx.merge(graph, params, statistics, copy=True)
    x, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
    return jnp.mean(losses), nnx.state(model, nnx.BatchStat)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(20)
)
run = onebit_jax.data_parallel(loss_fn, tx, mesh, has_aux=True)
params, state = run.init(params)


def batch_of(step):
    """Features with labels: the quadrant of the first two."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)


for step in range(100):
    params, state, loss, statistics = run.step(
        params, state, batch_of(step), statistics
    )
    loss.block_until_ready()  # virtual devices share threads: one step at a time

nnx.update(model, params, statistics)  # the model again, for evaluation
model.eval()
x, labels = batch_of(-1)
accuracy = jnp.mean(jnp.argmax(model(x), axis=1) == labels)
mean = jnp.abs(model.norm.mean[...]).max()
print(f"loss {loss:.3f}, held-out accuracy {accuracy:.3f}, largest mean {mean:.3f}")
