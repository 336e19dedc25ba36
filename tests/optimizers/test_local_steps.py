"""Local steps: any optimizer inside, any exchange and any optimizer outside."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optimizers.cases import relaxed
from optimizers.local_rounds import (
    BLOCK,
    INNER,
    ONE_BIT,
    RATE,
    SHAPE,
    Rounds,
    errors_of,
    loss_fn,
    targets,
)
from virtual_workers import mesh_of, mesh_over

import onebit_jax
from onebit_jax import every, exact_mean, local_steps, sign_mean

RESUMED = 53
MEAN = exact_mean("data")


def saved_and_restored(tree):
    """Through a file, into arrays that are sharded as those were."""
    leaves, structure = jax.tree.flatten(tree)
    file = io.BytesIO()
    np.savez(file, *jax.device_get(leaves))
    file.seek(0)
    with np.load(file) as saved:
        restored = [
            jax.device_put(saved[f"arr_{i}"], leaf.sharding)
            for i, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(structure, restored)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("workers", "devices", "interval"), [(2, 1, 8), (4, 1, 5), (2, 2, 3)]
)
def test_is_its_transcription_by_one_bit(inner, workers, devices, interval):
    """100 steps, saved and resumed in the middle of an interval."""
    optimizer, transcribed = INNER[inner]
    axes = ("host", "device") if devices > 1 else ("host",)
    mesh = mesh_over(dict(zip(axes, (workers, devices), strict=False)))
    optimizer = relaxed(optimizer)
    if devices > 1:
        optimizer = optax.chain(exact_mean("device"), optimizer)
    tx = local_steps(optimizer, ONE_BIT, every(interval))
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    params, state = run.init(jnp.zeros(SHAPE))
    rounds = Rounds(transcribed, state, workers, devices, interval)
    for step in range(1, 101):
        if step == RESUMED:
            assert step % interval != 1
            params, state = saved_and_restored((params, state))
        params, state, _ = run.step(params, state, targets(step, workers * devices))
        rounds.check(step, params, state)
    steps = onebit_jax.steps_by_stage(state)
    assert int(steps["sync"]) == 100 // interval


def test_with_plain_sgd_in_every_step_it_is_data_parallel_sgd():
    mesh = mesh_of(4)
    plain = optax.chain(MEAN, optax.sgd(0.1))
    results = []
    for tx in (plain, local_steps(optax.sgd(0.1), MEAN, every(1))):
        run = onebit_jax.data_parallel(loss_fn, tx, mesh)
        params, state = run.init(jnp.ones(SHAPE))
        for step in range(5):
            params, state, loss = run.step(params, state, targets(step, 4))
        results.append((params, loss))
    np.testing.assert_allclose(*(x for x, _ in results), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*(x for _, x in results), rtol=1e-5)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.9, 0.8)])
def test_an_outer_nesterov_takes_the_mean_distance_for_a_gradient(rate, momentum):
    """As DiLoCo's, MaxText's and MuLoCo's; its rate is not in the errors."""
    outer = optax.sgd(rate, momentum, nesterov=True)
    exchange = sign_mean("data", block_size=BLOCK, exact_below=0)
    states = []
    for each in (None, outer):
        tx = local_steps(optax.sgd(RATE), exchange, every(2), each)
        run = onebit_jax.data_parallel(loss_fn, tx, mesh_of(2))
        params, state = run.init(jnp.zeros(SHAPE))
        for step in range(2):
            params, state, _ = run.step(params, state, targets(step, 2))
        states.append((np.asarray(params), errors_of(state.exchange)))
    (mean, errors), (moved, same) = states
    np.testing.assert_allclose(moved, rate * (1 + momentum) * mean, rtol=1e-5)
    for x, y in zip(errors, same, strict=True):
        assert np.any(x)
        np.testing.assert_array_equal(x, y)
    # Its momentum goes on: exactly, of distances that are known.
    tx = local_steps(optax.sgd(1.0), MEAN, every(1), outer)
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=2)
    p, state = run.init(jnp.float32(0))
    expected = trace = 0.0
    for _ in range(4):
        p, state, _ = run.step(p, state, jnp.array([1.0, 3.0]))
        trace = momentum * trace + 2
        expected -= rate * (momentum * trace + 2)
        np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_a_local_step_has_no_collective_between_workers():
    inner = optax.chain(exact_mean("device"), optax.sgd(0.1))
    mesh = mesh_over({"host": 2, "device": 2})
    tx = local_steps(inner, sign_mean("host"), every(4))
    run = onebit_jax.data_parallel(loss_fn, tx, mesh)
    params, state = run.init(jnp.zeros(SHAPE))
    step = run.step.lower(params, state, targets(0, 4), stage="local").compile()
    collectives = onebit_jax.traffic(step, mesh).collectives
    assert {c.axes for c in collectives} == {("device",)}


