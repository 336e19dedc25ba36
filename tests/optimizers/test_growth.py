"""A frozen variance grows with the mean squares of its rows and columns."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from virtual_workers import Workers, mesh_of

import onebit_jax
from onebit_jax import exact_mean, freeze_at, onebit_adam, sign_mean
from onebit_jax.optimizers.onebit_adam import GROWTH

SHAPES = {"stack": (2, 18, 16), "matrix": (20, 33), "narrow": (40, 15), "vector": (40,)}
COUNTS = (20 + 33, 2 * (18 + 16))  # lines of the matrix and, behind it, of the stack
LINES = sum(COUNTS)
PERIOD = 32


def factors(seed):
    """For each leaf, factors that are a product of a row's and a column's."""
    rng = np.random.default_rng(seed)

    def of(shape):
        if len(shape) < 2:
            return np.full(shape, rng.uniform(0.5, 2))
        rows = rng.uniform(0.8, 1.2, size=(*shape[:-1], 1))
        return rows * rng.uniform(0.8, 1.2, size=(*shape[:-2], 1, shape[-1]))

    return {name: of(shape).astype(np.float32) for name, shape in SHAPES.items()}


def signs(workers=4):
    rng = np.random.default_rng(5)
    return {k: rng.choice([-1.0, 1.0], size=s) for k, s in SHAPES.items()}


def test_the_variance_grows_with_rows_and_columns():
    """The paper's update is as many times too large as the gradients have grown."""
    tx = onebit_adam(1.0, exact_mean("data"), freeze_at(5), b1=0.5, b2=0.8)
    run = Workers(tx, {k: jnp.zeros(s) for k, s in SHAPES.items()}, mesh_of(4))
    before, after = factors(0), factors(1)
    after["stack"][1] *= 1.2  # a matrix of a stack alone
    for step in range(150):
        magnitudes = before if step < 5 else after
        own = {
            k: jnp.asarray(np.stack([s * magnitudes[k]] * 4), jnp.float32)
            for k, s in signs().items()
        }
        updates = run.update(own)
    for name in ("stack", "matrix", "vector"):
        np.testing.assert_allclose(-updates[name], signs()[name], rtol=1e-3)
    # Too few columns for lines of their own: a leaf's power alone is followed.
    assert np.abs(np.abs(updates["narrow"]) - 1).max() > 0.1


def stepwise(own, steps, freeze=5, workers=2, exchange=exact_mean, **options):
    """Updates of a learning rate of 1, and the state, step by step."""
    options = {"b1": 0.5, "b2": 0.8} | options
    tx = onebit_adam(1.0, exchange("data"), freeze_at(freeze), **options)
    run = Workers(tx, jax.tree.map(jnp.zeros_like, own(0)), mesh_of(workers))
    for step in range(steps):
        gradients = jax.tree.map(lambda g: jnp.stack([g] * workers), own(step))
        yield run.update(gradients), run.state


def trained(own, steps, **options):
    """What `stepwise` ends with."""
    *_, last = stepwise(own, steps, **options)
    return last


@pytest.mark.parametrize("options", [{}, {"bias_correction": False}])
@pytest.mark.parametrize("before", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(32, 48), (3, 18, 16)])
def test_what_grows_evenly_stays_even_in_every_step(shape, before, options):
    """Lines are exchanged in 32 different steps: none may lag behind the others."""
    sign = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], shape), jnp.float32)

    def grown(step):
        return sign * (before if step < 5 else 1.0)

    steps = stepwise(grown, 40, b2=0.95, **options)
    for updates, _ in itertools.islice(steps, 5, None):
        magnitude = np.abs(updates)
        np.testing.assert_allclose(magnitude, magnitude.max(), rtol=1e-4)


@pytest.mark.parametrize("alive", [1, 8])
def test_a_row_that_was_partly_silent_learns_as_others(alive):
    """Its raised variances must not be multiplied by all that the row has grown."""
    sign = jnp.asarray(
        np.random.default_rng(0).choice([-1.0, 1.0], (32, 64)), jnp.float32
    )
    partly = sign.at[3, alive:].set(0.0)
    updates, _ = trained(lambda t: partly if t < 5 else sign, 150)
    np.testing.assert_allclose(-updates[3, alive:], sign[3, alive:], rtol=0.1)
    # What was alive has grown less than its row.
    assert np.all(np.abs(updates[3, :alive]) > 0.1)


