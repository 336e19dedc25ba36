"""Local steps beside NumPy: with other workers in mid-interval, and outer steps."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from optimizers.cases import relaxed
from optimizers.local_rounds import (
    INNER,
    ONE_BIT,
    RATE,
    SHAPE,
    Rounds,
    errors_of,
    loss_fn,
    means_of_teams,
    targets,
)
from virtual_workers import mesh_over

import onebit_jax
from onebit_jax import every, exact_mean, local_steps


def restored_on(tx, mesh, before, params, state):
    """Through a file that knows no devices, as a checkpoint of the workers before."""
    file = io.BytesIO()
    np.savez(file, params, *jax.device_get(jax.tree.leaves(state)))
    file.seek(0)
    with np.load(file) as saved:
        first, *arrays = saved.values()
    params = jax.device_put(first, NamedSharding(mesh, PartitionSpec()))
    old_mesh = AbstractMesh(tuple(before.values()), tuple(before))
    like = onebit_jax.abstract_state(tx, params, mesh, saved_on=old_mesh)
    leaves, structure = jax.tree.flatten(like)
    arrays = [
        jax.device_put(x, leaf.sharding) for x, leaf in zip(arrays, leaves, strict=True)
    ]
    state = jax.tree.unflatten(structure, arrays)
    return params, onebit_jax.resize(state, tx, params, old_mesh, mesh)


def resize(rounds, workers):
    """All of so many new workers begin with the mean of the old ones."""

    def means(each):
        return np.repeat(each.mean(axis=0, keepdims=True), workers, axis=0)

    own = rounds.own
    rounds.workers, rounds.moved, own.m = workers, means(rounds.moved), means(own.m)
    if hasattr(own, "v"):
        own.v = means(own.v)
    rounds.errors = means(rounds.errors[0]), rounds.errors[1]


@pytest.mark.parametrize(
    ("inner", "before", "after"),
    [
        ("adam", {"host": 4}, {"host": 2}),
        ("muon", {"host": 2, "device": 2}, {"host": 3, "device": 2}),
    ],
)
def test_goes_on_with_other_workers_in_the_middle_of_an_interval(inner, before, after):
    """Each new worker begins at the mean of the old ones' parameters and moments.

    It has the mean of their errors; the interval and the inner steps count on.
    """
    interval, steps, resumed = 5, 30, 13
    optimizer, transcribed = INNER[inner]
    optimizer = relaxed(optimizer)
    if "device" in before:
        optimizer = optax.chain(exact_mean("device"), optimizer)
    tx = local_steps(optimizer, ONE_BIT, every(interval))
    workers, devices = before["host"], before.get("device", 1)
    run = onebit_jax.data_parallel(loss_fn, tx, mesh_over(before))
    params, state = run.init(jnp.zeros(SHAPE))
    rounds = Rounds(transcribed, state, workers, devices, interval)
    for step in range(1, steps + 1):
        if step == resumed:
            workers, mesh = after["host"], mesh_over(after)
            run = onebit_jax.data_parallel(loss_fn, tx, mesh)
            params, state = restored_on(tx, mesh, before, params, state)
            resize(rounds, workers)
            for found, expected in zip(
                errors_of(state.exchange), rounds.errors, strict=True
            ):
                assert np.any(expected)
                np.testing.assert_allclose(found, expected, atol=1e-6)
        params, state, _ = run.step(params, state, targets(step, workers * devices))
        rounds.check(step, params, state)
    assert int(state.synchronised) == steps // interval


@pytest.mark.parametrize(
    ("inner", "rate", "momentum"), [("adam", 0.3, 0.9), ("muon", 0.9, 0.8)]
)
def test_outer_steps_of_maxtext_and_muloco(inner, rate, momentum):
    """Their defaults, without what MuLoCo compresses; inner moments go on, as theirs.

    m ← μ m + mean Δ and p ← p − η (μ m + mean Δ), where Δ is p less a worker's own.
    """
    interval, workers = 3, 3
    optimizer, transcribed = INNER[inner]
    tx = local_steps(
        relaxed(optimizer),
        exact_mean("host"),
        every(interval),
        optax.sgd(rate, momentum, nesterov=True),
    )
    run = onebit_jax.data_parallel(loss_fn, tx, mesh_over({"host": workers}))
    params, state = run.init(jnp.ones(SHAPE))
    own, p, m, moved = transcribed(), np.ones(SHAPE), 0, 0
    for step in range(1, 10 * interval + 1):
        params, state, _ = run.step(params, state, targets(step, workers))
        moved = moved - RATE * own(p + moved - means_of_teams(step, workers, 1))
        if step % interval == 0:
            delta = -moved.mean(axis=0)
            m = momentum * m + delta
            p, moved = p - rate * (momentum * m + delta), 0
        np.testing.assert_allclose(params, p, atol=5e-4)
    assert np.abs(p - 1).max() > 1