def test_a_host_inside_hierarchical_is_one_worker():
    mesh = mesh_over({"host": 2, "device": 2})
    adam = relaxed(optax.adam(0.1))
    between, sync = exact_mean("host"), every(3)
    results = []
    for tx in (
        local_steps(adam, onebit_jax.hierarchical(between, within="device"), sync),
        local_steps(optax.chain(exact_mean("device"), adam), between, sync),
    ):
        run = onebit_jax.data_parallel(loss_fn, tx, mesh)
        params, state = run.init(jnp.zeros(SHAPE))
        for step in range(1, 8):
            params, state, _ = run.step(params, state, targets(step, 4))
        results.append((params, state.moved.value))
    (mine, moved), (expected, _) = results
    np.testing.assert_allclose(mine, expected, atol=1e-6)
    first, second = moved
    assert np.any(first != second), "hosts step by themselves"


def test_a_host_inside_hierarchical_sends_once():
    def between(exchange):
        tx = local_steps(optax.sgd(0.1), exchange, every(4))
        costs = onebit_jax.stage_costs(tx, jnp.zeros(2**13), {"host": 2, "device": 4})
        assert {t.axes for t in costs["local"]} <= {("device",)}
        return sum(t.bytes for t in costs["sync"] if "host" in t.axes)

    once = onebit_jax.hierarchical(sign_mean("host"), within="device")
    assert 4 * between(once) == between(sign_mean("host"))


@pytest.mark.parametrize(
    ("rule", "stages"),
    [
        (every(3), ["local", "local", "sync", "local", None]),
        (every(3), ["local", "sync", "local", "local"]),
        (every(8).ending_at(3), ["local", "sync"]),
    ],
    ids=["at intervals", "early", "at the end"],
)
def test_workers_do_not_step_alone_where_a_synchronisation_is_due(rule, stages):
    run = onebit_jax.simulated(
        lambda p, x: jnp.mean(x) * p, local_steps(optax.sgd(0.5), MEAN, rule), workers=1
    )
    params, state = run.init(jnp.float32(0))
    for stage in stages:
        params, state, _ = run.step(params, state, jnp.ones(1), stage=stage)
    with pytest.raises(ValueError, match="an exchange is due, and 'local' has none"):
        run.step(params, state, jnp.ones(1), stage="local")
    params, state, _ = run.step(params, state, jnp.ones(1), stage="sync")
    assert float(params) == -0.5 * (len(stages) + 1)


def test_a_synchronisation_that_a_step_of_ones_own_left_out_stays_due():
    tx = local_steps(optax.sgd(0.5), MEAN, every(3))
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=1)
    params, state = run.init(jnp.float32(0))
    for _ in range(4):
        params, state, _ = run.step.jitted(params, state, jnp.ones(1), stage="local")
    params, state, _ = run.step(params, state, jnp.ones(1))
    assert float(params) == -2.5


