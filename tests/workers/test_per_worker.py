"""State that each worker keeps for itself, of any transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import exact_mean, per_worker


def gradients(step, workers, size=5):
    rng = np.random.default_rng(step)
    return jnp.asarray(rng.normal(size=(workers, size)), jnp.float32)


def test_each_worker_has_a_state_of_its_own():
    tx = optax.chain(per_worker(optax.adam(1.0), "data"), exact_mean("data"))
    run = Workers(tx, jnp.zeros(5), mesh_of(4))
    alone = [optax.adam(1.0).init(jnp.zeros(5)) for _ in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        for step in range(3):
            own = gradients(step, 4)
            agreed = run.update(own)
            each = []
            for i, state in enumerate(alone):
                update, alone[i] = optax.adam(1.0).update(own[i], state)
                each.append(update)
            np.testing.assert_allclose(agreed, np.mean(each, axis=0), rtol=1e-5)
    for i, state in enumerate(alone):
        found = run.state[0].inner[0].nu.value[i]
        np.testing.assert_allclose(found, state[0].nu, rtol=1e-5)


def test_a_worker_may_be_several_devices():
    """Exact inside a host, whose momentum is its own, and an exchange between hosts."""
    mesh = mesh_over({"host": 2, "device": 2})
    host = optax.chain(exact_mean("device"), optax.trace(0.5))
    tx = optax.chain(per_worker(host, "host"), exact_mean("host"), optax.sgd(1.0))

    def loss(p, x):
        return jnp.mean(x) * jnp.sum(p)

    run = onebit_jax.data_parallel(loss, tx, mesh)
    params, state = run.init(jnp.zeros(1))
    for step in range(3):
        params, state, _ = run.step(params, state, jnp.arange(4.0) + step)
    momenta = state[0].inner[1].trace.value
    # Each host's mean gradient is 0.5 and 2.5 in the first step, one more in each.
    expected = [
        sum(0.5 ** (2 - step) * (first + step) for step in range(3))
        for first in (0.5, 2.5)
    ]
    np.testing.assert_allclose(momenta, np.array(expected)[:, None], rtol=1e-6)
    costs = onebit_jax.stage_costs(tx, params, mesh.shape)["every"]
    assert {t.axes for t in costs} == {("host",), ("device",)}


def test_a_state_inside_another_keeps_the_axis_that_stays():
    own = optax.GradientTransformation(
        lambda params: (params, jnp.int32(0)), lambda u, state, params=None: (u, state)
    )
    tx, params = per_worker(per_worker(own, "device"), "host"), jnp.zeros(3)
    old, mesh = (mesh_over({"host": hosts, "device": 2}) for hosts in (2, 3))
    state = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
        onebit_jax.init(tx, params, old),
    )
    floats, numbers = jax.tree.leaves(state)
    resized = jax.tree.leaves(onebit_jax.resize(state, tx, params, old, mesh))
    mean, first = jnp.mean(floats, axis=0), numbers[0]
    np.testing.assert_array_equal(resized[0], jnp.stack([mean] * 3))
    np.testing.assert_array_equal(resized[1], jnp.stack([first] * 3))


@onebit_jax.optimizer_state
class Largest(NamedTuple):
    value: Any

    def metrics(self):
        return {"largest": self.value}


def test_what_it_measures_is_told_as_the_mean_of_the_workers():
    own = optax.GradientTransformation(
        lambda params: Largest(jnp.zeros([])),
        lambda updates, state, params=None: (updates, Largest(jnp.max(updates))),
    )
    tx = optax.chain(per_worker(own, "data"), exact_mean("data"))
    run = Workers(tx, jnp.zeros(5), mesh_of(2))
    values = gradients(0, 2)
    run.update(values)
    expected = np.mean(np.max(values, axis=1))
    told = onebit_jax.metrics(run.state)["largest"]
    np.testing.assert_allclose(told, expected, rtol=1e-6)


def test_a_state_of_other_leaves_is_refused():
    tx = optax.chain(per_worker(optax.trace(0.5), "data"), exact_mean("data"))
    run = Workers(tx, jnp.zeros(5), mesh_of(2))
    with pytest.raises(ValueError, match="per_worker's state was not made for these"):
        run.update(jnp.zeros((2, 1)))

    def update_of_fewer(x):
        return tx.update([x], tx.init([x, x]))

    with pytest.raises(ValueError, match="per_worker's state was not made for these"):
        jax.vmap(update_of_fewer, axis_name="data")(jnp.zeros((2, 5)))


@pytest.mark.parametrize(
    "inside",
    [
        exact_mean("data"),
        onebit_jax.sign_mean("data"),
        onebit_jax.accumulate(optax.sgd(1.0), 2, "data"),
        per_worker(optax.trace(0.5), ("host", "data")),
    ],
    ids=["exact", "errors", "accumulated", "own"],
)
def test_what_exchanges_over_the_same_workers_is_refused(inside):
    mesh = mesh_over({"host": 2, "data": 2})
    tx = optax.chain(per_worker(inside, "data"), exact_mean("data"))
    with pytest.raises(ValueError, match=r"over \['data'\]: give one without"):
        onebit_jax.init(tx, jnp.zeros(5), mesh)
