"""A frozen variance grows with the mean squares of the mean gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizers.cases import UntoldMean
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import (
    Compressed,
    GrowthByMeanSquares,
    freeze_at,
    onebit_adam,
)

WORKERS, COUNTS, SIDE = 4, 2000, 16
SHAPES = {
    "dense": (16, 18),
    "rank one": (20, 16),
    "stack": (2, 17, 16),
    "like the stack": (17, 16),
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
    said = jax.device_get(said)
    # The matrices of each shape one after another.
    matrices = {
        (x.rows.shape[-2], x.columns.shape[-1]): iter(
            [x._make(part[:, i] for part in x) for i in range(x.whole.shape[1])]
        )
        for x in said.matrices
    }
    wholes = iter(said.wholes.T)
    for name in sorted(own):
        expected = mean_squares(np.mean(own[name], axis=0))
        found = {"whole": None}
        if "rows" in expected:
            of_shape = matrices[SHAPES[name][-2:]]
            each = [next(of_shape) for _ in range(math.prod(SHAPES[name][:-2]))]
            found = jax.tree.map(lambda *x: np.stack(x, axis=1), *each)._asdict()
            found = {k: x.reshape(COUNTS, *expected[k].shape) for k, x in found.items()}
        else:
            found["whole"] = next(wholes)
        assert found.keys() == expected.keys()
        for part, x in found.items():
            # A scalar's is exact but for rounding.
            error = np.std(x, axis=0) / np.sqrt(COUNTS) + 1e-6 * expected[part]
            far = np.abs(x.mean(axis=0) - expected[part]) / error
            assert far.max() < 5, (name, part)
        # That of eight sums, or of a matrix's many, differs less than that of one.
        spread = np.std(found["whole"], axis=0) / expected["whole"]
        assert spread.max() < (2 if name == "rank one" else 0.8), name


def test_of_a_leaf_without_values_the_mean_square_is_zero():
    growth = GrowthByMeanSquares(period=1)

    def measured(own):
        follow = functools.partial(growth.follow, decay=0.5, count=jnp.int32(1))
        return follow(own, growth.init(own), axes=("data",)).now.wholes

    found = jax.jit(jax.vmap(measured, axis_name="data"))(jnp.zeros((2, 0, 3)))
    np.testing.assert_array_equal(found, 0)


def ones(*shape, rows=(), times=1.0):
    x = np.ones(shape)
    x[..., list(rows), :] *= times
    return x


# The gradient before the freeze and after it, and the variance then.
MATRIX, NARROW, STACK = (SIDE, 20), (15, 20), (2, SIDE, 17)
AFTER = {
    "evenly": (ones(*MATRIX), 3 * ones(*MATRIX), 9.0),
    # The product of a row's growth and a column's would overflow.
    "far": (ones(*MATRIX), 1e10 * ones(*MATRIX), 1e20),
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
    # The mean squares of its row and of its column are not zero, the matrix's is.
    "a matrix of one tiny value wakes": (
        np.pad([[6e-18]], ((0, 99), (0, 19))),
        2 * ones(100, 20),
        4.0,
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
        {
            k: jnp.square(jnp.asarray(scene[i], jnp.float32))
            for k, scene in AFTER.items()
        }
        for i in (0, 1)
    )

    @jax.jit
    def both(before, after):
        # Where there was nothing the floor is the mean.
        nu = {k: jnp.where(v == 0, jnp.mean(v), v) / 8 for k, v in before.items()}
        eighth, half = (
            {k: v * s for k, v in x.items()}
            for x, s in ((before, 1 / 8), (after, 1 / 2))
        )
        state = growth.freeze(eighth, growth.init(before))
        state = state._replace(now=growth.freeze(half, state).now)
        return growth.grow(nu, state, weight_now=0.5, weight_frozen=0.125)

    return both(before, after)


@pytest.mark.parametrize("scene", AFTER)
def test_the_variance_grows_with_its_row_its_column_and_the_whole(scene):
    _, after, expected = AFTER[scene]
    expected = np.broadcast_to(expected, after.shape)
    np.testing.assert_allclose(8 * grown()[scene], expected, rtol=1e-4)


@pytest.mark.parametrize("period", [1, 3])
def test_a_step_that_measures_sends_its_sums_beside_what_others_send(period):
    parts = Compressed(growth=GrowthByMeanSquares(period))
    tx = onebit_adam(0.1, UntoldMean(("data",)), freeze_at(2), compressed=parts)
    params = {"w": jnp.zeros((2, 20, 30)), "b": jnp.zeros(7)}
    own = jax.tree.map(lambda p: jnp.ones((WORKERS, *p.shape)), params)
    run = Workers(tx, params, mesh_of(WORKERS))
    traffic = run.traffic(own)
    exact, more = (
        onebit_jax.sent_bytes(
            [onebit_jax.Transfer("all-reduce", 4 * values, ("data",))],
            {"data": WORKERS},
        )
        for values in (2 * 20 * 30 + 7, 2 * (20 + 30) + 8)
    )
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
