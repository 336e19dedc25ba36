"""1-bit Adam: its stages, what keeps a frozen variance from hurting, its wrappers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    exact_mean,
    freeze_at,
    onebit_adam,
    onebit_adamw,
    sign_mean,
)

SHAPES = {"kernel": (30, 17), "bias": (17,), "scale": ()}


def params_of(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def gradients_of(step, workers=4, dtype=jnp.float32):
    rng = np.random.default_rng(1000 + step)
    return {
        k: jnp.asarray(rng.normal(0.1, 1, size=(workers, *s)), dtype)
        for k, s in SHAPES.items()
    }


def trained(tx, steps):
    run = Workers(tx, params_of(), mesh_of(4))
    for step in range(steps):
        run.update(gradients_of(step), params_of())
    return run


def schedule(count):
    return 0.01 / (1.0 + jnp.asarray(count, jnp.float32) / 50)


def test_it_goes_on_from_adams_state():
    """Moments and count are all that the warm-up knows."""
    freeze, steps, params = 10, 16, params_of()
    tx = onebit_adam(schedule, sign_mean("data"), freeze_at(freeze))
    first, run = onebit_jax.init(tx, params, mesh_of(4)), trained(tx, steps)
    expected, placed = run.state[0], jax.tree.map(lambda x: x.sharding, run.state)
    adam, growth = optax.scale_by_adam(), expected.growth
    state = adam.init(params)
    for step in range(freeze - 2):
        mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients_of(step))
        with jax.numpy_dtype_promotion("standard"):
            _, state = adam.update(mean, state)
    run.state = jax.device_put(optax.tree.set(first, **state._asdict()), placed)
    for step in range(freeze - 2, steps):
        run.update(gradients_of(step), params)
    assert growth.measured == 1
    found = run.state[0]
    chex.assert_trees_all_close(found.growth.frozen, growth.frozen, rtol=1e-5)
    chex.assert_trees_all_close(found.growth.now, growth.now, rtol=1e-5)
    chex.assert_trees_all_close(found.nu, expected.nu, rtol=1e-5)


@pytest.mark.parametrize("refresh", [None, onebit_jax.growing_intervals(16)])
def test_a_compressed_step_may_follow_adams(refresh):
    """Adam's variance has come without mean squares, and learnt in every step."""
    params = jnp.zeros((32, 32))
    tx = onebit_adam(
        1.0, exact_mean("data"), freeze_at(50), refresh=refresh, lead=None, bound=None
    )
    run = Workers(tx, params, mesh_of(2), stage="compressed")
    moments = {"count": jnp.int32(1000), "mu": params + 0.01, "nu": params + 0.6}
    run.state = optax.tree.set(run.state, **moments)
    updates = run.update(jnp.zeros((2, 32, 32)), params)
    expected = -0.9 * 0.01 / np.sqrt(0.6 / (1 - 0.999**1000))
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_a_freeze_between_two_refreshes_is_counted_where_it_was():
    refresh = onebit_jax.growing_intervals(1)
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(99), refresh=refresh)
    run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, 2)
    params, state = run.init(jnp.zeros(2))
    for stage in ("warmup", "warmup", "between", "compressed"):
        params, state, _ = run.step(params, state, jnp.ones((2, 2)), stage=stage)
    steps = {k: int(n) for k, n in onebit_jax.steps_by_stage(state).items()}
    measuring = {"compressed/measuring": 0}
    assert steps == {"warmup": 2, "between": 1, "compressed": 1, **measuring}
    assert int(onebit_jax.metrics(state)["frozen_at"]) == 3


def test_it_freezes_when_its_own_variance_is_stable():
    """The rule sees the 1-norm of the bias-corrected variance of all leaves."""
    interval, b2 = 4, 0.9
    rule = onebit_jax.freeze_when_stable(min_steps=1, interval=interval)
    tx = onebit_adam(0.1, sign_mean("data"), rule, b2=b2)
    run = Workers(tx, params_of(), mesh_of(2))
    signs = jax.tree.map(jnp.sign, gradients_of(0, 2))
    same = {k: jnp.stack([s[0]] * 2) for k, s in signs.items()}
    for factors in ([1.0] * 8, [2.0**t for t in range(8)] + [128.0] * 40):
        run.state = onebit_jax.init(tx, params_of(), mesh_of(2))
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


