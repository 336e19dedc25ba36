"""An optimizer of your own: the sign of a momentum, exact first and then compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from onebit_jax.optimizers.parts.moments import as_float32


@onebit_jax.optimizer_state
class SignumState(NamedTuple):
    """The momentum that all agree on, and the exchange's state."""

    count: jax.Array
    warmup_steps: jax.Array
    momentum: Any
    exchange: Any

    def steps_by_stage(self):
        """The steps taken in each stage."""
        warmup = jnp.minimum(self.count, self.warmup_steps)
        return {"warmup": warmup, "compressed": self.count - warmup}


def scale_by_signum(exchange, warmup_steps, decay=0.9):
    """The sign of a momentum that is exchanged exactly for `warmup_steps`."""
    if not isinstance(exchange, onebit_jax.Exchange):
        raise TypeError(f"signum needs an exchange, such as sign_mean: {exchange!r}.")
    exact = onebit_jax.exact_mean(exchange.axes)
    decay = as_float32(decay)  # one number, of any dtype

    def init(params):
        steps = jnp.int32(0), jnp.int32(warmup_steps)
        momentum = optax.tree.zeros_like(params, dtype=jnp.float32)
        return SignumState(*steps, momentum, exchange.init(params))

    def update(updates, state, params=None, *, stage=None, **extra):
        del params, extra

        def warmup():
            mean, _ = exact.update(updates, exact.init(updates))
            return mean, state.exchange

        def compressed():
            return exchange.update(updates, state.exchange)

        stages = {"warmup": warmup, "compressed": compressed}
        current = (state.count >= state.warmup_steps).astype(jnp.int32)
        mean, exchanged = onebit_jax.run_stage(stages, current, stage)
        mean = optax.tree.cast(mean, jnp.float32)
        momentum = optax.tree.update_moment(mean, state.momentum, decay, 1)
        signs = jax.tree.map(
            lambda m, g: jnp.sign(m).astype(g.dtype), momentum, updates
        )
        count = state.count + 1
        return signs, state._replace(count=count, momentum=momentum, exchange=exchanged)

    return optax.GradientTransformationExtraArgs(init, update)


def signum(
    learning_rate, exchange, warmup_steps=100, decay=0.9, weight_decay=0.0, mask=None
):
    """Signum, with decoupled weight decay."""
    return optax.chain(
        scale_by_signum(exchange, warmup_steps, decay),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = signum(1e-2, onebit_jax.sign_mean("data"), warmup_steps=10)
run = onebit_jax.data_parallel(lambda p, x: jnp.mean((x @ (p - 1)) ** 2), tx, mesh)
params, state = run.init(jnp.zeros((64, 64)))
batch = jax.random.normal(jax.random.key(0), (64, 64))
step = run.step.lower(params, state, batch).compile()
print(onebit_jax.traffic(step, mesh))
for _ in range(150):
    params, state, loss = jax.block_until_ready(step(params, state, batch))
print(loss, onebit_jax.steps_by_stage(state))
