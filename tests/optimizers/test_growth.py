"""A frozen variance grows with the mean squares of the mean gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import GrowthByMeanSquares, exact_mean, freeze_at, onebit_adam

WORKERS, COUNTS, SIDE = 4, 2000, 16
SHAPES = {
    "dense": (16, 18),
    "rank one": (20, 16),
    "stack": (2, 17, 16),
    "narrow": (15, 20),
    "heads": (12, 3, 18),
    "vector": (21,),
    "scalar": (),
}


def own_gradients():
    """Each worker's own, whose mean squares are far above those of their mean."""
    rng = np.random.default_rng(0)
    own = {k: rng.normal(0.3, 1, size=(WORKERS, *s)) for k, s in SHAPES.items()}
    rows, columns = (rng.normal(1, 0.5, size=n) for n in SHAPES["rank one"])
    each = rng.normal(0.5, 1, size=(WORKERS, 1, 1))
    return {**own, "rank one": each * np.outer(rows, columns)}


def mean_squares(x):
    """Of all values, or of each matrix, and those of its rows and columns."""
    if x.ndim < 2 or min(x.shape[-2:]) < SIDE:
        return {"whole": np.mean(x**2)}
    axes = {"whole": (-2, -1), "rows": -1, "columns": -2}
    return {k: np.mean(x**2, axis=a, keepdims=True) for k, a in axes.items()}


def test_random_sums_say_the_mean_squares_of_the_mean_in_the_mean():
    """At five standard errors, which one correct draw in a million would exceed."""
    growth, own = GrowthByMeanSquares(period=1), own_gradients()

    def one(count, own):
        state = growth.init(own)
        follow = functools.partial(growth.follow, decay=0.0, axes=("data",))
        return follow(own, state, count=count).now

    workers = jax.vmap(one, in_axes=(None, 0), out_axes=None, axis_name="data")
    said = jax.jit(jax.vmap(workers, in_axes=(0, None)))(
        jnp.arange(1, 1 + COUNTS), jax.tree.map(jnp.float32, own)
    )
    for name, estimates in jax.device_get(said).items():
        expected = mean_squares(np.mean(own[name], axis=0))
        found = {k: x for k, x in estimates._asdict().items() if x is not None}
        assert found.keys() == expected.keys()
        for part, x in found.items():
            # A scalar's is exact but for rounding.
            error = np.std(x, axis=0) / np.sqrt(COUNTS) + 1e-6 * expected[part]
            far = np.abs(x.mean(axis=0) - expected[part]) / error
            assert far.max() < 5, (name, part)
        # That of eight sums, or of a matrix's many, differs less than that of one.
        spread = np.std(found["whole"], axis=0) / expected["whole"]
        assert spread.max() < (2 if name == "rank one" else 0.8), name


def ones(*shape, rows=(), times=1.0):
    x = np.ones(shape)
    x[..., list(rows), :] *= times
    return x


# The gradient before the freeze and after it, and the variance then.
MATRIX, NARROW, STACK = (SIDE, 20), (15, 20), (2, SIDE, 17)
AFTER = {
    "evenly": (ones(*MATRIX), 3 * ones(*MATRIX), 9.0),
    "a row": (
        ones(*MATRIX),
        ones(*MATRIX, rows=[2], times=3),
        ones(*MATRIX, rows=[2], times=9),
    ),
    "a column": (
        ones(20, SIDE).T,
        ones(20, SIDE, rows=[2], times=3).T,
        ones(20, SIDE, rows=[2], times=9).T,
    ),
    # A quarter of the matrix's own growth.
    "a row falls silent": (
        ones(*MATRIX),
        ones(*MATRIX, rows=[2], times=0),
        ones(*MATRIX, rows=[2], times=15 / 16 / 4),
    ),
    "a silent row wakes": (ones(*MATRIX, rows=[2], times=0), ones(*MATRIX), 1.0),
    "a silent matrix wakes": (
        np.concatenate([ones(1, *STACK[1:]), 0 * ones(1, *STACK[1:])]),
        np.concatenate([2 * ones(1, *STACK[1:]), 5 * ones(1, *STACK[1:])]),
        np.array([4.0, 25.0])[:, None, None],
    ),
    "no matrix": (ones(*NARROW), ones(*NARROW, rows=[2], times=4), 2.0),
    "a vector": (np.ones(9), 2 * np.ones(9), 4.0),
    "a silent vector": (np.zeros(9), 2 * np.ones(9), 4.0),
    "no more": (np.ones(9), np.zeros(9), 0.0),
    "an overflow": (ones(*MATRIX), ones(*MATRIX, rows=[2], times=3e19), 1.0),
    "nothing": (np.zeros((0, SIDE)), np.zeros((0, SIDE)), 0.0),
}


