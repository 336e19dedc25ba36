"""What an exchange returns is behind; 1-bit Adam sends what is new, and leads it."""

import jax.numpy as jnp
import numpy as np
import pytest
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import exact_mean, freeze_at, onebit_adam, sign_mean

SIZE, WORKERS = 4096, 4


def noise(steps, seed=0):
    """Gradients of one leaf whose values' deviations differ by a factor of 1.2."""
    rng = np.random.default_rng(seed)
    deviations = np.exp(0.2 * rng.normal(size=SIZE))
    return deviations * rng.normal(size=(steps, WORKERS, SIZE)), deviations


@pytest.mark.parametrize(
    "exchange",
    [
        exact_mean("data"),
        onebit_jax.count_mean("data"),
        sign_mean("data"),
        sign_mean("data", scale="rms"),
        onebit_jax.deepspeed_sign_mean("data"),
        onebit_jax.quantized_mean("data", 2),
    ],
    ids=["exact", "count", "sign", "rms", "deepspeed", "2 bits"],
)
def test_what_an_exchange_returns_is_behind_by_its_delay(exchange):
    """Of white noise, by the response to the mean of so many steps before."""
    gradients, deviations = noise(160)
    run = Workers(exchange, jnp.zeros(SIZE), mesh_of(WORKERS))
    means, response = gradients.mean(axis=1) / deviations, np.zeros(12)
    for step, own in enumerate(gradients):
        agreed = np.asarray(run.update(jnp.asarray(own, jnp.float32))) / deviations
        if step >= 20:
            response += [agreed @ means[step - k] for k in range(12)]
    response /= np.sum(means[20:] ** 2)
    np.testing.assert_allclose(response.sum(), 1, atol=0.06)
    delay = np.arange(12) @ response
    np.testing.assert_allclose(delay, exchange.delay, rtol=0.15, atol=0.06)


def test_what_holds_an_exchange_is_as_late_as_it():
    for whole in (
        onebit_jax.per_shard(sign_mean("data"), None),
        onebit_jax.hierarchical(sign_mean("data"), "inside"),
    ):
        assert whole.delay == sign_mean("data").delay


@pytest.mark.parametrize("as_published", [False, True])
def test_only_what_is_new_in_the_momentum_is_sent(as_published):
    """One scale a block is that of the momentum's news; of the momentum, published."""
    b1, block = 0.8, 64
    exchange = sign_mean("data", block_size=block)
    tx = onebit_adam(
        0.1,
        exchange,
        freeze_at(3),
        b1,
        **(onebit_jax.AS_PUBLISHED if as_published else {}),
    )
    run, gradients = Workers(tx, jnp.zeros(SIZE), mesh_of(WORKERS)), noise(6)[0]
    momenta = []
    for own in gradients:
        run.update(jnp.asarray(own, jnp.float32), jnp.zeros(SIZE))
        momenta.append(run.state[0].mu)
    *_, last, mu = momenta
    sent = mu if as_published else mu - b1 * last
    blocks = np.abs(np.asarray(sent)).reshape(-1, block)
    np.testing.assert_allclose(blocks, blocks[:, :1] * np.ones(block), rtol=1e-4)
    assert np.ptp(blocks[:, 0]) > 0.01 * np.mean(blocks)


def test_the_lead_makes_up_for_the_delay():
    """A slow wave in the gradients comes as late as by exact means."""
    period, steps, start = 40, 180, 60
    gradients, deviations = noise(steps)
    wave = 0.3 * deviations * np.random.default_rng(1).normal(size=SIZE)

    def phase(exchange):
        tx = onebit_adam(1.0, exchange, freeze_at(20))
        run, sums = Workers(tx, jnp.zeros(SIZE), mesh_of(WORKERS)), 0j
        for step in range(steps):
            turn = 2 * np.pi * step / period
            own = gradients[step] + wave * np.cos(turn)
            update = run.update(jnp.asarray(own, jnp.float32), jnp.zeros(SIZE))
            if step >= start:
                seen = np.asarray(update) @ (wave / deviations**2)
                sums += seen * np.exp(1j * turn)
        return np.angle(sums)

    one_step = 2 * np.pi / period
    assert abs(phase(sign_mean("data")) - phase(exact_mean("data"))) < 0.2 * one_step


def test_a_momentum_that_still_rises_from_zero_is_not_led():
    """Constant gradients, a few steps from the start, are a constant update."""
    for freeze in (1, 3):
        tx = onebit_adam(1.0, sign_mean("data"), freeze_at(freeze))
        run = Workers(tx, jnp.zeros(SIZE), mesh_of(WORKERS))
        for _ in range(freeze + 5):
            update = run.update(jnp.ones((WORKERS, SIZE)), jnp.zeros(SIZE))
            np.testing.assert_allclose(update, -1, rtol=1e-4)


def test_what_is_agreed_of_low_precision_gradients_is_float32():
    gradients = jnp.asarray(noise(4)[0], jnp.bfloat16)
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(1), b1=0.5)
    params = jnp.zeros(SIZE, jnp.bfloat16)
    run = Workers(tx, params, mesh_of(WORKERS))
    run.update(gradients[0], params)
    for own in gradients[1:]:
        last = np.asarray(run.state[0].mu)
        run.update(own, params)
        m = last / 2 + np.mean(np.asarray(own, float), axis=0) / 2
        np.testing.assert_allclose(run.state[0].mu, m, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_that_no_lead_makes_up_for_is_refused(delay):
    with pytest.raises(ValueError, match="a finite number of steps"):
        onebit_adam(0.1, exact_mean("data"), freeze_at(3), lead=delay)
