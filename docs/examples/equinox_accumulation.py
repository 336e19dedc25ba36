"""An Equinox model and a scan over micro-batches, run by eight workers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import onebit_jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual workers; not on real devices

batches = [jax.random.normal(jax.random.key(i), (64, 32)) for i in range(20)]


def model_of():
    """A model whose activation is a leaf, as all of Equinox's are."""
    return eqx.nn.MLP(32, 32, width_size=64, depth=1, key=jax.random.key(0))


def mean_gradients(value_and_grad, params, zeros, x):
    """The mean loss and gradients of two micro-batches."""

    def micro(total, part):
        loss, gradients = value_and_grad(params, part)
        return optax.tree.add(total, gradients), loss

    total, losses = jax.lax.scan(micro, zeros, x.reshape(2, -1, x.shape[-1]))
    return jnp.mean(losses), optax.tree.scale(0.5, total)


def loss_of(static):
    """The loss, a function of the parameters."""

    def loss_fn(params, x):
        outputs = jax.vmap(eqx.combine(params, static))(x)
        return jnp.mean((outputs - jnp.sin(x)) ** 2)

    return loss_fn


adam = optax.adam(3e-3)


@eqx.filter_jit
def plain(model, state, x):
    """Before."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    value_and_grad = jax.value_and_grad(loss_of(static))
    zeros = optax.tree.zeros_like(params)
    loss, gradients = mean_gradients(value_and_grad, params, zeros, x)
    updates, state = adam.update(gradients, state, params)
    return eqx.apply_updates(model, updates), state, loss


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = onebit_jax.onebit_adam(
    3e-3, onebit_jax.sign_mean("data"), onebit_jax.freeze_at(10)
)


@onebit_jax.worker_step(mesh, "data")
def step(model, state, x):
    """After: what the scan carries differs from worker to worker from the first."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    value_and_grad = onebit_jax.local_value_and_grad(loss_of(static), "data")
    zeros = jax.lax.pcast(optax.tree.zeros_like(params), "data", to="varying")
    loss, gradients = mean_gradients(value_and_grad, params, zeros, x)
    updates, state = tx.update(gradients, state, params)
    return eqx.apply_updates(model, updates), state, loss


model = model_of()
state = adam.init(eqx.filter(model, eqx.is_inexact_array))
before = []
for x in batches:
    model, state, loss = plain(model, state, x)
    before.append(float(loss))

model = model_of()
state = onebit_jax.init(tx, eqx.filter(model, eqx.is_inexact_array), mesh)
after = []
for x in batches:
    model, state, loss = step(model, state, x)
    after.append(float(loss))

print(f"loss {before[-1]:.4f} before, {after[-1]:.4f} after, of {type(model).__name__}")