def test_steps_that_accumulate_may_name_a_stage_each():
    tx = local_steps(optax.sgd(0.5), MEAN, every(2))
    run = onebit_jax.simulated(
        lambda p, x: jnp.mean(x) * p, onebit_jax.accumulate(tx, 2, "data"), workers=1
    )
    params, state = run.init(jnp.float32(0))
    for stage in ("local", "local", "local", "sync"):
        params, state, _ = run.step(params, state, jnp.ones(1), stage=stage)
    assert float(params) == -1


def trained(tx, workers, steps, params, state, first=0):
    run = onebit_jax.data_parallel(loss_fn, tx, mesh_of(workers))
    if state is None:
        params, state = run.init(params)
    for step in range(first, first + steps):
        params, state, _ = run.step(params, state, targets(step, workers))
    return params, state


def test_another_number_of_workers_begins_at_the_mean_of_these():
    tx = local_steps(optax.trace(0.5), MEAN, every(4))
    params, state = trained(tx, 4, 2, jnp.zeros(SHAPE), None)
    before = np.asarray(onebit_jax.mean_params(params, state))
    momenta = np.asarray(state.inner.inner.trace.value).mean(axis=0)
    new = onebit_jax.resize(state, tx, params, mesh_of(4), mesh_of(2))
    for own in new.moved.value:
        np.testing.assert_allclose(own, before, rtol=1e-6, atol=1e-6)
    for own in new.inner.inner.trace.value:
        np.testing.assert_allclose(own, momenta, rtol=1e-6, atol=1e-6)
    assert int(new.sync.waited) == 2, "the interval goes on"
    mesh = mesh_of(2)
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    params, new = trained(tx, 2, 2, params, new, first=2)
    assert int(new.synchronised) == 1
    assert not np.any(new.moved.value)


def test_a_worker_whose_gradients_are_not_finite_stays_where_it_is():
    inner = optax.apply_if_finite(relaxed(optax.adam(0.1)), 5)
    tx = local_steps(inner, MEAN, every(4))
    run = onebit_jax.data_parallel(loss_fn, tx, mesh_of(2))
    params, state = run.init(jnp.zeros(SHAPE))
    for step in range(4):
        each = targets(step, 2)
        before = np.asarray(state.moved.value)
        if step == 2:
            each = each.at[1, 3, 4].set(np.nan)
        params, state, _ = run.step(params, state, each)
        if step == 2:
            np.testing.assert_array_equal(state.moved.value[1], before[1])
            assert np.any(state.moved.value[0] != before[0])
    assert np.isfinite(params).all()
    assert np.asarray(state.inner.inner.total_notfinite.value).tolist() == [0, 1]


@pytest.mark.parametrize("exchange", [MEAN, sign_mean("data", block_size=BLOCK)])
def test_a_distance_that_is_not_finite_is_every_workers_from_the_next_round(exchange):
    """Nobody is told in its interval, and nothing hides it afterwards."""
    run = onebit_jax.simulated(
        loss_fn, local_steps(optax.sgd(RATE), exchange, every(2)), workers=2
    )
    params, state = run.init(jnp.zeros(SHAPE))
    each = targets(0, 2)
    params, state, _ = run.step(params, state, each.at[1, 3, 4].set(jnp.nan))
    assert np.isfinite(params).all()
    healthy, ill = state.moved.value
    assert np.isfinite(healthy).all()
    assert np.isnan(ill[3, 4])
    params, state, _ = run.step(params, state, each)
    assert np.isnan(params[3, 4])
    assert not np.any(state.moved.value)


def test_an_exchange_inside_a_wrapper_that_cannot_hold_it_is_refused():
    inner = optax.apply_if_finite(optax.chain(exact_mean("device"), optax.sgd(0.1)), 5)
    tx = local_steps(inner, exact_mean("host"), every(4))
    with pytest.raises(ValueError, match="apply_if_finite cannot hold an exchange"):
        onebit_jax.init(tx, jnp.zeros(3), mesh_over({"host": 2, "device": 2}))