@functools.cache
def grown():
    """The variances of `AFTER`, of weights that are an eighth before and half after."""
    growth = GrowthByMeanSquares()
    before, after = (
        {k: jnp.asarray(scene[i], jnp.float32) for k, scene in AFTER.items()}
        for i in (0, 1)
    )

    @jax.jit
    def both(before, after):
        init = growth.init(before)
        frozen = growth.follow_mean(before, init, 7 / 8).now
        now = growth.follow_mean(after, init, 1 / 2).now
        # Where there was nothing the floor is the mean.
        nu = {
            k: jnp.where(g == 0, jnp.mean(jnp.square(g)), jnp.square(g)) / 8
            for k, g in before.items()
        }
        state = init._replace(now=now, frozen=frozen)
        return growth.grow(nu, state, weight_now=0.5, weight_frozen=0.125)

    return both(before, after)


@pytest.mark.parametrize("scene", AFTER)
def test_the_variance_grows_with_its_row_its_column_and_the_whole(scene):
    _, after, expected = AFTER[scene]
    expected = np.broadcast_to(expected, after.shape)
    np.testing.assert_allclose(8 * grown()[scene], expected, rtol=1e-4)


FREEZE, STEPS, LATE, WOKEN = 50, 650, 350, 80
SPIKE = 64  # a step that measures, of steps counted from 1
B1, B2 = 0.5, 0.99
ODD = np.array([1.0, -1.0] * (WORKERS // 2))
SIGNS = np.random.default_rng(1).choice([-1.0, 1.0], size=(24, 16))
# Gone in the mean of the workers, and ten times as large as any signal.
NOISE = ODD[:, None, None] * np.random.default_rng(2).normal(0, 10, size=(24, 16))


def scenes(step):
    """All workers' gradients by leaf, each named for what becomes of them."""
    after, woken = step > FREEZE, step > WOKEN
    signs = jnp.stack([jnp.float32(SIGNS)] * WORKERS)
    return {
        "empty": jnp.zeros((WORKERS, 0, 16)),
        "grows": signs * jnp.where(after, 1.0, 0.1) + jnp.float32(NOISE),
        "overflows": signs.at[:, 2, 3].multiply(jnp.where(step == SPIKE, 3e19, 1.0)),
        # Of one value a row and a column sums with signs are exact.
        "one a line": signs[:, :16] * jnp.eye(16)[None],
        "scalar": jnp.ones(WORKERS),
        "wakes": signs * jnp.where(woken, 1.0, 0.0),
    }


@functools.cache
def history(bias_correction):
    """All updates of the parameters, (steps, *shape), by leaf, by sign."""
    tx = onebit_adam(
        1.0, exact_mean("data"), freeze_at(FREEZE), b1=B1, b2=B2,
        bias_correction=bias_correction,
    )  # fmt: skip
    update = jax.vmap(tx.update, in_axes=(0, None), out_axes=None, axis_name="data")

    def step(state, number):
        updates, state = update(scenes(number), state)
        return state, updates

    first = tx.init(jax.tree.map(lambda g: g[0], scenes(1)))
    numbers = jnp.arange(1, STEPS + 1)
    state, updates = jax.jit(lambda: lax.scan(step, first, numbers))()
    steps = {k: int(n) for k, n in onebit_jax.steps_by_stage(state).items()}
    measuring = STEPS // 8 - FREEZE // 8
    compressed = STEPS - FREEZE - measuring
    assert steps == {
        "warmup": FREEZE, "compressed/measuring": measuring, "compressed": compressed
    }  # fmt: skip
    signs = {k: 1.0 for k in updates} | dict.fromkeys(("grows", "wakes"), SIGNS)
    return {k: -np.asarray(u) * signs[k] for k, u in updates.items()}


def root_mean_square(updates):
    return np.sqrt(np.mean(np.square(updates)))


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("leaf", ["one a line", "scalar"])
def test_what_grows_evenly_stays_even(leaf, bias_correction):
    """At the freeze, between two measurements, and ever after, as their sums are exact.

    Without a correction the mean square is as it was for up to a period.
    """
    found = np.abs(history(bias_correction)[leaf].reshape(STEPS, -1))
    found = found.max(axis=1)
    if bias_correction:
        np.testing.assert_allclose(found, 1, rtol=1e-4)
        return
    steps = np.arange(1, STEPS + 1)
    adams = (1 - B1**steps) / np.sqrt(1 - B2**steps)
    np.testing.assert_allclose(found[:FREEZE], adams[:FREEZE], rtol=1e-4)
    np.testing.assert_allclose(found, adams, rtol=0.06)


def test_noise_of_the_workers_that_is_gone_in_their_mean_hides_no_growth():
    """Their own squares hardly grow, where those of the mean grow a hundredfold."""
    late = history(True)["grows"][LATE:]
    assert 0.9 < root_mean_square(late) < 1.25
    assert np.all(late > 0)


def test_a_leaf_without_gradients_before_the_freeze_has_the_variance_of_the_leaf():
    found = history(True)["wakes"]
    assert not found[:WOKEN].any()
    assert found.max() <= 3
    assert 1 / 1.1 < root_mean_square(found[LATE:]) < 1.1


def test_an_overflow_does_not_become_nan():
    """It says nothing of the growth, and other rows and columns go on."""
    found = np.abs(history(True)["overflows"])
    assert np.all(np.isfinite(found))
    assert 0.9 < root_mean_square(found[LATE:]) < 1.25


def test_a_leaf_of_nothing_is_no_division_by_zero():
    assert history(True)["empty"].shape == (STEPS, 0, 16)
    update = jax.vmap(
        lambda state: GrowthByMeanSquares(period=1).follow(
            {}, state, decay=0.9, count=jnp.int32(1), axes=("data",)
        ),
        axis_name="data", axis_size=2, in_axes=None, out_axes=None,
    )  # fmt: skip
    state = GrowthByMeanSquares().init({})
    assert update(state) == state._replace(measured=1)


@pytest.mark.parametrize("period", [1, 3])
def test_a_step_that_measures_sends_its_sums_beside_what_others_send(period):
    growth = GrowthByMeanSquares(period)
    tx = onebit_adam(0.1, exact_mean("data"), freeze_at(2), growth=growth)
    params = {"w": jnp.zeros((2, 20, 30)), "b": jnp.zeros(7)}
    own = jax.tree.map(lambda p: jnp.ones((WORKERS, *p.shape)), params)
    run = Workers(tx, params, mesh_of(WORKERS))
    traffic = run.traffic(own)
    (told,) = growth.wire_cost(params, ("data",))
    sums = 2 * (20 + 30) + 8
    assert (told.op, told.axes, told.bytes) == ("all-reduce", ("data",), 4 * sums)
    values = 4 * (2 * 20 * 30 + 7)
    exact = onebit_jax.sent_bytes(
        [onebit_jax.Transfer("all-reduce", values, ("data",))], {"data": WORKERS}
    )
    more = onebit_jax.sent_bytes([told], {"data": WORKERS})
    assert traffic.sent_bytes("warmup") == exact
    assert traffic.sent_bytes("compressed/measuring") == exact + more
    if period > 1:  # Of a choice that is none nothing may be left.
        assert traffic.sent_bytes("compressed") == exact
    for _ in range(6):
        run.update(own)
    measuring = {1: 4, 3: 2}[period]
    assert onebit_jax.steps_by_stage(run.state) == {
        "warmup": 2, "compressed/measuring": measuring, "compressed": 4 - measuring
    }  # fmt: skip
