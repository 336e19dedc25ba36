"""0/1 Adam: its intervals, its workers' own parameters, its stages without exchange."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optimizers import formulas
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    every,
    exact_mean,
    freeze_at,
    growing_intervals,
    sign_mean,
    zero_one_adam,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adam(before_freeze="sign"), "before_freeze must be 'momentum'"),
        (lambda: adam(decay="none"), "decay must be 'agreed'"),
        (lambda: adam(compressed=onebit_jax.Compressed()), "0/1 Adam has no lead"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("part", ["refresh", "sync", "variance_exchange"])
def test_parts_of_another_type_are_refused(part):
    with pytest.raises(TypeError, match=f"{part} must be"):
        adam(**{part: 16})


def adam(learning_rate=0.1, exchange=None, **options):
    options = {"sync": growing_intervals(2, longest=4), "b2": 0.9} | options
    exchange = exchange or exact_mean("data")
    return zero_one_adam(learning_rate, exchange, freeze_at(3), **options)


def loss_fn(p, target):
    return 0.5 * jnp.sum((p - jnp.mean(target, axis=0)) ** 2)


@functools.cache
def targets():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)


@pytest.mark.parametrize("static", [False, True])
def test_each_worker_computes_its_gradients_at_its_own_parameters(static):
    tx, mesh = adam(), mesh_of(2)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    params, state = run.init(jnp.zeros(5))
    own_params = jax.jit(
        jax.shard_map(
            lambda p, s: onebit_jax.own_params(p, s)[None],
            mesh=mesh,
            in_specs=(P(), onebit_jax.state_specs(state)),
            out_specs=P("data"),
        )
    )
    mean_params = jax.jit(onebit_jax.mean_params)
    refreshes = formulas.due_steps(16, 20)
    syncs = formulas.due_steps(2, 20, 4)
    leaf = formulas.ZeroOneAdam(
        (5,), None, 3, 0.0, refreshes=refreshes, syncs=syncs,
        b1=0.9, b2=0.9, eps=1e-8,
    )  # fmt: skip
    p, differed = np.zeros(5), 0
    for step in range(20):
        own = p + 0.1 * leaf.moved
        p = p - 0.1 * leaf.update(own - np.asarray(targets(), float), p)
        alone = step >= 3 and step - 2 not in syncs
        # Of a stage without an exchange losses are each worker's own.
        stage = {"stage": "local"} if static and alone else {}
        params, state, loss = run.step(params, state, targets(), **stage)
        losses = 0.5 * np.sum((own - np.asarray(targets())) ** 2, axis=1)
        losses = losses if stage else losses.mean()
        assert loss.shape == losses.shape
        np.testing.assert_allclose(loss, losses, rtol=1e-4)
        np.testing.assert_allclose(params, p, rtol=1e-4, atol=1e-5)
        expected = p + 0.1 * np.broadcast_to(leaf.moved, (2, 5))
        each = own_params(params, state)
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)
        mean = mean_params(params, state)
        np.testing.assert_allclose(mean, expected.mean(0), rtol=1e-4, atol=1e-5)
        differed += np.ptp(leaf.moved, axis=0).max() > 0.1
    assert differed >= 8, "no worker is ever alone"
    with pytest.raises(ValueError, match=r"call it inside jax\.shard_map"):
        onebit_jax.own_params(params, state)


def test_a_step_alone_has_no_collective_and_does_not_ask_whether_to_freeze():
    def asked(*args):
        raise AssertionError(args)

    rule = onebit_jax.FreezeRule(tuple, asked, earliest=1)
    tx = zero_one_adam(0.1, sign_mean("data"), rule)
    run = Workers(tx, jnp.zeros(500), mesh_of(4), stage="local")
    gradients = jnp.ones((4, 500))
    assert not run.traffic(gradients, jnp.zeros(500)).collectives
    assert not run.update(gradients, jnp.zeros(500)).any()


def test_parameters_of_64_bits_keep_them_where_a_worker_has_moved():
    with jax.enable_x64(True):
        params = jnp.asarray([1 + 1e-12, 1.0])
        own = onebit_jax.WorkerLocal(jnp.zeros((2, 2), "f4"), ("data",), "average")
        with jax.set_mesh(mesh_of(2)):
            state = adam().init(params)._replace(moved=own)
        moved = onebit_jax.mean_params(params, state)
        np.testing.assert_array_equal(moved, params)


def test_averaged_gradients_are_refused_where_nothing_is_exchanged():
    tx, mesh = adam(), mesh_of(2)
    state = onebit_jax.init(tx, jnp.zeros(5), mesh)
    specs = onebit_jax.state_specs(state)

    def update(gradients, state):
        mean = jax.lax.pmean(gradients[0], "data")
        return tx.update(mean, state, jnp.zeros(5), stage="local")

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    with pytest.raises(ValueError, match="already the same on every worker"):
        jax.eval_shape(mapped, targets(), state)


def test_a_learning_rate_that_begins_at_zero_keeps_the_momentum():
    run = Workers(
        adam(lambda count: jnp.where(count > 1, 0.1, 0.0)), jnp.zeros(5), mesh_of(2)
    )
    own = targets()
    for _ in range(2):
        assert not run.update(own, jnp.zeros(5)).any()
    np.testing.assert_allclose(run.state.own_mu.value, (1 - 0.9**2) * own, rtol=1e-5)
    # Beside the gradient's own root.
    mean = np.asarray(own).mean(axis=0)
    np.testing.assert_allclose(
        run.update(own, jnp.zeros(5)), -0.1 * np.sign(mean), rtol=1e-4
    )


def test_a_learning_rate_of_zero_keeps_the_errors():
    """Such a step moves nothing, so that its message is still to be sent."""
    rates = jnp.array([0.1, 0.1, 0.0, 0.1])
    exchange = sign_mean("data", exact_below=0)
    run = Workers(adam(lambda t: rates[t], exchange=exchange), jnp.zeros(5), mesh_of(2))
    for _ in range(2):
        run.update(targets(), jnp.zeros(5))
    before = run.state.exchange.small_error.value
    assert np.abs(before).max() > 0
    assert not run.update(targets(), jnp.zeros(5)).any()
    np.testing.assert_array_equal(run.state.exchange.small_error.value, before)


@pytest.mark.parametrize("decay", ["agreed", "accumulated"])
def test_a_schedule_of_weight_decay_goes_on(decay):
    """Without gradients, and a momentum that keeps it, decay is all that moves."""

    def rate(count):
        return 1 - 0.1 * jnp.asarray(count, jnp.float32)

    tx = adam(rate, b1=0.0, weight_decay=weight_decay, sync=every(1), decay=decay)
    run = Workers(tx, jnp.ones(5), mesh_of(2))
    for step in range(6):
        updates = run.update(jnp.zeros((2, 5)), jnp.ones(5))
        expected = -rate(step) * weight_decay(step)
        np.testing.assert_allclose(updates, expected, rtol=1e-5)


def weight_decay(count):
    return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))


@pytest.mark.parametrize(("base", "earliest"), [(1.0, 4), (2.0, 20)])
def test_it_freezes_when_its_refreshed_variance_is_stable(base, earliest):
    """And not between two refreshments, where it is the same."""
    rule = onebit_jax.freeze_when_stable(min_steps=1, interval=2)
    tx = zero_one_adam(0.1, exact_mean("data"), rule, b2=0.5, refresh=every(4))
    run = Workers(tx, jnp.zeros(5), mesh_of(2))
    variance, last, expected = 0.0, 0.0, 0
    for step in range(1, 41):
        scale = base ** min(step, 16)
        run.update(scale * jnp.ones((2, 5)), jnp.zeros(5))
        refreshed = 1 + step // 4
        if not expected and (step == 1 or step % 4 == 0):
            variance = variance / 2 + scale**2 / 2
            norm = variance / (1 - 0.5**refreshed)
            expected = step if last / norm >= 0.96 else 0
            last = norm
    assert expected >= earliest
    assert int(run.state.frozen_at) == expected


def test_a_variance_has_an_exchange_with_errors_of_its_own():
    coarse = onebit_jax.quantized_mean("data", 4)
    runs = [
        Workers(tx, jnp.zeros(500), mesh_of(2))
        for tx in (adam(variance_exchange=coarse), coarse)
    ]
    variance = 0.0
    for step in range(2):
        own = np.random.default_rng(step).normal(size=(2, 500)).astype(np.float32)
        _, mean = (run.update(own, jnp.zeros(500)) for run in runs)
        variance = 0.9 * variance + 0.1 * np.asarray(mean) ** 2
    np.testing.assert_allclose(runs[0].state.nu, variance, rtol=1e-4, atol=1e-7)
    chex.assert_trees_all_close(
        runs[0].state.variance_exchange, runs[1].state, rtol=1e-5, atol=1e-6
    )


def test_the_first_step_has_a_variance_whatever_the_rule():
    run = Workers(adam(refresh=every(4)), jnp.zeros(5), mesh_of(2))
    mean = np.asarray(targets()).mean(axis=0)
    update = run.update(targets(), jnp.zeros(5))
    np.testing.assert_allclose(update, -0.1 * np.sign(mean), rtol=1e-4)
    assert int(onebit_jax.steps_by_stage(run.state)["variance"]) == 1
