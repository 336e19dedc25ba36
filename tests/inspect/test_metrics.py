"""Metrics, against NumPy on the state's own arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    GrowthByMeanSquares,
    freeze_at,
    onebit_adam,
    sign_mean,
    skip_nonfinite,
)

FREEZE = 3


def optimizer():
    adam = onebit_adam(
        0.1,
        sign_mean("data", block_size=32),
        freeze_at(FREEZE),
        compressed=onebit_jax.Compressed(growth=GrowthByMeanSquares(period=5)),
    )
    return skip_nonfinite(optax.chain(optax.identity(), adam), "data")


def norm(tree):
    squares = (np.sum(np.square(np.asarray(x, float))) for x in jax.tree.leaves(tree))
    return np.sqrt(sum(squares))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_metrics_are_of_the_state(axis_type):
    params = {"w": jnp.zeros((20, 9)), "b": jnp.zeros(9)}
    run = Workers(optimizer(), params, mesh_of(4, axis_type))
    rng = np.random.default_rng(0)
    for step in range(8):
        g = {
            k: jnp.asarray(rng.normal(size=(4, *p.shape)), jnp.float32)
            for k, p in params.items()
        }
        if step <= FREEZE:  # one of them is skipped
            g["b"] = g["b"].at[:, :2].set(0)
        if step in (1, 6):
            g["b"] = g["b"].at[2, 0].set(jnp.nan)
        run.update(g, params)
        measured = jax.device_get(onebit_jax.metrics(run.state))
        adam = run.state.inner[1][0]
        skipped = (step >= 1) + (step >= 6)
        taken = step + 1 - skipped
        assert measured["skipped"] == skipped
        assert measured["count"] == taken
        assert measured["compressed"] == (taken >= FREEZE)
        assert measured["frozen_at"] == (FREEZE if taken >= FREEZE else 0)
        told = onebit_jax.steps_by_stage(run.state)
        assert list(told) == ["warmup", "compressed/measuring", "compressed"]
        measuring = int(taken >= 5)
        assert told == {
            "warmup": min(taken, FREEZE),
            "compressed/measuring": measuring,
            "compressed": max(taken - FREEZE, 0) - measuring,
        }
        low = 2 / (20 * 9 + 9) if taken >= FREEZE else 0
        np.testing.assert_allclose(measured["floored_share"], low, rtol=1e-6)
        exchange, momentum = adam.exchange, norm(adam.mu)
        np.testing.assert_allclose(
            measured["worker_error"],
            norm((exchange.worker_error, exchange.small_error)) / np.sqrt(4) / momentum,
            rtol=1e-5,
        )
        np.testing.assert_allclose(
            measured["server_error"], norm(exchange.server_error) / momentum, rtol=1e-5
        )
    assert measured["worker_error"] > 0
    assert measured["server_error"] > 0


def test_of_several_optimizers_the_largest_is_told():
    adam = onebit_adam(0.1, sign_mean("data"), freeze_at(1))
    tx = optax.partition({"a": adam, "b": adam}, {"x": "a", "y": "b"})
    params = {"x": jnp.zeros(40), "y": jnp.zeros(5)}
    run = Workers(tx, params, mesh_of(2))
    rng = np.random.default_rng(0)
    for _ in range(3):
        run.update(
            {
                k: jnp.asarray(rng.normal(size=(2, p.size)), jnp.float32)
                for k, p in params.items()
            },
            params,
        )
    measured = onebit_jax.metrics(run.state)
    errors = optax.tree.get_all_with_path(run.state, "small_error")
    momenta = optax.tree.get_all_with_path(run.state, "mu")
    ratios = [
        norm(e) / np.sqrt(2) / norm(m)
        for (_, e), (_, m) in zip(errors, momenta, strict=True)
    ]
    np.testing.assert_allclose(measured["worker_error"], max(ratios), rtol=1e-5)


def test_other_states_have_no_such_metrics():
    assert onebit_jax.metrics(optax.sgd(0.1).init(jnp.zeros(3))) == {}
    nested = skip_nonfinite(skip_nonfinite(optax.sgd(0.1), "data"), "data")
    state = nested.init(jnp.zeros(3))
    state = state._replace(inner=state.inner._replace(skipped=jnp.int32(2)))
    assert onebit_jax.metrics(state)["skipped"] == 2


def test_a_model_may_have_attributes_of_the_same_names():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        kernel: jax.Array
        wrapper: jax.Array

        def metrics(self, x):
            return x

    model = Model(jnp.ones((8, 8)), jnp.ones((8, 8)))
    clip = onebit_jax.clip_by_worker_norm(1.0, "data")
    adam = onebit_jax.onebit_adam(0.1, onebit_jax.sign_mean("data"), freeze_at(1))
    state = onebit_jax.init(optax.chain(clip, adam), model, mesh_of(2))
    assert {"count", "clipped_share"} < onebit_jax.metrics(state).keys()
