"""The momentum, updated on the way into an exchange, is the one updated before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_workers import Workers

import onebit_jax

DECAY, SIZES = 0.9, {"large": 3000, "small": 5}
WIRES = (onebit_jax.sign_mean, onebit_jax.count_mean)


def of_own_momentum(exchange, as_one):
    """The exchange of a momentum whose first value is a half."""

    def init(params):
        momentum = optax.tree.full_like(params, 0.5, dtype=jnp.float32)
        return momentum, exchange.init(params)

    def update(updates, state, params=None):
        del params
        momentum, state = state
        if as_one:
            new = exchange.exchange_momentum(updates, momentum, DECAY, state)
        else:
            own = optax.tree.cast(updates, jnp.float32)
            own = optax.tree.update_moment(own, momentum, DECAY, 1)
            new = exchange.update(own, state)
        return new[0], new

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "exchange",
    [
        *(wire("host", block_size=64) for wire in WIRES),
        *(
            onebit_jax.hierarchical(wire("host", block_size=64), "device")
            for wire in WIRES
        ),
        onebit_jax.deepspeed_sign_mean("host"),
        onebit_jax.exact_mean("host"),
    ],
    ids=["signs", "counts", "signs above", "counts above", "deepspeed", "exact"],
)
def test_a_momentum_exchanged_is_one_that_was_updated_before(exchange):
    rng = np.random.default_rng(0)
    gradients = [
        {
            k: jnp.asarray(rng.normal(size=(4, n)), jnp.bfloat16)
            for k, n in SIZES.items()
        }
        for _ in range(3)
    ]
    params = {k: jnp.zeros(n, jnp.bfloat16) for k, n in SIZES.items()}
    shape = (2, 2) if len(exchange.axes) == 2 else (4,)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), exchange.axes)
    agreed = []
    for as_one in (True, False):
        tx = of_own_momentum(exchange, as_one)
        run = Workers(tx, params, mesh)
        agreed.append([run.update(own, params) for own in gradients])
    for ours, before in zip(*agreed, strict=True):
        for name in SIZES:
            assert ours[name].dtype == jnp.float32
            # A sign that rounding decides may differ, and its step's scale with it.
            near = np.isclose(ours[name], before[name], rtol=1e-4)
            assert np.mean(near) > 0.999, name
