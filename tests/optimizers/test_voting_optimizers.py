"""BinSGDM and Distributed Lion: their votes, their ties, what they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanges.replayed_votes import replayed
from jax.sharding import PartitionSpec as P
from optimizers import formulas
from optimizers.cases import tree_of
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import binsgdm, distributed_lion, random_vote_mean, vote_mean

WORKERS = 4


@pytest.mark.parametrize("back", ["mean", "vote"])
def test_binsgdm_by_random_votes_is_its_formula(back):
    """With the library's random numbers, of which none is near a ratio."""
    size, decay = 300, 0.8
    exchange = random_vote_mean("data", back=back)
    run = Workers(binsgdm(1.0, exchange, decay), jnp.zeros(size), mesh_of(WORKERS))
    count = 0

    def agree(ratios):
        return replayed(ratios, count, back)

    leaf = formulas.Binsgdm(
        (size,), None, None, 0.0, decay=decay, eps=1e-8, agree=agree
    )
    for count in range(100):
        rng = np.random.default_rng(count)
        gradients = rng.normal(0.2, 1, size=(WORKERS, size)).astype(np.float32)
        gradients[:, :20] = 0
        found = run.update(gradients, jnp.zeros(size))
        expected = leaf.update(gradients.astype(float), 0.0)
        np.testing.assert_allclose(found, -expected, rtol=1e-6, atol=1e-7)


def test_with_one_worker_distributed_lion_is_optaxs():
    exact, params = optax.scale_by_lion(), tree_of(0)
    tx = onebit_jax.scale_by_distributed_lion(vote_mean("data"))
    run, state = Workers(tx, params, mesh_of(1)), exact.init(params)
    for step in range(50):
        own = tree_of(1 + step, 1)
        expected, state = exact.update(jax.tree.map(lambda g: g[0], own), state)
        chex.assert_trees_all_equal(run.update(own), expected)
    momenta = {k: m.value[0] for k, m in run.state.own.inner.trace.items()}
    chex.assert_trees_all_close(momenta, state.mu, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("back", ["majority", "mean"])
def test_what_has_no_majority_does_not_drift(back):
    """Values without gradients, and of which workers say the opposite in each step."""
    lr, params = 0.1, jnp.zeros((6, 7))
    run = Workers(
        distributed_lion(lr, vote_mean("data", back=back)), params, mesh_of(2)
    )
    gradients = np.zeros((2, 6, 7), np.float32)
    gradients[:, 3:] = np.array([1, -1])[:, None, None]
    for _ in range(21):
        updates = np.asarray(run.update(gradients, params))
        # Not all the same way, nor all of a row or column.
        assert np.abs(updates[:2].sum(axis=0)).max() < 0.01 * lr
        assert np.abs(updates.sum(axis=1)).max() < 1.01 * lr
        params = optax.apply_updates(params, updates)
        assert np.abs(params).max() < 1.01 * lr
    assert (np.abs(updates[3:]).max() > 0) == (back == "majority")


@pytest.mark.parametrize("back", ["majority", "mean"])
@pytest.mark.parametrize("workers", [3, 4])
def test_workers_without_gradients_leave_the_vote_to_the_others(workers, back):
    """Whoever the one is that has some, as of an embedding that it alone has seen."""
    tx = distributed_lion(1.0, vote_mean("data", back=back), weight_decay=0.0)

    run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers)

    @jax.jit
    def moved(batch):
        def step(_, given):
            return run.step.jitted(*given, batch)[:2]

        return jax.lax.fori_loop(0, 12, step, run.init(jnp.zeros(4)))[0]

    # All together would move by 12, or one of them by 12 / workers of the means.
    share = {(3, "majority"): 8, (4, "majority"): 6}.get((workers, back), 12 / workers)
    for one in range(workers):
        batch = np.zeros((workers, 4), np.float32)
        batch[one] = [1, -1, 3, 0]
        np.testing.assert_allclose(moved(batch), share * np.array([-1, 1, -1, 0]), 1e-6)


