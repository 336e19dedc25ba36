"""BinSGDM and Distributed Lion: their formulas, their ties, what they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanges.replayed_votes import replayed
from jax.sharding import PartitionSpec as P
from optimizers import formula_votes
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import binsgdm, distributed_lion, random_vote_mean, vote_mean

SHAPES = {"bias": (17,), "kernel": (30, 17), "matrix": (16, 20), "scale": ()}
DECAYED = {"bias": False, "kernel": True, "matrix": True, "scale": False}
WORKERS = 4


def tree_of(seed, workers=None):
    rng, leading = np.random.default_rng(seed), () if workers is None else (workers,)
    return {
        k: jnp.asarray(rng.normal(0.1, 1, size=(*leading, *s)), jnp.float32)
        for k, s in SHAPES.items()
    }


def gradients_of(step):
    """A row that never has gradients, and one that has them on one worker late."""
    gradients = {k: np.array(g) for k, g in tree_of(1 + step, WORKERS).items()}
    kernel = gradients["kernel"]
    kernel[:, 3] = 0
    kernel[slice(None) if step < 10 else slice(1, None), 4] = 0
    return gradients


FORMULAS = {
    "BinSGDM": (binsgdm, onebit_jax.exact_mean("data"), formula_votes.Binsgdm, {}),
    **{
        f"Distributed Lion, {name}": (
            distributed_lion,
            exchange,
            formula_votes.DistributedLion,
            {"agree": agree},
        )
        for name, exchange, agree in (
            ("majority", vote_mean("data"), formula_votes.majority),
            ("mean", vote_mean("data", back="mean"), formula_votes.mean_vote),
        )
    },
}


@pytest.mark.parametrize("name", FORMULAS)
def test_is_its_formula(name):
    make, exchange, leaf, options = FORMULAS[name]
    b1, b2, lr, decay = 0.8, 0.95, 0.01, 0.1
    decays = {"decay": b1, "eps": 1e-3} if make is binsgdm else {"b1": b1, "b2": b2}
    tx = make(lr, exchange, **decays, weight_decay=decay, mask=DECAYED)
    params = tree_of(0)
    run = Workers(tx, params, mesh_of(WORKERS))
    expected = {k: np.asarray(p, float) for k, p in params.items()}
    leaves = {
        k: leaf(s, b1, b2, 1e-3, None, None, **options) for k, s in SHAPES.items()
    }
    for step in range(100):
        gradients = gradients_of(step)
        params = optax.apply_updates(params, run.update(gradients, params))
        for k, each in leaves.items():
            update = each.update(gradients[k].astype(float))
            update = update + decay * DECAYED[k] * expected[k]
            expected[k] = expected[k] - lr * update
            np.testing.assert_allclose(
                params[k], expected[k], rtol=1e-4, atol=1e-5,
                err_msg=f"{k} after step {step + 1}",
            )  # fmt: skip
    moments = {"mu": "m", "magnitude": "b"} if make is binsgdm else {"mu": "m"}
    for moment, its in moments.items():
        for k, each in leaves.items():
            found = getattr(run.state[0], moment).value[k]
            np.testing.assert_allclose(found, getattr(each, its), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("back", ["mean", "vote"])
def test_binsgdm_by_random_votes_is_its_formula(back):
    """With the library's random numbers, of which none is near a ratio."""
    size, decay = 300, 0.8
    exchange = random_vote_mean("data", back=back)
    run = Workers(binsgdm(1.0, exchange, decay), jnp.zeros(size), mesh_of(WORKERS))
    count = 0

    def agree(ratios):
        return replayed(ratios, count, back)

    leaf = formula_votes.Binsgdm((size,), decay, None, 1e-8, None, None, agree=agree)
    for count in range(100):
        rng = np.random.default_rng(count)
        gradients = rng.normal(0.2, 1, size=(WORKERS, size)).astype(np.float32)
        gradients[:, :20] = 0
        found = run.update(gradients, jnp.zeros(size))
        expected = leaf.update(gradients.astype(float))
        np.testing.assert_allclose(found, -expected, rtol=1e-6, atol=1e-7)


