"""1-bit Adam: its freeze, what keeps a frozen variance from hurting, its warm-up."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers.cases import tree_of
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import exact_mean, freeze_at, onebit_adam, sign_mean


def test_it_goes_on_from_adams_state():
    """Moments and count are all that the warm-up knows."""
    freeze, params = 10, tree_of(0)
    tx = onebit_adam(0.01, sign_mean("data"), freeze_at(freeze))
    run, adam = Workers(tx, params, mesh_of(4)), optax.scale_by_adam()
    first, state = run.state, adam.init(params)
    for step in range(16):
        if step == freeze - 2:
            between = jax.tree.map(lambda x: x.sharding, run.state)
        if step < freeze - 2:
            mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), tree_of(1 + step, 4))
            with jax.numpy_dtype_promotion("standard"):
                _, state = adam.update(mean, state)
        run.update(tree_of(1 + step, 4), params)
    expected = run.state[0]
    run.state = jax.device_put(optax.tree.set(first, **state._asdict()), between)
    for step in range(freeze - 2, 16):
        run.update(tree_of(1 + step, 4), params)
    assert expected.growth.measured == 1
    chex.assert_trees_all_close(run.state[0].growth, expected.growth, rtol=1e-5)
    chex.assert_trees_all_close(run.state[0].nu, expected.nu, rtol=1e-5)


def test_it_freezes_when_its_own_variance_is_stable():
    """The rule sees the 1-norm of the bias-corrected variance of all leaves."""
    interval, b2 = 4, 0.9
    rule = onebit_jax.freeze_when_stable(min_steps=1, interval=interval)
    tx = onebit_adam(0.1, sign_mean("data"), rule, b2=b2)
    run = Workers(tx, tree_of(0), mesh_of(2))
    signs = jax.tree.map(jnp.sign, tree_of(0, 2))
    same = {k: jnp.stack([s[0]] * 2) for k, s in signs.items()}
    for factors in ([1.0] * 8, [2.0**t for t in range(8)] + [128.0] * 40):
        run.state = onebit_jax.init(tx, tree_of(0), mesh_of(2))
        variance, norms, expected = 0.0, [], 0
        for t, factor in enumerate(factors, start=1):
            variance = b2 * variance + (1 - b2) * factor**2
            norms.append(variance / (1 - b2**t))
            if not expected and t > interval:
                ratio = norms[-1] / norms[-1 - interval]
                expected = t if min(ratio, 1 / ratio) >= 0.96 else 0
            run.update(jax.tree.map(lambda s, f=factor: s * f, same))
        assert expected == interval + 1 if len(factors) == 8 else expected > 20
        assert int(run.state[0].frozen_at) == expected


@pytest.mark.parametrize("wakes", [None, 15])
def test_a_row_without_gradients_does_not_run_away(wakes):
    """Its frozen variance is zero; DeepSpeed moved it by 1e5 in one step."""
    lr, rows = 0.01, 6
    tx = onebit_adam(lr, sign_mean("data", block_size=64), freeze_at(10))
    params = jnp.zeros((rows, 50))
    run = Workers(tx, params, mesh_of(4))
    rng = np.random.default_rng(0)
    for step in range(60):
        g = rng.normal(0.2, 1, size=(4, rows, 50))
        g[:, 2] = 0 if wakes is None or step < wakes else np.abs(g[:, 2])
        before = params
        updates = run.update(jnp.asarray(g, jnp.float32), params)
        params = optax.apply_updates(params, updates)
        moved = np.abs(np.asarray(params - before))
        assert moved.max() <= 3 * lr * 1.001
    if wakes is None:
        # Error feedback takes its steps back: no drift.
        assert np.abs(params[2]).max() < 10 * lr
    else:
        assert np.all(np.asarray(params[2]) < -10 * lr), "the row must learn"


def test_a_leaf_that_wakes_after_the_freeze_settles():
    """Its own variance was zero: only its power since then can say how far to go."""
    tx = onebit_adam(0.01, sign_mean("data"), freeze_at(10))
    params = {"early": jnp.full(50, 0.5), "late": jnp.full(50, 0.5)}
    run = Workers(tx, params, mesh_of(4))
    rng = np.random.default_rng(0)
    for step in range(400):
        noise = rng.normal(0, 0.1, size=(2, 4, 50)).astype(np.float32)
        g = {k: params[k][None] + n for k, n in zip(params, noise, strict=True)}
        if step < 20:
            g["late"] = jnp.zeros((4, 50))
        updates = run.update(g, params)
        params = optax.apply_updates(params, updates)
    # Without its power every step would be 3 learning rates long, for ever.
    assert np.abs(updates["late"]).max() < 0.01
    assert np.abs(params["late"]).max() < 0.05


@pytest.mark.parametrize("bias_correction", [True, False])
def test_leaves_that_are_exchanged_exactly_stay_adams(bias_correction):
    params, rates = tree_of(0), {"b1": 0.7, "b2": 0.9}
    exchange = sign_mean("data", exact_1d=True)
    assert exchange.is_exact((64,))
    assert not exchange.is_exact((64, 64))
    tx = onebit_jax.scale_by_onebit_adam(
        exchange, freeze_at(3), **rates, bias_correction=bias_correction
    )
    published = onebit_jax.scale_by_onebit_adam(
        exchange,
        freeze_at(3),
        **rates,
        bias_correction=bias_correction,
        compressed=onebit_jax.Compressed.published(),
    )
    run, frozen = (Workers(t, params, mesh_of(4)) for t in (tx, published))
    mu, nu = (dict.fromkeys(("bias", "scale"), 0.0) for _ in range(2))
    for step in range(1, 20):
        # Of gradients that grow: a variance that is frozen is too small.
        own = {k: 1.5**step * g for k, g in tree_of(step, 4).items()}
        updates, others = run.update(own, params), frozen.update(own, params)
        for k in mu:
            mean = np.mean(own[k], axis=0, dtype=float)
            mu[k] = 0.7 * mu[k] + 0.3 * mean
            nu[k] = 0.9 * nu[k] + 0.1 * mean**2
            weights = (1 - 0.7**step, 1 - 0.9**step) if bias_correction else (1, 1)
            adam = mu[k] / weights[0] / (np.sqrt(nu[k] / weights[1]) + 1e-8)
            np.testing.assert_allclose(updates[k], adam, rtol=1e-4, atol=1e-6)
    assert np.all(np.abs(others["bias"]) > 10 * np.abs(updates["bias"]))


def test_an_exact_exchange_of_hosts_freezes_no_leaf():
    """The exchange around another says what that says of shares of a leaf."""
    mesh, params = mesh_over({"host": 2, "device": 2}), jnp.zeros((16, 20))
    exchange = onebit_jax.hierarchical(exact_mean("host"), "device")
    tx, adam = onebit_adam(0.1, exchange, freeze_at(1)), optax.adam(0.1)
    run, state = Workers(tx, params, mesh), adam.init(params)
    for step in range(3):
        own = 3.0**step * tree_of(step, 4)["matrix"]
        with jax.numpy_dtype_promotion("standard"):
            expected, state = adam.update(jnp.mean(own, axis=0), state)
        np.testing.assert_allclose(run.update(own, params), expected, rtol=1e-4)


def test_a_warm_up_with_an_exchange_of_its_own_is_adam_on_its_means():
    coarse, params = onebit_jax.quantized_mean("data", 4, block_size=32), tree_of(0)
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(9), warmup_exchange=coarse)
    like = optax.chain(coarse, optax.adam(0.1))
    ours, theirs = (Workers(t, params, mesh_of(4)) for t in (tx, like))
    with jax.numpy_dtype_promotion("standard"):
        for step in range(3):
            own = tree_of(1 + step, 4)
            updates = [run.update(own, params) for run in (ours, theirs)]
            chex.assert_trees_all_close(*updates, rtol=1e-5, atol=1e-7)
    cost = onebit_jax.stage_costs(tx, params, {"data": 4})["warmup"]
    told = onebit_jax.stage_costs(coarse, params, {"data": 4})["every"]
    assert sorted(cost) == sorted(told)


@pytest.mark.parametrize("stage", [None, "warmup"])
def test_steps_before_the_freeze_can_be_differentiated(stage):
    targets = jax.random.normal(jax.random.key(0), (4, 33))

    def end(params, tx, target, **options):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params - target, state, params, **options)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params**2)

    def ours(params):
        tx = onebit_adam(0.1, sign_mean("data"), freeze_at(9))
        of_worker = jax.vmap(
            lambda target: end(params, tx, target, stage=stage), axis_name="data"
        )
        return jnp.mean(of_worker(targets))

    start = jnp.linspace(-1.0, 1.0, 33)
    with jax.numpy_dtype_promotion("standard"):
        adam = jax.grad(lambda p: end(p, optax.adam(0.1), jnp.mean(targets, axis=0)))
        np.testing.assert_allclose(jax.grad(ours)(start), adam(start), rtol=1e-4)


def test_a_warm_up_over_other_axes_is_refused():
    exchange = sign_mean("data")
    with pytest.raises(ValueError, match="warmup_exchange must be over the axes"):
        onebit_adam(0.1, exchange, freeze_at(9), warmup_exchange=exact_mean("host"))
    with pytest.raises(TypeError, match="warmup_exchange must be an exchange"):
        onebit_adam(0.1, exchange, freeze_at(9), warmup_exchange=optax.sgd(1))
    votes = onebit_jax.vote_mean("data")
    with pytest.raises(TypeError, match="votes have no scale"):
        onebit_adam(0.1, exchange, freeze_at(9), warmup_exchange=votes)