def test_hosts_without_gradients_leave_the_vote_to_the_others():
    """Whichever device of a host has some."""
    exchange = onebit_jax.hierarchical(vote_mean("host"), "device")
    tx, params = distributed_lion(1.0, exchange, weight_decay=0.0), jnp.zeros(3)
    run = Workers(tx, params, mesh_over({"host": 2, "device": 2}))
    gradients = np.zeros((4, 3), np.float32)
    gradients[[1, 2], [0, 1]] = 1e-9, -1e-9
    moved = sum(np.asarray(run.update(gradients, params)) for _ in range(8))
    np.testing.assert_array_equal(moved, [-4, 4, 0])


def test_where_gradients_have_stopped_binsgdm_soon_stays():
    """Long before its running means, of which the ratio is the same, underflow."""
    run = Workers(binsgdm(0.1, onebit_jax.exact_mean("data")), jnp.ones(3), mesh_of(2))
    run.update(np.ones((2, 3), np.float32), jnp.ones(3))
    for _ in range(500):
        updates = run.update(np.zeros((2, 3), np.float32), jnp.ones(3))
    assert np.abs(updates).max() < 1e-4


@pytest.mark.parametrize(
    ("workers", "back", "step"),
    [(4, "mean", 0), (3, "mean", 0.1 / 3), (4, "vote", 0.1)],
)
def test_without_gradients_binsgdm_stays_by_means_of_an_even_number(
    workers, back, step
):
    params = jnp.ones(70)
    exchange = random_vote_mean("data", back=back)
    run = Workers(binsgdm(0.1, exchange), params, mesh_of(workers))
    for _ in range(5):
        updates = run.update(np.zeros((workers, 70), np.float32), params)
        np.testing.assert_allclose(np.abs(updates), step, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "votes"), [(binsgdm, random_vote_mean), (distributed_lion, vote_mean)]
)
def test_of_hosts_and_of_shards_it_trains_too(make, votes):
    """To the least loss of a matrix, which each worker sees by samples of its own."""
    for exchange, mesh, specs in (
        (
            onebit_jax.hierarchical(votes("host"), "device"),
            {"host": 2, "device": 2},
            None,
        ),
        (
            onebit_jax.per_shard(votes("data"), {"w": P(None, "model")}),
            {"data": 2, "model": 2},
            {"w": P(None, "model")},
        ),
    ):
        axes, mesh = exchange.axes, mesh_over(mesh)
        tx = make(0.1, exchange, weight_decay=0.0)
        tx = onebit_jax.skip_nonfinite(tx, axes)
        run = onebit_jax.data_parallel(
            lambda p, x: jnp.mean((x @ (p["w"] - 1)) ** 2), tx, mesh,
            axis=axes, specs=specs,
        )  # fmt: skip
        params, state = run.init({"w": jnp.zeros((4, 6))})
        for step in range(12):
            batch = np.random.default_rng(step).normal(size=(16, 4))
            params, state, loss = jax.block_until_ready(
                run.step(params, state, batch.astype(np.float32))
            )
        assert loss < 0.5


@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        (onebit_jax.exact_mean("data"), "an exchange of votes"),
        (onebit_jax.per_shard(onebit_jax.count_mean("data"), P()), "exchange of votes"),
        (onebit_jax.random_vote_mean("data"), "draws votes by magnitudes"),
        (onebit_jax.per_shard(onebit_jax.random_vote_mean("data"), P()), "draws votes"),
    ],
)
def test_distributed_lion_refuses_what_does_not_vote_by_signs(exchange, message):
    with pytest.raises(TypeError, match=message):
        onebit_jax.init(distributed_lion(0.1, exchange), jnp.zeros(100), mesh_of(2))


@pytest.mark.parametrize("eps", [0, -1e-8, np.nan])
def test_binsgdm_refuses_to_divide_zeros_by_zeros(eps):
    with pytest.raises(ValueError, match="eps must be more than 0"):
        onebit_jax.binsgdm(0.1, onebit_jax.random_vote_mean("data"), eps=eps)
