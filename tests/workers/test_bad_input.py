"""Refusals of bad input, each a sentence that says what to do."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import (
    accumulate,
    clip_by_worker_norm,
    data_parallel,
    exact_mean,
    freeze_at,
    local_value_and_grad,
    onebit_adam,
    sign_mean,
)

TRANSFORMATIONS = {
    "sign_mean": lambda axis: sign_mean(axis),
    "exact_mean": lambda axis: exact_mean(axis),
    "onebit_adam": lambda axis: onebit_adam(0.1, sign_mean(axis), freeze_at(2)),
    "random_vote_mean": lambda axis: onebit_jax.random_vote_mean(axis),
    "binsgdm": lambda axis: onebit_jax.binsgdm(0.1, onebit_jax.vote_mean(axis)),
    "distributed_lion": lambda axis: onebit_jax.distributed_lion(
        0.1, onebit_jax.vote_mean(axis)
    ),
    "clip": lambda axis: clip_by_worker_norm(1.0, axis),
    "accumulate": lambda axis: accumulate(exact_mean(axis), 2, axis),
    "skip": lambda axis: onebit_jax.skip_nonfinite(exact_mean(axis), axis),
}
with_each = pytest.mark.parametrize(
    "make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys()
)


@with_each
def test_an_axis_that_is_not_there(make):
    with pytest.raises(
        ValueError,
        match=r"\('dta',\) is not bound: the axes here",
    ):
        Workers(make("dta"), jnp.zeros(3), mesh_of(2)).update(jnp.zeros((2, 3)))
    tx = make("data")

    def outside_of_shard_map():
        return tx.update(jnp.zeros(3), tx.init(jnp.zeros(3)), jnp.zeros(3))

    with pytest.raises(ValueError, match=r"no mesh here: make the step by"):
        outside_of_shard_map()


@pytest.mark.parametrize(
    "wrapper", ["clip_by_worker_norm", "skip_nonfinite", "accumulate"]
)
def test_a_decision_for_some_of_the_workers_alone(wrapper):
    exchange, mesh = exact_mean(("a", "b")), jax.make_mesh((2, 2), ("a", "b"))
    tx = {
        "clip_by_worker_norm": optax.chain(clip_by_worker_norm(1.0, "b"), exchange),
        "skip_nonfinite": onebit_jax.skip_nonfinite(exchange, "b"),
        "accumulate": accumulate(exchange, 2, "b"),
    }[wrapper]
    run = data_parallel(lambda p, x: jnp.sum(p) * jnp.mean(x), tx, mesh)
    with pytest.raises(ValueError, match=rf"{wrapper} is given .* over \['a'\] too"):
        run.step(*run.init(jnp.ones(3)), jnp.ones((4, 3)))


def test_a_state_that_differs_from_worker_to_worker():
    tx = optax.chain(optax.trace(0.9), sign_mean("data"))
    run = data_parallel(lambda p, x: jnp.sum(p) * jnp.mean(x), tx, mesh_of(2))
    with pytest.raises(ValueError, match=r"optimizer's state .*trace.* differs from"):
        run.step(*run.init(jnp.ones(3)), jnp.ones((2, 3)))


def test_a_mesh_without_the_axis():
    with pytest.raises(ValueError, match=r"no axis 'dta'.*'data'"):
        data_parallel(lambda p, x: p, exact_mean("dta"), mesh_of(2), axis="dta")


@pytest.mark.parametrize(("name", "how"), [("accumulate", "grad"), ("clip", "pmean")])
def test_gradients_that_are_averaged_already(name, how):
    """jax.grad of replicated parameters sums over the workers without being asked."""
    mesh, tx = mesh_of(4), TRANSFORMATIONS[name]("data")
    params = {"w": jnp.ones(3)}
    state = onebit_jax.init(tx, params, mesh)

    def step(params, state, x):
        def loss(p):
            return jnp.sum(p["w"] * x[0])

        if how == "grad":
            gradients = jax.grad(loss)(params)
        else:
            _, gradients = local_value_and_grad(loss, "data")(params)
            gradients = lax.pmean(gradients, "data")
        return tx.update(gradients, state, params)

    specs = onebit_jax.state_specs(state)
    with pytest.raises(
        ValueError, match=r"\['w'\] is already the same.*local_value_and"
    ):
        jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
                out_specs=(PartitionSpec(), specs),
            )
        )(params, state, jnp.ones((4, 3)))


@pytest.mark.parametrize("first", [True, False])
def test_a_second_exchange(first):
    adam = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    parts = [sign_mean("data"), adam] if first else [adam, sign_mean("data")]
    run = data_parallel(lambda p, x: jnp.sum(x @ p), optax.chain(*parts), mesh_of(2))
    with pytest.raises(ValueError, match="no other exchange before it"):
        run.step(*run.init(jnp.zeros(40)), jnp.ones((2, 40)))


def test_local_gradients_are_the_workers_own():
    mesh, x = mesh_of(4), jnp.arange(12.0).reshape(4, 3)

    def f(p, q, x):
        def loss(p, q):
            return jnp.sum(p * x[0]) + jnp.sum(q), x.shape

        (_, shape), (gp, gq) = local_value_and_grad(
            loss, "data", argnums=(0, -1), has_aux=True
        )(p, q)
        assert shape == (1, 3)
        return gp[None], gq[None]

    gp, gq = jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec("data"),
        )
    )(jnp.zeros(3), jnp.zeros(2), x)
    np.testing.assert_array_equal(gp, x)
    np.testing.assert_array_equal(gq, np.ones((4, 2)))


def test_data_parallel_with_a_state_of_another_number_of_workers():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    runs = {
        n: data_parallel(lambda p, x: jnp.sum(p * x), tx, mesh_of(n)) for n in (2, 4)
    }
    _, state = runs[4].init(jnp.zeros(3))
    params, _ = runs[2].init(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"for 4 workers and there are 2.*resize"):
        runs[2].step(params, jax.device_get(state), jnp.ones((4, 3)))


def test_a_state_of_workers_along_another_axis():
    runs = {
        name: data_parallel(
            lambda p, x: jnp.sum(p * x),
            onebit_adam(0.1, sign_mean(name), freeze_at(2)),
            mesh_over({name: 2}),
        )
        for name in ("a", "b")
    }
    params, state = runs["a"].init(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"along \('a',\), .* here are \('b',\): name"):
        runs["b"].step(params, state, jnp.ones((2, 3)))


def test_a_batch_that_cannot_be_shared_equally():
    run = data_parallel(lambda p, x: jnp.sum(p * x), exact_mean("data"), mesh_of(4))
    params, state = run.init(jnp.float32(0))
    for batch in (jnp.ones(6), jnp.float32(1)):
        with pytest.raises(ValueError, match="multiple of the 4 workers"):
            run.step(params, state, batch)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_leaves_that_are_not_real_numbers(dtype):
    params = {"fine": jnp.zeros(3), "odd": jnp.zeros(3, dtype)}
    told = {jnp.complex64: "its real and its imaginary part"}
    told = told.get(dtype, "out of the parameters, and pass it beside the batch")
    with pytest.raises(TypeError, match=rf"\['odd'\] is .*{told}"):
        onebit_jax.init(sign_mean("data"), params, mesh_of(2))


def test_a_stage_that_does_not_exist():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(2))
    with pytest.raises(ValueError, match=r"'warmup', 'compressed', got 'fro"):
        Workers(tx, jnp.zeros(3), mesh_of(2), stage="frozen").update(
            jnp.zeros((2, 3)), jnp.zeros(3)
        )
    # Another optimizer would take no notice of it.
    tx = optax.chain(exact_mean("data"), optax.sgd(0.1))
    run = data_parallel(lambda p, x: jnp.sum(p) * jnp.mean(x), tx, mesh_of(2))
    with pytest.raises(ValueError, match=r"no stage 'frozen': .* \(it has none\)"):
        run.step(*run.init(jnp.zeros(3)), jnp.zeros((2, 3)), stage="frozen")


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_averaged_already(has_aux):
    """Its gradients would be divided by the workers twice, silently."""

    def loss(p, x):
        mean = lax.pmean(jnp.mean(x @ p), "data")
        return (mean, {}) if has_aux else mean

    tx = optax.chain(exact_mean("data"), optax.sgd(0.1))
    run = data_parallel(loss, tx, mesh_of(2), has_aux=has_aux)
    params, state = run.init(jnp.ones(3))
    said = r"the loss is the same on every worker .* not averaged \(a count may be"
    with pytest.raises(ValueError, match=said):
        run.step(params, state, jnp.ones((2, 3)))


def test_differentiating_by_name():
    with pytest.raises(TypeError, match="by position"):
        jax.shard_map(
            lambda x: local_value_and_grad(jnp.sum, "data")(x=x)[1],
            mesh=mesh_of(2),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
        )(jnp.ones(2))


def test_an_update_that_no_exchange_has_agreed_on():
    def optimizer(beside):
        parts = {"t": onebit_adam(0.1, sign_mean("data"), freeze_at(2)), "z": beside}
        return optax.partition(parts, {"a": "t", "b": "z"})

    def step(tx):
        run = data_parallel(lambda p, x: jnp.mean(x @ p["a"] + p["b"]), tx, mesh_of(2))
        return run.step(*run.init(params), jnp.ones((2, 3)))[0]

    params = {"a": jnp.ones(3), "b": jnp.ones(())}
    message = r"\['b'\] differs from worker to worker"
    with pytest.raises(ValueError, match=message):
        step(optimizer(optax.set_to_zero()))
    with pytest.raises(ValueError, match=message):
        onebit_jax.stage_costs(optimizer(optax.set_to_zero()), params, {"data": 2})
    frozen = optax.chain(exact_mean("data"), optax.set_to_zero())
    assert step(optimizer(frozen))["b"] == 1


@pytest.mark.parametrize("batch_axes", [None, "device", ("host", "device")])
def test_an_exchange_over_other_axes_than_the_batch(batch_axes):
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device")
    )
    tx = onebit_adam(0.1, sign_mean("host"), freeze_at(2))
    run = data_parallel(lambda p, x: jnp.mean(x @ p), tx, mesh, axis=batch_axes)
    with pytest.raises(ValueError, match=r"works over \('host',\): name the same axes"):
        run.init(jnp.ones(3))


HOSTS = exact_mean("host")
DEVICES = exact_mean("device")
ALL = exact_mean(("host", "device"))


def parts(first, second):
    return optax.partition({"a": first, "b": second}, {"a": "a", "b": "b"})


def masked(tx, *names):
    return optax.masked(tx, {name: name in names for name in "ab"})


def adam(exchange):
    return optax.chain(exchange, optax.adam(0.1))


def inits(tx):
    mesh = mesh_over({"host": 2, "device": 2})
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    return data_parallel(lambda p, x: jnp.mean(x @ p["a"]), tx, mesh).init(params)


@pytest.mark.parametrize(
    "tx",
    [
        parts(adam(HOSTS), adam(DEVICES)),
        parts(adam(ALL), HOSTS),
        onebit_jax.accumulate(parts(HOSTS, DEVICES), 2, ("host", "device")),
        optax.chain(masked(adam(HOSTS), "a"), masked(adam(DEVICES), "b")),
        optax.chain(onebit_jax.per_worker(optax.trace(0.9), ALL.axes), DEVICES),
    ],
)
def test_parts_of_an_optimizer_over_different_axes(tx):
    with pytest.raises(ValueError, match=r"works over \('\w+',\): name .* every part"):
        inits(tx)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(DEVICES, parts(adam(HOSTS), HOSTS)),
        optax.chain(masked(DEVICES, "a"), masked(adam(HOSTS), "a"), masked(ALL, "b")),
        parts(optax.chain(onebit_jax.per_worker(adam(DEVICES), "host"), HOSTS), ALL),
    ],
)
def test_parts_of_an_optimizer_over_the_same_axes_in_steps(tx):
    _, state = inits(tx)
    assert jax.tree.leaves(state)


@with_each
def test_an_axis_that_is_not_the_states(make):
    """The state is right, the update is not: its axis is misspelt, or not bound."""
    right, wrong = make("data"), make("dta")
    run = Workers(right, jnp.zeros(3), mesh_of(2))

    def update(tx):
        return lambda: tx.update(jnp.zeros(3), state, jnp.zeros(3))

    state = jax.tree.map(lambda x: x[:1] if x.ndim else x, run.state)
    with pytest.raises(
        ValueError, match=r"'dta',\) is not bound: .* \('data',\); give"
    ):
        jax.shard_map(
            update(wrong), mesh=mesh_of(2), in_specs=(), out_specs=PartitionSpec()
        )()
    with (
        jax.set_mesh(mesh_of(2)),
        pytest.raises(
            ValueError, match=r"\('data',\) is not bound, though the mesh has it: call"
        ),
    ):
        jax.jit(update(right))()


def test_averages_that_nothing_records_are_told_of_once():
    tx = sign_mean("data")
    values = jnp.ones((2, 300))
    state = jax.pmap(tx.init, axis_name="data")(values)

    @functools.partial(jax.pmap, axis_name="data")
    def update(values, state):
        own, state = tx.update(values, state)
        return own, tx.update(jax.lax.pmean(values, "data"), state)

    with pytest.warns(UserWarning, match=r"leave out the jax\.lax\.pmean") as told:
        update(values, state)
    assert {(x.filename, x.lineno) for x in told} == {
        (told[0].filename, told[0].lineno)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(update, values, state)

    # What the sentence says silences it, does.
    said = re.search(r"filterwarnings\('ignore', '(.*)'\)", str(told[0].message))
    assert said
    wider = jnp.ones((2, 400))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", said[1])
        init = jax.pmap(tx.init, axis_name="data")
        jax.eval_shape(update, wider, jax.eval_shape(init, wider))


def test_workers_that_vmap_makes_are_told_nothing():
    tx = sign_mean("data")
    update = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(update, jnp.ones((2, 300)))


def test_gradients_that_would_be_summed_over_another_axis():
    """Of a loss that differs over both, with respect to what does not."""
    mesh = mesh_over({"data": 2, "host": 2})

    def gradient(axes, loss, x):
        def own(x):
            gradients = onebit_jax.local_value_and_grad(loss, axes)(jnp.ones(3), x)[1]
            return jax.lax.pmean(gradients, axes)

        rows, out = PartitionSpec(("data", "host")), PartitionSpec()
        mapped = jax.shard_map(own, mesh=mesh, in_specs=rows, out_specs=out)
        return jax.jit(mapped)(x)

    def loss(p, x):
        return jnp.mean(x @ p)

    x = jnp.arange(12.0).reshape(4, 3)
    said = r"differs over \('host',\) too, .* \('data', 'host'\)\) and in the exchange"
    with pytest.raises(ValueError, match=said):
        gradient("data", loss, x)
    right = jnp.mean(x, 0)
    np.testing.assert_allclose(gradient(("data", "host"), loss, x), right)
    averaged = gradient("data", lambda p, x: jax.lax.pmean(loss(p, x), "host"), x)
    np.testing.assert_allclose(averaged, right)
