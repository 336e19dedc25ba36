"""1-bit LAMB: its ratios, its factors, its layers."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deepspeed_exchange import DeepSpeedSignMean
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import Compressed, exact_mean, freeze_at, onebit_lamb, sign_mean

WORKERS = 4


@pytest.mark.parametrize("bias_correction", [True, False])
def test_layers_of_zeros_have_the_ratio_one(bias_correction):
    """Weights that start from zero, and gradients that come after the freeze."""
    tx = onebit_lamb(
        0.1, exact_mean("data"), freeze_at(2), eps=1.0, ratio_limits=(0.2, 0.3),
        bias_correction=bias_correction,
    )  # fmt: skip
    params = {"empty": jnp.zeros((0, 3)), "late": jnp.ones(3), "new": jnp.zeros(3)}
    run = Workers(tx, params, mesh_of(2))
    for step in range(4):
        on = {"empty": 0.0, "late": float(step >= 2), "new": 1.0}
        own = {k: jnp.full((2, *p.shape), on[k]) for k, p in params.items()}
        updates = run.update(own, params)
        chex.assert_tree_all_finite((updates, run.state))
        if step == 0:
            direction = 0.5 if bias_correction else 0.1 / (np.sqrt(1e-3) + 1)
            np.testing.assert_allclose(updates["new"], -0.1 * direction, rtol=1e-5)
        params = optax.apply_updates(params, updates)
    # The ratio of the second step, clipped, is all that is counted of "new".
    new = run.state[0].ratio[-1] / run.state[0].ratio_weight[-1]
    np.testing.assert_allclose(new, 0.2, rtol=1e-6)
    assert np.all(np.asarray(params["late"]) < 1) == bias_correction


def test_layers_are_exchanged_at_one_magnitude():
    """Of one scale for all, that of the largest layer would be all that is seen."""
    sizes = {"large": 1e3, "none": 0.0, "small": 1e-3, "tiny": 1e-12}
    tx = onebit_lamb(0.1, DeepSpeedSignMean(fused=True), freeze_at(1), b1=0.5)
    params = {k: jnp.ones(64) for k in sizes}
    run, rng = Workers(tx, params, mesh_of(2)), np.random.default_rng(0)
    signs = {k: rng.choice([-1.0, 1.0], size=64) for k in sizes}
    own = {k: jnp.asarray([size * signs[k]] * 2, "f4") for k, size in sizes.items()}
    for _ in range(4):
        run.update(own, params)
    factors = dict(zip(sizes, run.state[0].magnitude, strict=True))
    mean = sum(0.5 * size for size in sizes.values()) / 3
    for k in ("large", "small"):
        np.testing.assert_allclose(factors[k], mean / (0.5 * sizes[k]), rtol=1e-5)
        mu = np.asarray(run.state[0].mu[k])
        assert np.mean(np.sign(mu) == signs[k]) > 0.95
        assert 0.3 * sizes[k] < np.abs(mu).mean() < 3 * sizes[k]
    assert factors["none"] == factors["tiny"] == 1
    assert onebit_jax.metrics(run.state)["compressed"] == 1


def test_a_row_without_gradients_does_not_run_away():
    """Its frozen variance is zero: a step of it was 1e5 learning rates long."""
    lr, rows = 0.01, 6
    tx = onebit_lamb(lr, sign_mean("data", block_size=64), freeze_at(10))
    params = jnp.ones((rows, 50))
    run, rng = Workers(tx, params, mesh_of(WORKERS)), np.random.default_rng(0)
    for step in range(60):
        g = rng.normal(0.2, 1, size=(WORKERS, rows, 50))
        g[:, 2] = 0 if step < 30 else np.abs(g[:, 2])
        before = params
        updates = run.update(jnp.asarray(g, jnp.float32), params)
        params = optax.apply_updates(params, updates)
        state = run.state[0]
        ratio = float((state.ratio / state.ratio_weight)[0]) if step else 10.0
        largest = 3 * lr * ratio * float(state.factor[0])
        if step >= 10:
            assert np.abs(np.asarray(params - before)).max() <= 1.001 * largest
    assert np.all(np.asarray(params[2]) < 0.95), "the row must learn"
    told = onebit_jax.metrics(run.state)
    np.testing.assert_allclose(told["floored_share"], 1 / rows, rtol=1e-6)
    assert told["largest_factor"] == state.factor[0]
    norm = np.linalg.norm(np.asarray(state.magnitude) * np.asarray(state.mu))
    errors = np.asarray(state.exchange.server_error.value)
    np.testing.assert_allclose(
        told["server_error"], np.linalg.norm(errors) / norm, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"ratio_limits": (1.0, 0.1)}, ValueError, "ratio_limits must be two numbers"),
        ({"factor_limits": (-1, 1)}, ValueError, "factor_limits must be two numbers"),
        ({"ratio_decay": 1.0}, ValueError, "ratio_decay must be"),
        ({"factor_change": -0.1}, ValueError, "factor_change must not be negative"),
        ({"compressed": Compressed()}, ValueError, "1-bit LAMB has no lead"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_refused(wrong, error, message):
    right = {"exchange": sign_mean("data"), "freeze": freeze_at(10)}
    with pytest.raises(error, match=message):
        onebit_lamb(0.1, **(right | wrong))