def test_a_static_stage_in_the_wrong_place_still_makes_sense():
    tx = onebit_adam(0.1, sign_mean("data", block_size=32), freeze_at(5))
    run = trained(tx, 2)
    short = run.state
    for step in range(2, 7):
        run.update(gradients_of(step), params_of())
    # A program of the warm-up that runs on: exact, with the variance left frozen.
    late = Workers(tx, params_of(), mesh_of(4), stage="warmup")
    late.state = run.state
    late.update(gradients_of(7), params_of())
    for kept in ("nu", "floored", "frozen_at", "exchange"):
        before, after = (getattr(r.state[0], kept) for r in (run, late))
        chex.assert_trees_all_equal(after, before)
    before, after = (r.state[0].growth.frozen for r in (run, late))
    chex.assert_trees_all_equal(after, before)
    # A program of the compression that starts early: it freezes first.
    early = Workers(tx, params_of(), mesh_of(4), stage="compressed")
    early.state = short
    early.update(gradients_of(2), params_of())
    chex.assert_trees_all_equal(early.state[0].nu, short[0].nu)
    for k, nu in short[0].nu.items():
        whole = early.state[0].growth.frozen[k].whole
        np.testing.assert_allclose(whole.squeeze(), np.mean(nu), rtol=1e-6)
    assert int(early.state[0].frozen_at) == 2


def test_a_late_program_of_the_warm_up_follows_the_mean_square_too():
    """A leaf that woke after the freeze has no variance, and has grown by infinity."""
    growth = onebit_jax.GrowthByMeanSquares(period=1)
    options = {"growth": growth, "lead": None}
    tx = onebit_adam(0.1, exact_mean("data"), freeze_at(3), **options)
    silent = {
        **gradients_of(0),
        **{k: jnp.zeros((4, *SHAPES[k])) for k in ("bias", "scale")},
    }
    both, late = (
        Workers(tx, params_of(), mesh_of(4), **stage)
        for stage in ({}, {"stage": "warmup"})
    )
    for step in range(8):
        grown = {k: 5 * g for k, g in gradients_of(step).items()}
        gradients = silent if step < 4 else grown
        updates, own = (run.update(gradients, params_of()) for run in (both, late))
        assert max(np.abs(u).max() for u in own.values()) <= 0.3
        # Of one value random sums say the square.
        np.testing.assert_allclose(own["scale"], updates["scale"], rtol=1e-5)
    assert onebit_jax.metrics(both.state)["bounded_share"] > 0


@pytest.mark.parametrize("send", ["momentum", "gradient"])
def test_one_scale_a_block_is_that_of_what_is_sent(send):
    """The momentum, or what is new in it."""
    b1, block, size = 0.8, 64, 256
    tx = onebit_adam(
        0.1, sign_mean("data", block_size=block), freeze_at(1), b1, send=send
    )
    run, momenta = Workers(tx, jnp.zeros(size), mesh_of(4)), []
    rng = np.random.default_rng(0)
    for _ in range(3):
        run.update(jnp.asarray(rng.normal(size=(4, size)), jnp.float32))
        momenta.append(np.asarray(run.state[0].mu))
    *_, last, mu = momenta
    sent = {"momentum": mu, "gradient": mu - b1 * last}
    blocks = {k: np.abs(x).reshape(-1, block) for k, x in sent.items()}
    spread = {k: np.ptp(x, axis=1).max() / x.mean() for k, x in blocks.items()}
    assert spread.pop(send) < 1e-4
    assert min(spread.values()) > 0.01


def alone(tx, stage=None):
    """The update of workers without a mesh, where it is the same for all."""
    update = functools.partial(tx.update, stage=stage)
    each = jax.vmap(update, in_axes=(0, None), out_axes=None, axis_name="data")
    return jax.jit(each)


