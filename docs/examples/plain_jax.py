"""A training step of your own in plain JAX: an MLP, clipping, and 1-bit AdamW.

The optimizer is called inside `jax.shard_map`, where each of eight workers has the
gradients of its own share of the batch. `local_value_and_grad` gives them; `jax.grad`
would sum them over the network first, at 32 bits a parameter, and gradients that are
summed or averaged already are refused. `init` places each worker's errors on its
own device, and `state_specs` tells `jax.shard_map` where they are.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = optax.chain(
    onebit_jax.clip_by_worker_norm(1.5, "data"),
    onebit_jax.onebit_adamw(
        3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(50), weight_decay=0.01
    ),
)
initialize = jax.nn.initializers.lecun_normal()
params = {
    "first": {"w": initialize(jax.random.key(0), (64, 256)), "b": jnp.zeros(256)},
    "last": {"w": initialize(jax.random.key(1), (256, 4)), "b": jnp.zeros(4)},
}
state = onebit_jax.init(tx, params, mesh)
specs = onebit_jax.state_specs(state)


def logits_of(params, x):
    """Logits, (batch, 4), of features, (batch, 64)."""
    hidden = jax.nn.relu(x @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def loss_fn(params, x, labels):
    """A worker's own loss: not averaged over the workers."""
    logits = logits_of(params, x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@jax.jit
@jax.shard_map(
    mesh=mesh,
    in_specs=(P(), specs, P("data"), P("data")),
    out_specs=(P(), specs, P()),
)
def train_step(params, state, x, labels):
    """One step of one worker; the loss alone is averaged for printing."""
    value_and_grad = onebit_jax.local_value_and_grad(loss_fn, "data")
    loss, gradients = value_and_grad(params, x, labels)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")


def batch_of(step):
    """Features with labels: the quadrant of the first two."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)


compiled = train_step.lower(params, state, *batch_of(0)).compile()
print(onebit_jax.traffic(compiled, mesh))  # bytes that a device sends, by stage
for step in range(200):
    params, state, loss = compiled(params, state, *batch_of(step))
    loss.block_until_ready()  # virtual devices share threads: one step at a time

onebit_jax.assert_replicas_identical(params, mesh)
x, labels = batch_of(-1)
accuracy = jnp.mean(jnp.argmax(logits_of(params, x), axis=1) == labels)
clipped = onebit_jax.metrics(state)["clipped_share"]
print(f"loss {loss:.3f}, held-out accuracy {accuracy:.3f}, {clipped:.1%} clipped")