def test_a_line_that_falls_silent_keeps_a_quarter_of_its_variance():
    """The signs of others in its block go on, and would be divided by nothing."""
    sign = jnp.asarray(signs()["matrix"], jnp.float32)
    quiet = sign.at[3].mul(1e-3)
    updates, _ = trained(lambda t: sign if t < 5 else quiet, 150)
    leaf = (19 + 1e-6) / 20
    np.testing.assert_allclose(
        -updates[3], 1e-3 * sign[3] / np.sqrt(leaf / 4), rtol=1e-3
    )


def test_an_overflow_does_not_become_nan():
    grown = lambda t: jnp.ones((16, 16)).at[2, 3].set(3e19 if t == 7 else 1.0)  # noqa: E731
    updates, _ = trained(grown, 50)
    assert np.all(np.isfinite(updates))


def test_a_leaf_of_nothing_has_no_lines():
    own = {"none": jnp.zeros((0, 16, 16)), "some": jnp.ones((16, 16))}
    updates, state = trained(lambda t: own, 7)
    assert updates["none"].shape == (0, 16, 16)
    assert np.all(np.isfinite(updates["some"]))
    assert state[0].growth.now.shares.shape == (32,)
    trained(lambda t: own["none"], 7)


def test_every_line_is_exchanged_once_a_period():
    tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3))
    run = Workers(tx, {k: jnp.zeros(s) for k, s in SHAPES.items()}, mesh_of(4))
    rng = np.random.default_rng(0)

    def step():
        run.update(
            {
                k: jnp.asarray(rng.normal(size=(4, *s)), jnp.float32)
                for k, s in SHAPES.items()
            }
        )
        return np.asarray(run.state[0].growth.now.shares)

    for _ in range(3):
        lines = step()
    assert lines.shape == (LINES,)
    np.testing.assert_array_equal(lines, run.state[0].growth.frozen.shares)
    exchanged = np.zeros(LINES, int)
    for _ in range(PERIOD):
        before, lines = lines, step()
        exchanged += lines != before
        now = lines != before
        own = np.mean(run.state[0].growth.line_means.value, axis=0)
        shares = own / np.repeat(
            [float(run.state[0].growth.now.leaves[k]) for k in ("matrix", "stack")],
            COUNTS,
        )
        np.testing.assert_allclose(lines[now], shares[now], rtol=1e-5)
    # The last of them again and again, where a period is longer than they are.
    assert exchanged.min() == 1
    assert exchanged.sum() <= LINES + PERIOD


def test_lines_add_little_to_what_is_sent():
    """Once a period: of a square matrix of 512, 2 / 16 of a bit a row and column."""
    params, mesh = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}, mesh_of(4)

    def sent(**options):
        tx = onebit_adam(0.1, sign_mean("data"), freeze_at(3), **options)
        loss = lambda p, x: jnp.sum(jnp.square(p["w"])) * jnp.mean(x)  # noqa: E731
        state = onebit_jax.abstract_state(tx, params, mesh)
        batch = jax.ShapeDtypeStruct((4, 1), jnp.float32)
        step = onebit_jax.data_parallel(loss, tx, mesh).step
        traffic = onebit_jax.traffic(step.lower(params, state, batch).compile(), mesh)
        return [c for c in traffic.collectives if c.dtype == "f32"]

    ours, published = sent(), sent(**onebit_jax.AS_PUBLISHED)
    in_stage = lambda cs, s: sum(c.bytes for c in cs if c.stage == s)  # noqa: E731
    for stage, lines in (("warmup", 1024), ("compressed", 1024 // PERIOD)):
        more = in_stage(ours, stage) - in_stage(published, stage)
        assert more == 4 * (1 + lines), stage
        (told,) = GROWTH.wire_cost(params, ("data",), all_lines=stage == "warmup")
        assert told.bytes == more, stage


def test_a_state_of_other_workers_is_refused_without_an_exchange_that_looks():
    tx = onebit_adam(0.1, exact_mean("data"), freeze_at(3))
    params = {"matrix": jnp.zeros(SHAPES["matrix"])}
    state = onebit_jax.init(tx, params, mesh_of(4))
    state = jax.device_put(state, jax.NamedSharding(mesh_of(2), P()))

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(2),
        in_specs=(P("data"), onebit_jax.state_specs(state)),
        out_specs=P(),
    )
    def update(own, state):
        return tx.update({"matrix": own[0]}, state)[0]

    with pytest.raises(ValueError, match="state was not made for these leaves"):
        jax.jit(update)(jnp.zeros((2, *SHAPES["matrix"])), state)