@pytest.mark.parametrize("send", ["momentum", "gradient"])
def test_what_is_agreed_of_low_precision_gradients_is_float32(send):
    rng = np.random.default_rng(0)
    own = jnp.asarray(rng.normal(size=(4, 4, 64)), jnp.bfloat16)
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(1), b1=0.5, send=send)
    update = alone(tx)
    _, state = update(own[0], tx.init(own[0, 0]))
    for each in own[1:]:
        momentum = state[0].mu / 2 + np.mean(np.asarray(each, float), axis=0) / 2
        updates, state = update(each, state)
        np.testing.assert_allclose(state[0].mu, momentum, rtol=1e-4, atol=1e-5)
    assert updates.dtype == jnp.bfloat16


def test_warm_up_steps_after_the_freeze_are_followed_and_counted():
    """Of one value random sums say the square, so that all steps are of length 1."""
    parts = {**onebit_jax.AS_PUBLISHED, "growth": onebit_jax.GrowthByMeanSquares()}
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(20), **parts)
    update = {stage: alone(tx, stage) for stage in ("warmup", "compressed")}
    state, taken = tx.init(jnp.zeros([])), [("warmup", 120), ("compressed", 20)] * 2
    for stage, steps in taken:
        for _ in range(steps):
            updates, state = update[stage](jnp.ones(2), state)
            np.testing.assert_allclose(updates, -1, rtol=1e-4)
    assert onebit_jax.steps_by_stage(state) == {
        "warmup": 240, "compressed/measuring": 5, "compressed": 35
    }  # fmt: skip


def test_a_momentum_that_still_rises_from_zero_is_not_led():
    """Of constant gradients, compressed from the first step on."""
    parts = {**onebit_jax.AS_PUBLISHED, "lead": 2.0}
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(1), eps=1.0, **parts)
    update, state = alone(tx, "compressed"), tx.init(jnp.zeros(3))
    for _ in range(4):
        updates, state = update(jnp.ones((2, 3)), state)
        np.testing.assert_allclose(updates, -1, rtol=1e-5)


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


def test_inside_optaxs_wrappers_each_part_is_as_alone():
    """In a partition, with hyperparameters in the state or made while traced."""
    make = functools.partial(
        onebit_adamw, exchange=sign_mean("data", block_size=32), freeze=freeze_at(3)
    )
    options = {"learning_rate": schedule, "b2": 0.99, "weight_decay": 0.1}
    with jax.numpy_dtype_promotion("standard"):
        inject = optax.inject_hyperparams
        parts = {
            "kernel": inject(make, hyperparam_dtype=jnp.float32)(**options),
            "bias": inject(make, static_args="learning_rate")(**options),
            "scale": optax.chain(exact_mean("data"), optax.adamw(**options)),
        }
        tx = optax.partition(parts, {name: name for name in SHAPES})
        bits = {k: p for k, p in params_of().items() if k != "scale"}
        nested = Workers(tx, params_of(), mesh_of(4))
        # Alone as in the partition: a leaf's place decides its random signs.
        alone = [Workers(make(**options), {k: p}, mesh_of(4)) for k, p in bits.items()]
        adam = optax.adamw(**options)
        scale = params_of()["scale"]
        state = adam.init(scale)
        for step in range(8):
            own = gradients_of(step)
            found = nested.update(own, params_of())
            expected = {}
            for run, (k, p) in zip(alone, bits.items(), strict=True):
                expected |= run.update({k: own[k]}, {k: p})
            expected["scale"], state = adam.update(jnp.mean(own["scale"]), state, scale)
            chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    assert int(onebit_jax.metrics(nested.state)["count"]) == 8


def test_a_freeze_before_the_learning_rate_has_risen_is_warned_of():
    rising = optax.linear_schedule(0.0, 1e-3, 100)
    with pytest.warns(UserWarning, match="learning rate still rises"):
        onebit_adam(rising, sign_mean("data"), freeze_at(50))
    with pytest.warns(UserWarning, match="learning rate still rises"):
        onebit_adamw(
            rising,
            sign_mean("data"),
            onebit_jax.freeze_when_stable(min_steps=50, interval=10),
        )
    onebit_adam(rising, sign_mean("data"), freeze_at(100))  # a warning is an error
    # A schedule is given what Optax gives it, an array.
    onebit_adam(lambda t: -t.astype(jnp.float32), sign_mean("data"), freeze_at(1))


