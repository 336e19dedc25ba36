"""One worker has nobody to send signs to: it is plain Adam, whatever it is told."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import count_mean, freeze_at, quantized_mean, sign_mean

SHAPE = (40, 30)
ALONE = {
    "sign_mean": (lambda: sign_mean("data"), {"data": 1}),
    "count_mean": (lambda: count_mean("data"), {"data": 1}),
    "quantized_mean": (lambda: quantized_mean("data", 4), {"data": 1}),
    "bfloat16 errors": (
        lambda: sign_mean("data", error_dtype="bfloat16"),
        {"data": 1},
    ),
    "hierarchical": (
        lambda: onebit_jax.hierarchical(sign_mean("host"), within="device"),
        {"host": 1, "device": 2},
    ),
    "of shares": (
        lambda: onebit_jax.hierarchical(onebit_jax.exact_mean("host"), "device"),
        {"host": 1, "device": 2},
    ),
}


def gradients_of(workers, step):
    return jax.random.normal(jax.random.key(step), (workers, *SHAPE))


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_lost_and_nothing_sent(name):
    make, sizes = ALONE[name]
    mesh = mesh_over(sizes)
    run = Workers(make(), jnp.zeros(SHAPE), mesh)
    values = gradients_of(mesh.size, 0)
    agreed = run.update(values)
    np.testing.assert_allclose(agreed, values.mean(axis=0), rtol=1e-6, atol=1e-7)
    assert not any(x.any() for x in jax.tree.leaves(run.state))
    between = run.traffic(values).sent_bytes(None, next(iter(sizes)))
    told = onebit_jax.stage_costs(make(), jnp.zeros(SHAPE), mesh.shape)["every"]
    first = [each for each in told if next(iter(sizes)) in each.axes]
    assert between == onebit_jax.sent_bytes(first, {**sizes, "device": 1}) == 0


# The others are alone by the same program as signs are.
QUICK = ("sign_mean", "hierarchical", "of shares")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in ALONE],
)
def test_an_optimizer_is_plain_adam(name):
    make, sizes = ALONE[name]
    mesh = mesh_over(sizes)
    params = jnp.ones(SHAPE)
    ours = Workers(onebit_jax.onebit_adam(0.1, make(), freeze_at(3)), params, mesh)
    adam = optax.adam(0.1)
    state = adam.init(params)
    for step in range(8):
        values = gradients_of(mesh.size, step)
        with jax.numpy_dtype_promotion("standard"):
            expected, state = adam.update(values.mean(axis=0), state)
        np.testing.assert_allclose(ours.update(values), expected, rtol=1e-5, atol=1e-6)
    assert int(onebit_jax.metrics(ours.state)["frozen_at"]) == 0


def test_the_variance_is_refreshed_in_every_step():
    rule = onebit_jax.growing_intervals(1)
    tx = onebit_jax.zero_one_adam(0.1, sign_mean("data"), freeze_at(2), refresh=rule)
    run = Workers(tx, jnp.ones(SHAPE), mesh_of(1))
    for step in range(6):
        run.update(gradients_of(1, step), jnp.ones(SHAPE))
    taken = onebit_jax.steps_by_stage(run.state)
    assert int(taken["variance"]) == sum(map(int, taken.values())) == 6


@pytest.mark.parametrize("make", [onebit_jax.onebit_lamb, onebit_jax.zero_one_adam])
def test_others_do_not_freeze_either(make):
    params = jnp.ones(SHAPE)
    frozen = {}
    for workers in (1, 2):
        tx = make(0.1, sign_mean("data"), freeze_at(2))
        run = Workers(tx, params, mesh_of(workers))
        for step in range(4):
            run.update(gradients_of(workers, step), params)
        frozen[workers] = int(onebit_jax.metrics(run.state)["frozen_at"])
    assert frozen == {1: 0, 2: 2}


@pytest.mark.parametrize("make", [sign_mean, count_mean])
def test_what_several_have_left_is_paid(make):
    tx, params = make("data"), jnp.zeros(SHAPE)
    several = Workers(tx, params, mesh_of(4))
    residual = jnp.zeros(SHAPE)
    for step in range(3):
        values = gradients_of(4, step)
        residual += values.mean(axis=0) - several.update(values)
    alone = Workers(tx, params, mesh_of(1))
    alone.state = onebit_jax.resize(several.state, tx, params, mesh_of(4), mesh_of(1))
    value = gradients_of(1, 3)
    np.testing.assert_allclose(alone.update(value), value[0] + residual, atol=1e-5)
    assert not any(x.any() for x in jax.tree.leaves(alone.state))


def test_shards_of_one_worker():
    specs = {"w": P(None, "model")}
    tx = onebit_jax.per_shard(sign_mean("data"), specs)
    params = {"w": jnp.zeros((40, 32))}
    run = Workers(
        tx, params, mesh_over({"data": 1, "model": 2}), axes=("data",), specs=specs
    )
    values = {"w": jax.random.normal(jax.random.key(0), (1, 40, 32))}
    chex.assert_trees_all_close(run.update(values), {"w": values["w"][0]}, rtol=1e-6)
