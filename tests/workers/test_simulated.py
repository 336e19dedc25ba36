"""Simulated workers compute what workers of a mesh do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_workers import mesh_of

import onebit_jax

WORKERS = 4
EXCHANGES = {
    "sign_mean": onebit_jax.sign_mean("data", block_size=32, exact_below=20),
    "count_mean": onebit_jax.count_mean("data", block_size=32, exact_below=20),
    "vote_mean": onebit_jax.vote_mean("data"),
    "random_vote_mean": onebit_jax.random_vote_mean("data", back="vote"),
}
# A matrix learns by each exchange, and by each optimizer, all in one program.
PARTS = {
    "adam": onebit_jax.onebit_adamw(
        0.01, onebit_jax.sign_mean("data", block_size=32), onebit_jax.freeze_at(2)
    ),
    "binsgdm": onebit_jax.binsgdm(0.01, onebit_jax.random_vote_mean("data")),
    "lion": onebit_jax.distributed_lion(0.01, onebit_jax.vote_mean("data")),
    **{name: optax.chain(x, optax.sgd(0.01)) for name, x in EXCHANGES.items()},
}
PARAMS = {
    name: {"w": jnp.linspace(-1.0, 1.0, 70).reshape(7, 10), "b": jnp.zeros(10)}
    for name in PARTS
}
TX = onebit_jax.skip_nonfinite(
    optax.chain(
        onebit_jax.clip_by_worker_norm(1.0, "data"),
        optax.partition(PARTS, {name: name for name in PARTS}),
    ),
    "data",
)


def loss_fn(params, batch, shift):
    own = shift * jax.lax.axis_index("data").astype(jnp.float32)
    losses = {
        name: jnp.mean((batch @ p["w"] + p["b"][None] - own) ** 2)
        for name, p in params.items()
    }
    return sum(losses.values(), start=jnp.float32(0)), losses


@pytest.mark.slow
def test_simulated_workers_learn_as_those_of_a_mesh():
    """Shares of the batch, errors of each worker, and what they agree on."""
    runs = [
        onebit_jax.data_parallel(loss_fn, TX, mesh_of(WORKERS), has_aux=True),
        onebit_jax.simulated(loss_fn, TX, WORKERS, has_aux=True),
    ]
    rng = np.random.default_rng(0)
    states = [run.init(PARAMS) for run in runs]
    for _ in range(4):
        batch = jnp.asarray(rng.normal(size=(8, 7)), jnp.float32)
        results = [
            jax.block_until_ready(run.step(*state, batch, jnp.float32(0.5)))
            for run, state in zip(runs, states, strict=True)
        ]
        states = [result[:2] for result in results]
    expected, got = (jax.device_get(result) for result in results)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map_with_path(
        lambda path, x, y: np.testing.assert_allclose(
            x, y, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        ),
        got,
        expected,
    )


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_the_state_is_as_on_a_mesh_of_as_many_devices(workers):
    """So that either goes on with the other's."""
    run = onebit_jax.simulated(loss_fn, TX, workers)
    _, state = jax.eval_shape(run.init, PARAMS)
    told = onebit_jax.abstract_state(TX, PARAMS, mesh_of(workers))
    assert jax.tree.structure(state) == jax.tree.structure(told)
    for x, y in zip(*map(jax.tree.leaves, (state, told)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_a_batch_or_a_stage_that_makes_no_sense_is_refused():
    run = onebit_jax.simulated(loss_fn, TX, WORKERS, has_aux=True)
    states = jax.eval_shape(run.init, PARAMS)
    shapes = {n: jax.ShapeDtypeStruct((n, 7), jnp.float32) for n in (6, 8)}
    with pytest.raises(ValueError, match="multiple of the 4 workers"):
        run.step.lower(*states, shapes[6], jnp.float32(0))
    with pytest.raises(ValueError, match=r"no stage 'later': .* \('warm"):
        run.step.lower(*states, shapes[8], jnp.float32(0), stage="later")


def test_what_a_mesh_would_refuse_is_refused():
    signs = onebit_jax.sign_mean("data")
    tx = optax.MultiSteps(optax.chain(signs, optax.sgd(0.1)), 2)
    with pytest.raises(ValueError, match=r"onebit_jax\.accumulate"):
        onebit_jax.simulated(loss_fn, tx, 2).init(PARAMS)


def test_an_update_that_no_exchange_has_agreed_on():
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1), 2)
    params, state = run.init({"w": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"\['w'\] differs from worker .*exact_mean"):
        run.step(params, state, jnp.ones((2, 4)))


def test_simulated_workers_may_have_empty_leaves():
    tx = onebit_jax.distributed_lion(
        0.1, onebit_jax.vote_mean("data"), weight_decay=0.0
    )
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p["w"]), tx, 2)
    params, state = run.init({"none": jnp.zeros((0, 3)), "w": jnp.ones(4)})
    params, state, _ = run.step(params, state, jnp.ones((2, 4)))
    assert state[0].own.inner.trace["none"].value.shape == (2, 0, 3)
    np.testing.assert_allclose(params["w"], 0.9, rtol=1e-6)


def test_a_state_of_another_number_of_workers():
    tx = optax.chain(onebit_jax.sign_mean("data"), optax.sgd(0.1))
    four, two = (
        onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, n) for n in (4, 2)
    )
    with pytest.raises(
        ValueError, match=r"for 4 workers and there are 2 here: .*resize"
    ):
        two.step(*four.init(jnp.zeros(3)), jnp.ones((4, 3)))


def test_an_axis_that_is_not_told():
    tx = optax.chain(onebit_jax.sign_mean("host"), optax.sgd(0.1))
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, 2)
    with pytest.raises(ValueError, match=r"simulated\(axis=...\) give this name"):
        run.init(jnp.zeros(3))