def test_small_steps_of_16_bit_parameters_add_up():
    """In float32, where none of them alone would change a parameter of 1."""
    tx = local_steps(optax.sgd(2.0**-12), MEAN, every(64))
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * jnp.sum(p), tx, workers=2)
    params, state = run.init(jnp.ones(3, jnp.bfloat16))
    for step in range(64):
        assert bool(jnp.all(params == 1))
        batch = jnp.ones(2, jnp.bfloat16)
        params, state, _ = run.step(params, state, batch)
        assert state.moved.value.dtype == jnp.float32, step
    assert params.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params, float), 1 - 64 * 2.0**-12)


def test_the_last_step_of_a_run_synchronises():
    tx = local_steps(optax.sgd(0.5), MEAN, every(8).ending_at(3))
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=2)
    params, state = run.init(jnp.float32(0))
    found = []
    for _ in range(4):
        params, state, _ = run.step(params, state, jnp.array([1.0, 3.0]))
        found.append(float(params))
    assert found == [0, 0, -3, -3]


def test_parts_of_the_parameters_synchronise_in_turn():
    """The step that sends most sends a part, and each part is trained as if alone."""
    begin, rate, workers = {"a": 1, "b": 3}, 0.25, 2
    exchange = sign_mean("data", block_size=BLOCK, exact_below=0)

    def in_turn(exchange):
        rules = {name: every(4, first=first) for name, first in begin.items()}
        parts = {n: local_steps(optax.sgd(rate), exchange, r) for n, r in rules.items()}
        return optax.partition(parts, {name: name for name in begin})

    zeros, sizes = {name: jnp.zeros(SHAPE) for name in begin}, {"data": workers}
    whole = local_steps(optax.sgd(rate), exchange, every(4))
    each, at_once = (
        {
            stage: onebit_jax.sent_bytes(cost, sizes)
            for stage, cost in onebit_jax.stage_costs(tx, zeros, sizes).items()
        }
        for tx in (in_turn(exchange), whole)
    )
    assert each["a:sync"] == each["b:sync"] == at_once["sync"] / 2 > 0
    assert each["a:local"] == each["b:local"] == 0

    run = onebit_jax.data_parallel(
        lambda p, x: sum(loss_fn(each, x) for each in p.values()),
        in_turn(MEAN),
        mesh_of(workers),
    )
    params, state = run.init(zeros)
    agreed, moved = dict.fromkeys(begin, 0), dict.fromkeys(begin, 0)
    for step in range(1, 9):
        batch = targets(step, workers)
        params, state, _ = run.step(params, state, batch)
        for name, first in begin.items():
            ahead = agreed[name] + moved[name] - np.asarray(batch).mean(axis=0)
            moved[name] = moved[name] - rate * ahead
            if step % 4 == first:
                agreed[name], moved[name] = agreed[name] + moved[name], 0
            np.testing.assert_allclose(params[name], agreed[name], atol=1e-5)


def test_weight_decay_is_of_a_workers_own_parameters_and_schedules_count_steps():
    rates = jnp.array([0.5, 0.25, 0.5])
    inner = optax.chain(
        optax.add_decayed_weights(0.5), optax.scale_by_learning_rate(lambda t: rates[t])
    )
    tx = local_steps(inner, MEAN, every(3))
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=1)
    params, state = run.init(jnp.float32(1))
    for _ in range(3):
        params, state, _ = run.step(params, state, jnp.zeros(1))
    np.testing.assert_allclose(params, (1 - 0.25) * (1 - 0.125) * (1 - 0.25))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((optax.identity(), every(2)), "needs an exchange, such as"),
        ((onebit_jax.vote_mean("data"), every(2)), "votes have no scale"),
        ((MEAN, 8), "sync must be a rule of intervals"),
    ],
)
def test_parts_of_another_type_are_refused(parts, message):
    with pytest.raises(TypeError, match=message):
        local_steps(optax.sgd(0.1), *parts)