def test_a_schedule_of_injected_numbers_is_not_looked_at():
    def make(peak):
        rising = optax.linear_schedule(0.0, peak, 100)
        return onebit_adam(rising, sign_mean("data"), freeze_at(50))

    tx = optax.inject_hyperparams(make)(peak=1e-3)
    run = Workers(tx, jnp.zeros(3), mesh_of(2))
    run.update(jnp.ones((2, 3)))
    assert int(onebit_jax.metrics(run.state)["count"]) == 1


def test_a_variance_of_adams_is_not_forgotten_by_the_first_refresh():
    tx = onebit_jax.scale_by_onebit_adam(
        exact_mean("data"), freeze_at(2000), refresh=onebit_jax.growing_intervals(16)
    )
    run = Workers(tx, jnp.zeros(3), mesh_of(2))
    run.state = run.state._replace(count=jnp.int32(1000), nu=jnp.ones(3))
    run.update(jnp.zeros((2, 3)))
    np.testing.assert_allclose(run.state.nu, 0.999, rtol=1e-6)


def test_a_warm_up_with_an_exchange_of_its_own_is_adam_on_its_means():
    coarse = onebit_jax.quantized_mean("data", 4, block_size=32)
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(9), warmup_exchange=coarse)
    like = optax.chain(coarse, optax.adam(0.1))
    ours, theirs = (Workers(t, params_of(), mesh_of(4)) for t in (tx, like))
    with jax.numpy_dtype_promotion("standard"):
        for step in range(3):
            chex.assert_trees_all_close(
                *(
                    run.update(gradients_of(step), params_of())
                    for run in (ours, theirs)
                ),
                rtol=1e-5,
                atol=1e-7,
            )
    cost = onebit_jax.stage_costs(tx, params_of(), {"data": 4})
    told = coarse.wire_cost(params_of(), {"data": 4})
    assert sorted(cost["warmup"]) == sorted(told)


def test_a_warm_up_over_other_axes_is_refused():
    with pytest.raises(ValueError, match="warmup_exchange must be over the axes"):
        onebit_adam(
            0.1, sign_mean("data"), freeze_at(9), warmup_exchange=exact_mean("host")
        )
    with pytest.raises(TypeError, match="warmup_exchange must be an exchange"):
        onebit_adam(0.1, sign_mean("data"), freeze_at(9), warmup_exchange=optax.sgd(1))


def test_a_warm_up_with_steps_between_refreshes_sends_what_each_stage_does():
    coarse, signs = onebit_jax.quantized_mean("data", 4), sign_mean("data")
    tx = onebit_adam(
        0.1, signs, freeze_at(9), warmup_exchange=coarse,
        refresh=onebit_jax.growing_intervals(2),
    )  # fmt: skip
    cost = onebit_jax.stage_costs(tx, params_of(), {"data": 4})
    for stage, exchange in {"warmup": coarse, "between": signs}.items():
        told = exchange.wire_cost(params_of(), {"data": 4})
        assert sorted(cost[stage]) == sorted(told)


@pytest.mark.parametrize("without", ["floor", "bound"])
def test_what_signs_have_moved_before_it_had_a_gradient_stays_bounded(without):
    """At the next refresh its momentum is not zero, and its variance is."""
    lr = 0.01
    tx = onebit_adam(
        lr, sign_mean("data"), freeze_at(20),
        refresh=onebit_jax.growing_intervals(2), **{without: None},
    )  # fmt: skip
    run = Workers(tx, jnp.zeros((8, 32)), mesh_of(4))
    rng = np.random.default_rng(0)
    for _ in range(20):
        g = rng.normal(size=(4, 8, 32))
        g[:, 0] = 0
        updates = run.update(jnp.asarray(g, jnp.float32))
        assert np.abs(updates[0]).max() <= 3 * lr * 1.001


def test_what_is_no_rule_of_intervals_is_refused():
    with pytest.raises(TypeError, match="refresh must be a IntervalRule or None"):
        onebit_adam(0.1, sign_mean("data"), freeze_at(9), refresh=16)


def test_steps_between_refreshes_are_no_stable_variance():
    stable = onebit_jax.freeze_when_stable(min_steps=9, interval=4)
    refresh = onebit_jax.growing_intervals(2)
    with pytest.raises(ValueError, match="leave refresh out, or use freeze_at"):
        onebit_adam(0.1, sign_mean("data"), stable, refresh=refresh)