def test_with_one_worker_distributed_lion_is_optaxs():
    exact, params = optax.scale_by_lion(), tree_of(0)
    tx = onebit_jax.scale_by_distributed_lion(vote_mean("data"))
    run, state = Workers(tx, params, mesh_of(1)), exact.init(params)
    for step in range(50):
        own = tree_of(1 + step, 1)
        expected, state = exact.update(jax.tree.map(lambda g: g[0], own), state)
        chex.assert_trees_all_equal(run.update(own), expected)
    chex.assert_trees_all_close(
        jax.tree.map(lambda m: m[0], run.state.mu.value), state.mu, rtol=1e-6, atol=1e-7
    )


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


OPTIMIZERS = {
    "BinSGDM": lambda exchange, **options: binsgdm(0.1, exchange, **options),
    "Distributed Lion": lambda exchange, **options: distributed_lion(
        0.1, exchange, **options
    ),
}
EXCHANGES = {"BinSGDM": random_vote_mean, "Distributed Lion": vote_mean}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def optimizer(name):
    exchange = EXCHANGES[name]("data")
    tx = OPTIMIZERS[name](exchange, weight_decay=0.01)
    return onebit_jax.skip_nonfinite(tx, exchange.axes)


@each_optimizer
def test_of_hosts_and_of_shards_it_trains_too(name):
    """To the least loss of a matrix, which each worker sees by samples of its own."""
    for exchange, mesh, specs in (
        (
            onebit_jax.hierarchical(EXCHANGES[name]("host"), "device"),
            {"host": 2, "device": 2},
            None,
        ),
        (
            onebit_jax.per_shard(EXCHANGES[name]("data"), {"w": P(None, "model")}),
            {"data": 2, "model": 2},
            {"w": P(None, "model")},
        ),
    ):
        axes, mesh = exchange.axes, mesh_over(mesh)
        tx = onebit_jax.skip_nonfinite(
            OPTIMIZERS[name](exchange, weight_decay=0.0), axes
        )
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


@each_optimizer
def test_hyperparameters_may_be_in_the_state(name):
    exchange = EXCHANGES[name]("data")
    options = {"learning_rate": 0.1, "weight_decay": 0.01}
    make = {"BinSGDM": binsgdm, "Distributed Lion": distributed_lion}[name]
    decays = {"decay": 0.8} if name == "BinSGDM" else {"b1": 0.8, "b2": 0.9}
    with jax.numpy_dtype_promotion("standard"):
        inject = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
        injected = inject(exchange=exchange, **options, **decays)
        params, own = tree_of(0), tree_of(1, WORKERS)
        runs = [
            Workers(tx, params, mesh_of(WORKERS))
            for tx in (injected, make(exchange=exchange, **options, **decays))
        ]
        ours, plain = (run.update(own, params) for run in runs)
    chex.assert_trees_all_close(ours, plain, rtol=1e-6)


@each_optimizer
def test_averaged_gradients_are_refused(name):
    """Though the worker's own means make of them something that differs."""
    tx = optax.chain(onebit_jax.exact_mean("data"), optimizer(name))
    with pytest.raises(ValueError, match=r"is already the same.*local_value_and_grad"):
        Workers(tx, tree_of(0), mesh_of(2)).update(tree_of(1, 2), tree_of(0))


@each_optimizer
def test_a_state_of_other_leaves_is_refused(name):
    run = Workers(optimizer(name), tree_of(0), mesh_of(2))
    own = tree_of(1, 2) | {"bias": jnp.zeros((2, 1))}
    with pytest.raises(ValueError, match="was not made for these leaves"):
        run.update(own, tree_of(0) | {"bias": jnp.zeros(1)})


@each_optimizer
def test_what_is_no_exchange_or_no_real_number_is_refused(name):
    with pytest.raises(TypeError, match=r"needs an exchange, such as .*vote_mean"):
        OPTIMIZERS[name](optax.identity())
    with pytest.raises(TypeError, match="exchanges real floating-point leaves only"):
        onebit_jax.init(optimizer(name), jnp.zeros(3, jnp.int32), mesh_of(2))


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
