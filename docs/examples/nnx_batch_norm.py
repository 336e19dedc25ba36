"""A Flax NNX model with BatchNorm and Dropout, trained by eight workers.

`nnx.Optimizer` cannot hold an optimizer of workers: where `nnx.split` takes its state
apart, what marks the worker-local leaves is lost. The model is split instead, and
`data_parallel` trains its parameters. Each worker normalises by its share of the batch;
where that is small, `nnx.BatchNorm(..., axis_name="data")` normalises by the whole
batch. The running statistics come back as auxiliary values, which are averaged over the
workers, and go into the next step as an argument. So does a key of the step, of which
each worker makes random numbers of its own. Both must stay out of the parameters, which
are `nnx.Param` alone.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices


class Classifier(nnx.Module):
    """Two layers with a BatchNorm and a Dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(256, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits, (batch, 4), of features, (batch, 64)."""
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


model = Classifier(nnx.Rngs(0, dropout=1))
graph, params, statistics, random = nnx.split(
    model, nnx.Param, nnx.BatchStat, nnx.RngState
)


def loss_fn(params, batch, statistics, key):
    """A worker's own loss, and the statistics with its share of the batch in them."""
    # Copies: BatchNorm writes into the merged model, not into what was split off.
    model = nnx.merge(graph, params, statistics, random, copy=True)
    # Each stream by its name: others would give the same numbers everywhere, again.
    nnx.reseed(model, dropout=jax.random.fold_in(key, jax.lax.axis_index("data")))
    x, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
    return jnp.mean(losses), nnx.state(model, nnx.BatchStat)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
adam = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(20)
)
tx = onebit_jax.skip_nonfinite(adam, "data")
run = onebit_jax.data_parallel(loss_fn, tx, mesh, has_aux=True)
params, state = run.init(params)
# Where the step returns them, or its second call would compile it once more.
statistics = jax.device_put(statistics, NamedSharding(mesh, PartitionSpec()))


def batch_of(step):
    """Features with labels: the quadrant of the first two."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    labels = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
    # One broken example, of one worker, whose statistics would break all workers'.
    return x.at[0, 0].set(jnp.nan) if step == 50 else x, labels


for step in range(100):
    key = jax.random.fold_in(jax.random.key(1), step)
    params, state, loss, new = run.step(params, state, batch_of(step), statistics, key)
    loss.block_until_ready()  # virtual devices share threads: one step at a time
    # skip_nonfinite keeps parameters and state as they were, not what comes beside.
    finite = jnp.isfinite(optax.tree.norm((loss, new)))
    statistics = optax.tree.where(finite, new, statistics)

# The model again, for evaluation; a copy, as a further step would take the memory.
nnx.update(model, jax.tree.map(jnp.copy, params), statistics)
model.eval()
x, labels = batch_of(-1)
accuracy = jnp.mean(jnp.argmax(model(x), axis=1) == labels)
mean = jnp.abs(model.norm.mean[...]).max()
print(f"loss {loss:.3f}, held-out accuracy {accuracy:.3f}, largest mean {mean:.3f}")
print(f"steps skipped: {onebit_jax.metrics(state)['skipped']}")
