"""Skipping, accumulating and clipping around an exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    accumulate,
    clip_by_worker_norm,
    data_parallel,
    exact_mean,
    freeze_at,
    onebit_adam,
    onebit_adamw,
    sign_mean,
    skip_nonfinite,
)

WORKERS, SIZE = 4, 300


def adam(freeze=3):
    return onebit_adamw(0.01, sign_mean("data", block_size=64), freeze_at(freeze))


def gradients(step, workers=WORKERS):
    rng = np.random.default_rng(step)
    return jnp.asarray(rng.normal(0.1, 1, size=(workers, SIZE)), jnp.float32)


def start():
    return jnp.asarray(np.random.default_rng(0).normal(size=SIZE), jnp.float32)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "make", [adam, lambda: optax.chain(exact_mean("data"), optax.sgd(0.1))]
)
def test_accumulating_is_one_step_on_the_mean(make):
    every = 4
    run = Workers(accumulate(make(), every, "data"), start(), mesh_of(WORKERS))
    whole = Workers(make(), start(), mesh_of(WORKERS))
    params = whole_params = start()
    for step in range(6):
        parts = [gradients(10 * step + k) for k in range(every)]
        for k, g in enumerate(parts):
            before = bits(params)
            updates = run.update(g, params)
            params = optax.apply_updates(params, updates)
            assert (bits(params) == before) == (k < every - 1)
        mean = sum(g / every for g in parts)
        whole_params = optax.apply_updates(
            whole_params, whole.update(mean, whole_params)
        )
        np.testing.assert_allclose(params, whole_params, rtol=0, atol=1e-5)
    assert int(run.state.micro_step) == 0


@pytest.mark.parametrize(("every", "then", "taken"), [(8, 2, 6), (2, 8, 8)])
def test_an_accumulation_goes_on_in_another_number_of_steps(every, then, taken):
    """The mean is that of all gradients; fewer steps than are behind it end it."""
    params = start()
    mean = optax.chain(exact_mean("data"), optax.sgd(1.0))
    before, after = (
        Workers(accumulate(mean, steps, "data"), params, mesh_of(WORKERS))
        for steps in (every, then)
    )
    begun = min(every, taken) - 1
    for step in range(begun):
        before.update(gradients(step), params)
    after.state = before.state
    for step in range(begun, taken):
        updates = after.update(gradients(step), params)
    expected = np.mean([gradients(step) for step in range(taken)], axis=(0, 1))
    np.testing.assert_allclose(updates, -expected, rtol=1e-5, atol=1e-6)
    assert int(after.state.micro_step) == 0
    assert not jax.tree.leaves(after.state.own)[0].any()


def test_low_precision_gradients_are_accumulated_in_float32():
    every = 64
    tx = accumulate(optax.chain(exact_mean("data"), optax.sgd(1.0)), every, "data")
    params = jnp.zeros(SIZE, jnp.bfloat16)
    run = Workers(tx, params, mesh_of(WORKERS))
    parts = [gradients(k).astype(jnp.bfloat16) for k in range(every)]
    for g in parts:
        updates = run.update(g, params)
    mean = np.mean([np.asarray(g, float) for g in parts], axis=(0, 1))
    # The mean is rounded a few times; a sum of 64 in bfloat16 would be off by more.
    assert np.abs(np.asarray(updates, float) + mean).max() < 2e-3


def test_a_bad_gradient_among_accumulated_ones_is_left_out():
    """And where types are not checked as well."""
    tx = skip_nonfinite(accumulate(adam(), 2, "data"), "data")
    run = Workers(tx, start(), mesh_of(WORKERS), check_vma=False)
    run.update(gradients(0), start())
    run.update(gradients(1).at[1, 1].set(jnp.nan), start())
    assert int(run.state.inner.micro_step) == 1
    assert int(run.state.skipped) == 1
    updates = run.update(gradients(2), start())
    assert np.all(np.isfinite(updates))
    assert np.asarray(updates).any()


def test_clipping_is_by_the_root_mean_square_of_the_workers_norms():
    g = gradients(0) * jnp.arange(1.0, WORKERS + 1)[:, None]
    norm = np.sqrt(np.mean(np.sum(np.square(np.asarray(g, float)), axis=1)))
    for limit in (norm / 3, norm * 3):
        tx = optax.chain(clip_by_worker_norm(limit, "data"), exact_mean("data"))
        clipped = Workers(tx, start(), mesh_of(WORKERS)).update(g)
        expected = np.mean(g, axis=0) * min(1, limit / norm)
        np.testing.assert_allclose(clipped, expected, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(clipped) <= limit * 1.0001


def test_gradients_whose_norm_overflows_are_skipped_behind_clipping():
    """And are not taken for zeros."""
    tx = optax.chain(exact_mean("data"), optax.sgd(1.0))
    clipped = optax.chain(clip_by_worker_norm(1.0, "data"), skip_nonfinite(tx, "data"))
    run = Workers(clipped, start(), mesh_of(2))
    run.update(jnp.ones((2, SIZE)).at[0, 0].set(2e19))
    assert int(run.state[1].skipped) == 1
    assert np.isfinite(run.update(jnp.ones((2, SIZE)))).all()
    assert int(run.state[1].skipped) == 1


def test_a_factor_that_float16_cannot_hold_clips_float16():
    tx = optax.chain(clip_by_worker_norm(1.0, "data"), exact_mean("data"))
    params = jnp.zeros(400_000, jnp.float16)
    updates = Workers(tx, params, mesh_of(2)).update(jnp.full((2, 400_000), 6e4, "f2"))
    np.testing.assert_allclose(updates, 1 / np.sqrt(400_000), rtol=2e-3)


def test_clipped_steps_are_counted_but_for_skipped_ones():
    """The share is of the steps that were taken."""
    exact = optax.chain(clip_by_worker_norm(20.0, "data"), exact_mean("data"))
    run = Workers(skip_nonfinite(exact, "data"), start(), mesh_of(WORKERS))
    assert onebit_jax.metrics(run.state)["clipped_share"] == 0
    shares = []
    for factor in (1.0, 9.0, np.nan, 1.0, np.inf, 9.0):
        run.update(factor * gradients(0))  # whose norm is about 17
        shares.append(float(onebit_jax.metrics(run.state)["clipped_share"]))
    np.testing.assert_allclose(shares, [0, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 2])
    norm = onebit_jax.metrics(run.state)["worker_norm"]
    np.testing.assert_array_equal(jax.tree.leaves(run.state.inner[0]), [4, 2, norm])
    squares = jnp.square(9.0 * gradients(0))
    np.testing.assert_allclose(norm, jnp.sqrt(jnp.sum(squares) / WORKERS), rtol=1e-5)


def test_clipping_does_not_jump_at_the_freeze():
    """The same gradients get the same factor in both stages."""
    seen = []

    def record():
        def update(updates, state, params=None):
            del params
            norm = jnp.sqrt(jnp.sum(jnp.square(updates)))
            return updates, onebit_jax.WorkerLocal(norm[None], ("data",), "average")

        def init(params):
            del params
            held = 1 if "data" in jax.sharding.get_abstract_mesh().manual_axes else 4
            return onebit_jax.WorkerLocal(jnp.zeros(held), ("data",), "average")

        return optax.GradientTransformation(init, update)

    tx = optax.chain(clip_by_worker_norm(1.0, "data"), record(), adam(freeze=3))
    run = Workers(tx, start(), mesh_of(WORKERS))
    for _ in range(6):
        run.update(gradients(0), start())
        seen.append(np.asarray(run.state[1].value))
    for norms in seen:
        np.testing.assert_array_equal(norms, seen[0])


@pytest.mark.parametrize(
    ("wrap", "instead"),
    [
        (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "accumulate"),
        (lambda tx: optax.apply_if_finite(tx, 3), "skip_nonfinite"),
    ],
)
@pytest.mark.parametrize(
    "inner",
    [
        adam,
        lambda: optax.chain(exact_mean("data"), optax.sgd(0.1)),
        lambda: optax.masked(sign_mean("data"), True),
    ],
)
def test_optax_wrappers_that_cannot_hold_an_exchange_are_refused(wrap, instead, inner):
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match=instead),
    ):
        onebit_jax.init(
            optax.chain(wrap(inner()), optax.identity()), start(), mesh_of(WORKERS)
        )


def test_optax_wrappers_may_stand_behind_the_exchange():
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(exact_mean("data"), optax.apply_if_finite(optax.sgd(1.0), 3))
        updates = Workers(tx, start(), mesh_of(WORKERS)).update(gradients(0))
    np.testing.assert_allclose(updates, -jnp.mean(gradients(0), 0), rtol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("has_aux", [False, True])
def test_data_parallel_is_one_big_batch(axis_type, has_aux):
    """With exact exchange and SGD it is gradient descent on the whole batch."""
    x = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)

    def loss(p, batch, shift):
        value = jnp.mean(jnp.square(batch @ p - shift))
        return (value, {"twice": 2 * value}) if has_aux else value

    tx = optax.chain(exact_mean("data"), optax.sgd(0.1))
    run = data_parallel(loss, tx, mesh_of(WORKERS, axis_type), has_aux=has_aux)
    own = jnp.zeros(5)
    params, state = run.init(own)
    p = np.zeros(5)
    for _ in range(5):
        params, state, value, *aux = run.step(params, state, x, jnp.float32(1.0))
        residual = x @ p - 1.0
        np.testing.assert_allclose(value, np.mean(residual**2), rtol=1e-5)
        if has_aux:
            np.testing.assert_allclose(aux[0]["twice"], 2 * value, rtol=1e-6)
        p = p - 0.1 * 2 * x.T @ residual / 16
        np.testing.assert_allclose(params, p, rtol=1e-5, atol=1e-6)
    assert not own.is_deleted(), "the caller's parameters are his own"


def test_auxiliary_integers_and_numbers_are_averaged_too():
    """A sum of as many bytes would overflow; a number of all workers is not sent."""

    def loss(p, x):
        byte = (200 * x[0, 0]).astype(jnp.uint8)
        return jnp.sum(p) * jnp.mean(x), {"byte": byte, "number": 3}

    tx = optax.chain(exact_mean("data"), optax.sgd(0.1))
    run = data_parallel(loss, tx, mesh_of(2), has_aux=True)
    given = *run.init(jnp.ones(1)), jnp.ones((2, 1))
    # Of the gradient, the loss and the byte.
    assert run.step.lower(*given).as_text().count("stablehlo.all_reduce") == 3
    *_, aux = run.step(*given)
    assert aux == {"byte": 200.0, "number": 3.0}
    assert {x.dtype.name for x in aux.values()} == {"float32"}


def test_data_parallel_over_one_axis_of_two():
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    tx = onebit_adam(0.1, sign_mean("data", block_size=32), freeze_at(2))

    def loss(p, x):
        return jnp.mean(jnp.square(p[None] - x))

    runs = [
        data_parallel(loss, tx, mesh, axis="data"),
        data_parallel(loss, tx, mesh_of(4)),
    ]
    x = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)
    results = []
    for run in runs:
        params, state = run.init(jnp.zeros(40))
        for _ in range(5):
            params, state, _ = jax.block_until_ready(run.step(params, state, x))
        results.append(np.asarray(params))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "wrap", [skip_nonfinite, lambda tx, axis: accumulate(tx, 2, axis)]
)
def test_what_is_wrapped_is_traced_once(wrap):
    """Twice, Python would take twice as long before each compilation."""
    calls = []

    def update_fn(updates, state, params=None):
        del params
        calls.append(updates)
        return updates, state

    counted = optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)
    tx = wrap(optax.chain(exact_mean("data"), counted), "data")
    Workers(tx, start(), mesh_of(WORKERS)).update(gradients(0))
    assert len(calls) == 1
